"""The main job, end to end, as a user types it: quantize tiny-r1, run and score every result, print
one table.

    python tools/demo.py --out out/demo
    python tools/demo.py --model out/smollm2 --out out/demo-real

Of another model the schemes are two, calibrated on 32 documents, and nothing is scored: the text is
quantkit's documentation.

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
FEW = ("awq-w4a16", "rtn-w4a16")
HELDOUT = "tiny-heldout.jsonl"
QUESTION = "What is the capital of France?"
COLUMNS = (
    "scheme",
    "format",
    "size MB",
    "quantize s",
    "KL x1e-3",
    "perplexity",
    "experts same",
    "answers",
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


def measure(model: str | Path, source: str, heldout: Path, evaluation: Path) -> dict[str, Any]:
    """Size, distance from the source, and accuracy of one checkpoint of tiny-r1, or an answer of
    another."""
    about = quantkit("inspect", model)
    baseline = () if str(model) == source else ("--baseline", source)
    found = {
        "scheme": about["scheme"] or "source",
        "format": about["format"],
        "size MB": about["bytes"] / 1e6,
    }
    if source != SOURCE:
        quality = quantkit("ppl", model, "--text", heldout, "--limit", "8", *baseline)
        answer = quantkit("run", model, QUESTION, "--max-tokens", "32")
        found |= {"tokens/s": answer["tokens_per_second"], "answer": answer["text"]}
    else:
        quality = quantkit("ppl", model, "--text", heldout, *baseline)
        score = quantkit("eval", model, "--tasks", "tiny-math", "--out", evaluation)
        result = score["results"]["tiny-math"]
        found |= {"tiny-math": result["accuracy"], "stderr": result["stderr"]}
        found |= {"tokens/s": result["tokens"]["total"] / result["seconds"]}
    return found | {
        "KL x1e-3": 1e3 * quality["kl"] if "kl" in quality else None,
        "perplexity": quality["ppl"],
        "experts same": quality.get("expert_agree"),
    }


def rows(out: Path, source: str, heldout: Path) -> list[dict[str, Any]]:
    table = [measure(source, source, heldout, out / "eval" / "source")]
    options = () if source == SOURCE else ("--samples", "32")
    for scheme in SCHEMES if source == SOURCE else FEW:
        start = time.perf_counter()
        quantkit(
            "quantize", source, "--scheme", scheme, "--out", out / scheme, "--overwrite", *options
        )
        seconds = time.perf_counter() - start
        found = measure(out / scheme, source, heldout, out / "eval" / scheme)
        table.append({**found, "quantize s": seconds, "scheme": scheme})
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
        f"{100 * row['tiny-math']:.1f} ± {100 * row['stderr']:.1f} %"
        if "tiny-math" in row
        else row["answer"],
        number("tokens/s", ".0f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", default=SOURCE)
    given = parser.parse_args()
    out: Path = given.out
    shutil.rmtree(out / "eval", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    from quantkit.cli.console import out as terminal
    from quantkit.common.assets import asset

    start = time.perf_counter()
    heldout = asset("eval", "data", HELDOUT)
    if given.model != SOURCE:
        heldout = out / "documentation.txt"
        heldout.write_text(Path("docs/evaluation.md").read_text(encoding="utf-8"))
    table = rows(out, given.model, heldout)
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    shown = Table(title=f"{given.model}, {machine}", box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:  # in 100 columns, those of a log
        shown.add_column(
            name.replace(" ", "\n"), no_wrap=name != "answers", min_width=12 * (name == "answers")
        )
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
