"""bench.json and bench.html of one grid: plots, the table, and published results under their own
hardware."""

import json
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.common import plots
from quantkit.common.atomic_write import write_atomic
from quantkit.common.pages import render_page

COLUMNS = {
    "input_len": "input tokens",
    "concurrency": "at a time",
    "ttft_s": "TTFT, s",
    "tpot_ms": "TPOT, ms",
    "tps": "tokens/s each",
    "system_tps": "tokens/s all",
    "latency_s": "latency, s",
}
"""Labels of the columns of published results."""
_TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(out: Path, result: dict[str, Any]) -> None:
    """`result` as `quantkit bench --json` prints it: `hardware` is the machine in one line,
    `published` what others published for this model."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "bench.json", json.dumps(result, indent=1) + "\n")
    rows = result["rows"]
    drawn = [
        _curves(rows, "tpot_ms", "TPOT, ms (mean)"),
        _curves(rows, "system_tps", "output tokens/s, all requests"),
        _curves(rows, "ttft_s", "TTFT, s (mean)"),
    ]
    page = render_page(_TEMPLATE, result=result, plots=drawn, columns=COLUMNS, version=__version__)
    write_atomic(out / "bench.html", page)


def _curves(rows: list[dict[str, Any]], key: str, of: str) -> str:
    """One line per input length, over concurrency or the arrival rate."""
    across = "concurrency" if rows[0]["offered_rate"] is None else "offered_rate"
    axes, figure = plots.draw(5.0, 2.6)
    for input_len in sorted({row["input_len"] for row in rows}):
        points = [
            (row[across], row[key])
            for row in rows
            if row["input_len"] == input_len and row[key] is not None
        ]
        if points:
            axes.plot(
                *zip(*points),
                marker="o",
                clip_on=False,
                label=f"{input_len} tokens in" if input_len else "prompts given",
            )
    ticks = sorted({row[across] for row in rows})
    axes.set_xscale("log", base=2)
    label = "concurrency" if across == "concurrency" else "requests/s that arrive"
    plots.label_axes(axes, label, of)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return figure.svg()
