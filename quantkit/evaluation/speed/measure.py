"""Times of single requests, and the figures of one cell of the grid.

Definitions are evalscope perf's (1.14), so that figures can be laid beside published ones:
latency = last token - send; TTFT = first token - send; TPOT = (latency - TTFT) / (output_tokens - 1), per request, then the mean;
TPS = 1000 / mean TPOT, tokens per second as one user sees them; system TPS = output tokens of all requests / wall time, from the first send
to the last token. Failed requests and the warm-up are left out; replies of one token have no TPOT.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from quantkit.errors import QuantkitError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestTimes:
    """One finished request. Seconds on one clock; `error` is set, and the rest meaningless, where it failed."""

    sent: float
    first_token: float
    last_token: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @property
    def latency_s(self) -> float:
        return self.last_token - self.sent

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.sent

    @property
    def tpot_ms(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return 1e3 * (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class SpeedRow:
    """One cell: means over its requests, percentiles by name such as `ttft_s_p99`. tps is per request, system_tps over all."""

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

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return values | values.pop("percentiles")


class Target(Protocol):
    """Something that answers requests: the engine in this process, or a server."""

    name: str

    def check(self, input_len: int, output_len: int, concurrency: int) -> None:
        """Raise QuantkitError where such requests cannot be served."""

    def run(self, input_len: int, output_len: int, concurrency: int, requests: int, seed: int) -> Iterator[RequestTimes]:
        """Answer `requests` random prompts of `input_len` tokens with `output_len` tokens each, `concurrency` at a time."""

    def close(self) -> None:
        """End what answers, where it was started for this."""


def measure_grid(
    target: Target,
    input_lens: Sequence[int],
    concurrencies: Sequence[int],
    output_len: int,
    *,
    requests_per_slot: int = 2,
    warmup: int = 1,
    seed: int = 0,
    on_row: Callable[[SpeedRow], None] = lambda row: None,
) -> list[SpeedRow]:
    """Every input length at every concurrency, smallest first; each cell answers concurrency * requests_per_slot requests.

    The whole grid is checked before the first request. `warmup` requests a cell are answered and left out.
    """
    for input_len in input_lens:
        for concurrency in concurrencies:
            target.check(input_len, output_len, concurrency)
    rows = []
    for number, (input_len, concurrency) in enumerate((i, c) for i in sorted(input_lens) for c in sorted(concurrencies)):
        if warmup:
            list(target.run(input_len, min(output_len, 8), concurrency, warmup * concurrency, seed - 1 - number))
        times = list(target.run(input_len, output_len, concurrency, concurrency * requests_per_slot, seed + number))
        rows.append(summarize(times, input_len, concurrency))
        on_row(rows[-1])
    return rows


def summarize(times: Sequence[RequestTimes], input_len: int, concurrency: int) -> SpeedRow:
    """Raises QuantkitError where every request failed: there is nothing to report then."""
    good = [one for one in times if one.error is None]
    errors = [one.error for one in times if one.error is not None]
    if not good:
        raise QuantkitError(f"all {len(times)} requests of {input_len} tokens failed: {errors[0]}", "see the server's log")
    tpots = [one.tpot_ms for one in good if one.tpot_ms is not None]
    wall = max(one.last_token for one in good) - min(one.sent for one in good)
    series = {"ttft_s": [one.ttft_s for one in good], "latency_s": [one.latency_s for one in good], "tpot_ms": tpots}
    return SpeedRow(
        input_len,
        concurrency,
        fmean(one.output_tokens for one in good),
        len(good),
        len(errors),
        fmean(one.prompt_tokens for one in good),
        fmean(series["ttft_s"]),
        fmean(tpots) if tpots else None,
        1e3 / fmean(tpots) if tpots else None,
        sum(one.output_tokens for one in good) / wall,
        fmean(series["latency_s"]),
        {
            f"{name}_p{percent}": float(np.percentile(values, percent))
            for name, values in series.items()
            if values
            for percent in PERCENTILES
        },
        errors[0] if errors else None,
    )


def now() -> float:
    return time.perf_counter()
