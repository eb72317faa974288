"""The main job, end to end, as a user types it: quantize tiny-r1, run and score every result, print
one table.

    python tools/demo.py --out out/demo

Every figure comes from `quantkit` commands run as subprocesses. The table is also written to
OUT/table.md and OUT/table.json.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

SOURCE = "tiny-r1"
SCHEMES = ("awq-w4a16", "fp4-w4a16", "int8-a8w8c16", "rtn-w4a16")
HELDOUT = "tiny-heldout.jsonl"
COLUMNS = (
    "scheme",
    "format",
    "size MB",
    "quantize s",
    "KL x1e-3",
    "perplexity",
    "experts same",
    "tiny-math",
    "tokens/s",
)


def quantkit(*arguments: str | Path) -> dict[str, Any]:
    """Run one command with --json and return its object; its progress goes to the terminal."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments), "--json"]
    print("$ quantkit", *arguments, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def measure(model: str | Path, heldout: Path, evaluation: Path) -> dict[str, Any]:
    """Size, distance from the source and accuracy of one checkpoint."""
    about = quantkit("inspect", model)
    quality = quantkit(
        "ppl", model, "--text", heldout, *(() if model == SOURCE else ("--baseline", SOURCE))
    )
    score = quantkit("eval", model, "--tasks", "tiny-math", "--out", evaluation)
    result = score["results"]["tiny-math"]
    return {
        "scheme": about["scheme"] or "source",
        "format": about["format"],
        "size MB": about["bytes"] / 1e6,
        "KL x1e-3": 1e3 * quality["kl"] if "kl" in quality else None,
        "perplexity": quality["ppl"],
        "experts same": quality.get("expert_agree"),
        "tiny-math": result["accuracy"],
        "stderr": result["stderr"],
        "tokens/s": result["tokens"]["total"] / result["seconds"],
    }


def rows(out: Path, heldout: Path) -> list[dict[str, Any]]:
    table = [measure(SOURCE, heldout, out / "eval" / "source")]
    for scheme in SCHEMES:
        start = time.perf_counter()
        quantkit("quantize", SOURCE, "--scheme", scheme, "--out", out / scheme, "--overwrite")
        seconds = time.perf_counter() - start
        table.append(
            {
                **measure(out / scheme, heldout, out / "eval" / scheme),
                "quantize s": seconds,
                "scheme": scheme,
            }
        )
    return table


def cells(row: dict[str, Any]) -> list[str]:
    def number(key: str, style: str) -> str:
        return "" if row.get(key) is None else format(row[key], style)

    return [
        row["scheme"],
        row["format"],
        number("size MB", ".1f"),
        number("quantize s", ".1f"),
        number("KL x1e-3", ".2f"),
        number("perplexity", ".4f"),
        number("experts same", ".4f"),
        f"{100 * row['tiny-math']:.1f} ± {100 * row['stderr']:.1f} %",
        number("tokens/s", ".0f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    out: Path = parser.parse_args().out
    shutil.rmtree(out / "eval", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    from quantkit.cli.console import out as terminal
    from quantkit.common.assets import asset

    start = time.perf_counter()
    table = rows(out, asset("eval", "data", HELDOUT))
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    shown = Table(*COLUMNS, title=f"tiny-r1, {machine}")
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in table:
        shown.add_row(*cells(row))
        lines.append(f"| {' | '.join(cells(row))} |")
    terminal.print(shown)
    (out / "table.md").write_text("\n".join(lines) + f"\n\n{machine}\n")
    (out / "table.json").write_text(
        json.dumps({"machine": machine, "rows": table}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
