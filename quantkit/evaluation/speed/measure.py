"""Workloads, times of single requests, and the metrics of one cell of the grid.

Definitions are those of evalscope perf (1.14) and `vllm bench serve`, which agree, so that results
are comparable with published ones: latency = last token - send; TTFT = first token - send; TPOT =
(latency - TTFT) / (output_tokens - 1), per request, then the mean; ITL = the time between two
chunks of output, over all requests (a server may send several tokens in a chunk); TPS = 1000 / mean
TPOT, tokens per second of one request; system TPS = output tokens of all requests / wall time, from
the first send to the last token; request rate = finished requests / wall time; goodput = finished
requests that met every limit / wall time. Failed requests and the warm-up are excluded; replies of
one token have no TPOT.

Either `concurrency` clients each send a request when their last one is answered (closed loop), or
requests arrive at a rate with exponential intervals (Poisson, as `vllm bench serve
--request-rate`), at most `concurrency` of them running.

A grid is written as bench.json and bench.html: plots, the table, and published results under their
own hardware.
"""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np

from quantkit import __version__
from quantkit.common import plots
from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.pages import render_page
from quantkit.common.records import Row, holds_records, read_rows, read_text
from quantkit.common.result import JsonObject


@dataclass(frozen=True)
class Workload:
    """`requests` random prompts of `input_len` tokens, or `prompts` in turn, with `output_len`
    output tokens each. rate in requests/s; None for the closed loop."""

    input_len: int
    output_len: int
    requests: int
    concurrency: int
    seed: int = 0
    rate: float | None = None
    prompts: tuple[str, ...] = ()

    def warmup(self, requests: int, seed: int) -> "Workload":
        """Short requests of the same kind in a closed loop."""
        return replace(
            self, output_len=min(self.output_len, 8), requests=requests, seed=seed, rate=None
        )

    def rng(self, run: str = "") -> random.Random:
        """Generator of prompts and arrivals. Seeded by text: seeding with an int would ignore
        its sign."""
        return random.Random(f"{run} {self.seed}")

    def arrivals(self) -> Iterator[float]:
        """Arrival times of the requests in seconds after the start; all 0 without a rate."""
        generator = self.rng()
        at = 0.0
        for _ in range(self.requests):
            yield at
            at += generator.expovariate(self.rate) if self.rate is not None else 0.0


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file of records with "prompt", "text" or "messages", or like ShareGPT's; any
    other file has one prompt per line.

    Of a conversation, the first user message. Raises QuantkitError where the file cannot be read or
    holds no prompt.
    """
    if holds_records(path) and path.is_file():
        found = [prompt for _, row in read_rows(path) if (prompt := _prompt(row))]
    else:
        found = [line.strip() for line in read_text(path, "prompts").split("\n") if line.strip()]
    if not found:
        raise QuantkitError(
            f"prompts {path} holds no prompt",
            'a line is {"prompt": ...}, {"text": ...}, {"messages": [...]} or {"conversations": '
            "[...]}",
        )
    return found


def _prompt(record: Row) -> str:
    turns = record.get("messages") or record.get("conversations")
    said = [
        turn.get("content", turn.get("value"))
        for turn in (turns if isinstance(turns, list) else [])
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("user", "human")
    ]
    said = [record.get(name) for name in ("prompt", "text", "question")] + said
    return next((text.strip() for text in said if isinstance(text, str)), "")


PERCENTILES = (50, 90, 99)
LIMITS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "latency"}
"""Metrics of goodput limits, in milliseconds, named as in `vllm bench serve --goodput`."""


@dataclass(frozen=True)
class RequestTimes:
    """One finished request; times in seconds on one clock. With `error` set the rest is
    meaningless. gaps: intervals between chunks. counted: whether output_tokens counts tokens;
    otherwise it counts chunks."""

    sent: float
    first_token: float
    last_token: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    gaps: tuple[float, ...] = ()
    counted: bool = True

    @property
    def latency_s(self) -> float:
        return self.last_token - self.sent

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.sent

    @property
    def tpot_ms(self) -> float | None:
        """None for a reply of one token or one chunk."""
        if self.output_tokens < 2 or self.last_token == self.first_token:
            return None
        return 1e3 * (self.last_token - self.first_token) / (self.output_tokens - 1)

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether no limit (milliseconds by name of LIMITS) is exceeded. A missing TPOT exceeds
        none."""
        seen = {
            "ttft": 1e3 * self.ttft_s,
            "tpot": self.tpot_ms or 0.0,
            "e2el": 1e3 * self.latency_s,
        }
        return all(seen[name] <= limit for name, limit in limits.items())


@dataclass(frozen=True)
class SpeedRow:
    """One cell: means over its requests, percentiles by name such as `ttft_s_p99`. tps is per
    request, system_tps over all.

    left_out: percentiles with too few requests; the p-th needs 100 / (100 - p). offered_rate:
    requests/s sent; None for the closed loop. goodput: None without limits. uncounted: replies
    without a token count from the server, so that every chunk counts as one token.
    """

    input_len: int
    concurrency: int
    output_len: float
    requests: int
    failed: int
    prompt_tokens: float
    ttft_s: float
    tpot_ms: float | None
    tps: float | None
    system_tps: float
    latency_s: float
    percentiles: dict[str, float]
    first_error: str | None = None
    itl_ms: float | None = None
    request_rate: float = 0.0
    offered_rate: float | None = None
    goodput: float | None = None
    left_out: list[str] = field(default_factory=list)
    uncounted: int = 0

    def to_json(self) -> JsonObject:
        values = asdict(self)
        return values | values.pop("percentiles")


class Target(Protocol):
    """What is measured: the engine in this process, or a server."""

    name: str

    def check(self, work: Workload) -> None:
        """Raise QuantkitError where such requests cannot be served."""

    def run(self, work: Workload) -> Iterator[RequestTimes]:
        """Run the workload and yield the times of its requests as they finish."""

    def close(self) -> None:
        """Release resources held by this process."""


def measure_grid(
    target: Target,
    input_lens: Sequence[int],
    concurrencies: Sequence[int],
    output_len: int,
    *,
    rates: Sequence[float] = (),
    prompts: Sequence[str] = (),
    requests: int = 2,
    num_prompts: int | None = None,
    warmup: int = 1,
    seed: int = 0,
    limits: dict[str, float] | None = None,
    on_row: Callable[[SpeedRow], None] = lambda row: None,
) -> list[SpeedRow]:
    """Measure every input length at every concurrency, smallest first, or, with `rates`, at every
    arrival rate (requests/s, Poisson).

    A cell has `num_prompts` requests, or concurrency * requests where that is None. prompts: used
    in turn instead of random ones; input lengths are then ignored. The whole grid is checked before
    the first request. `warmup` requests per slot are excluded.
    """
    lengths = [0] if prompts else sorted(input_lens)
    loads: list[tuple[int, float | None]] = [(max(concurrencies), rate) for rate in sorted(rates)]
    loads = loads or [(slots, None) for slots in sorted(concurrencies)]
    cells = [
        Workload(
            length,
            output_len,
            num_prompts or slots * requests,
            slots,
            seed + number,
            rate,
            tuple(prompts),
        )
        for number, (length, (slots, rate)) in enumerate(itertools.product(lengths, loads))
    ]
    for cell in cells:
        target.check(cell)
    rows = []
    for number, cell in enumerate(cells):
        if warmup:
            slots = min(cell.concurrency, cell.requests)
            list(target.run(cell.warmup(warmup * slots, seed - 1 - number)))
        times = list(target.run(cell))
        rows.append(
            summarize(times, cell.input_len, cell.concurrency, rate=cell.rate, limits=limits)
        )
        on_row(rows[-1])
    return rows


def summarize(
    times: Sequence[RequestTimes],
    input_len: int,
    concurrency: int,
    *,
    rate: float | None = None,
    limits: dict[str, float] | None = None,
) -> SpeedRow:
    """Raises QuantkitError where every request failed."""
    good = [one for one in times if one.error is None]
    errors = [one.error for one in times if one.error is not None]
    if not good:
        raise QuantkitError(
            f"all {len(times)} requests of {input_len} tokens failed: {errors[0]}",
            "see the server's log",
        )
    series = {
        "ttft_s": [one.ttft_s for one in good],
        "latency_s": [one.latency_s for one in good],
        "tpot_ms": [one.tpot_ms for one in good if one.tpot_ms is not None],
        "itl_ms": [1e3 * gap for one in good for gap in one.gaps],
    }
    means = {name: fmean(values) for name, values in series.items() if values}
    wall = max(one.last_token for one in good) - min(one.sent for one in good)
    percentiles, left_out = {}, []
    for name, percent in itertools.product(means, PERCENTILES):
        if len(series[name]) >= min_values(percent):
            value = np.percentile(series[name], percent)
            percentiles[f"{name}_p{percent}"] = float(value)
        else:
            left_out.append(f"{name}_p{percent}")
    tpot = means.get("tpot_ms")
    return SpeedRow(
        input_len=input_len,
        concurrency=concurrency,
        output_len=fmean(one.output_tokens for one in good),
        requests=len(good),
        failed=len(errors),
        prompt_tokens=fmean(one.prompt_tokens for one in good),
        ttft_s=means["ttft_s"],
        tpot_ms=tpot,
        tps=1e3 / tpot if tpot is not None else None,
        system_tps=sum(one.output_tokens for one in good) / wall,
        latency_s=means["latency_s"],
        percentiles=percentiles,
        first_error=next(iter(errors), None),
        itl_ms=means.get("itl_ms"),
        request_rate=len(good) / wall,
        offered_rate=rate,
        goodput=sum(one.meets(limits) for one in good) / wall if limits else None,
        left_out=left_out,
        uncounted=sum(not one.counted for one in good),
    )


def min_values(percent: int) -> int:
    """Number of values that the percentile needs: with fewer, none lies beyond it."""
    return -(-100 // (100 - percent))


def now() -> float:
    return time.perf_counter()


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


def write_report(out: Path, result: JsonObject) -> None:
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


def _curves(rows: list[JsonObject], key: str, of: str) -> str:
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
