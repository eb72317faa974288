"""Times of single requests, and the figures of one cell of the grid.

Definitions are those of evalscope perf (1.14) and `vllm bench serve`, which agree, so that figures
can be laid beside published ones: latency = last token - send; TTFT = first token - send; TPOT =
(latency - TTFT) / (output_tokens - 1), per request, then the mean; ITL = the time between two
pieces of output, of all requests together (a server may send several tokens in a piece); TPS = 1000
/ mean TPOT, tokens per second as one user sees them; system TPS = output tokens of all requests /
wall time, from the first send to the last token; request rate = finished requests / wall time;
goodput = those of them that met every limit / wall time. Failed requests and the warm-up are left
out; replies of one token have no TPOT.
What is asked of a target while it is measured: prompts, lengths, and when requests are sent.

Either `concurrency` users each send a request the moment their last one is answered (closed loop),
or requests arrive by themselves at a rate, with exponential times between them (Poisson, as `vllm
bench serve --request-rate`), at most `concurrency` at a time being open.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from quantkit.common.errors import QuantkitError


@dataclass(frozen=True)
class Workload:
    """`requests` random prompts of `input_len` tokens, or `prompts` in turn, with `output_len`
    tokens each; rate in requests/s or None."""

    input_len: int
    output_len: int
    requests: int
    concurrency: int
    seed: int = 0
    rate: float | None = None
    prompts: tuple[str, ...] = ()

    def warmup(self, requests: int, seed: int) -> "Workload":
        """A few short requests of the same kind, as fast as they are answered."""
        return replace(
            self, output_len=min(self.output_len, 8), requests=requests, seed=seed, rate=None
        )

    def rng(self, run: str = "") -> random.Random:
        """Of its prompts and arrivals. By text: of a number Python's generator looks at the size
        alone, and -1 would be 1."""
        return random.Random(f"{run} {self.seed}")

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which requests arrive; all at once without a rate."""
        generator = self.rng()
        at = 0.0
        for _ in range(self.requests):
            yield at
            at += generator.expovariate(self.rate) if self.rate is not None else 0.0


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a .jsonl of {"prompt"}, {"text"} or {"messages"}, a .json like ShareGPT's,
    or a .txt with a prompt a line.

    Of a conversation it is the first message of the user. Raises QuantkitError where the file
    cannot be read or holds none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            records = json.loads(text)
        elif path.suffix == ".jsonl":
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            records = [line for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise QuantkitError(
            f"prompts {path} cannot be read ({error})",
            "give a .jsonl, a .json like ShareGPT's, or a .txt",
        ) from error
    found = [
        prompt
        for record in (records if isinstance(records, list) else [])
        if (prompt := _prompt(record))
    ]
    if not found:
        raise QuantkitError(
            f"prompts {path} holds none",
            'a line is {"prompt": ...}, {"text": ...}, {"messages": [...]} or {"conversations": '
            "[...]}",
        )
    return found


def _prompt(record: Any) -> str:
    if isinstance(record, str):
        return record.strip()
    if not isinstance(record, dict):
        return ""
    for name in ("prompt", "text", "question"):
        if isinstance(record.get(name), str):
            return str(record[name]).strip()
    for turns, role, said in (("messages", "role", "content"), ("conversations", "from", "value")):
        for turn in record.get(turns) or []:
            if (
                isinstance(turn, dict)
                and turn.get(role) in ("user", "human")
                and isinstance(turn.get(said), str)
            ):
                return str(turn[said]).strip()
    return ""


PERCENTILES = (50, 90, 99)
LIMITS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "latency"}
"""What a limit of goodput may be on, in milliseconds; the names are those of `vllm bench serve
--goodput`."""


@dataclass(frozen=True)
class RequestTimes:
    """One finished request. Seconds on one clock; `error` is set, and the rest meaningless, where
    it failed. gaps: between its pieces.
    counted: whether output_tokens is a count of tokens; otherwise it is one of pieces, which may
    hold several."""

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
        """None for a reply of one token, or one that came in one piece: of the others nothing is
        known."""
        if self.output_tokens < 2 or self.last_token == self.first_token:
            return None
        return 1e3 * (self.last_token - self.first_token) / (self.output_tokens - 1)

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether no limit, milliseconds by name of LIMITS, is passed. A reply of one token has no
        TPOT to pass one with."""
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

    `left_out`: percentiles that its requests are too few for; the p-th takes 100 / (100 - p) of
    them, else it is their maximum.
    `offered_rate`: requests/s that were sent, None where `concurrency` users each waited for their
    reply. `goodput`: None without limits.
    `uncounted`: replies whose server reported no number of tokens, so that every piece counts as
    one.
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

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return values | values.pop("percentiles")


class Target(Protocol):
    """Something that answers requests: the engine in this process, or a server."""

    name: str

    def check(self, work: Workload) -> None:
        """Raise QuantkitError where such requests cannot be served."""

    def run(self, work: Workload) -> Iterator[RequestTimes]:
        """Answer what the workload asks, as it asks."""

    def close(self) -> None:
        """End what answers, where it was started for this."""


def measure_grid(
    target: Target,
    input_lens: Sequence[int],
    concurrencies: Sequence[int],
    output_len: int,
    *,
    rates: Sequence[float] = (),
    prompts: Sequence[str] = (),
    requests_per_slot: int = 2,
    requests: int | None = None,
    warmup: int = 1,
    seed: int = 0,
    limits: dict[str, float] | None = None,
    on_row: Callable[[SpeedRow], None] = lambda row: None,
) -> list[SpeedRow]:
    """Every input length at every concurrency, smallest first, or, with `rates`, at every rate of
    arrival (requests/s, Poisson).

    A cell answers `requests`, or concurrency * requests_per_slot where that is None. prompts: these
    in turn instead of random ones; the input length is then not looked at. The whole grid is
    checked before the first request. `warmup` requests a slot are left out.
    """
    cells = _cells(
        input_lens, concurrencies, output_len, rates, prompts, requests_per_slot, requests, seed
    )
    for cell in cells:
        target.check(cell)
    rows = []
    for number, cell in enumerate(cells):
        if warmup:
            list(
                target.run(
                    cell.warmup(warmup * min(cell.concurrency, cell.requests), seed - 1 - number)
                )
            )
        rows.append(
            summarize(
                list(target.run(cell)),
                cell.input_len,
                cell.concurrency,
                rate=cell.rate,
                limits=limits,
            )
        )
        on_row(rows[-1])
    return rows


def _cells(
    input_lens: Sequence[int],
    concurrencies: Sequence[int],
    output_len: int,
    rates: Sequence[float],
    prompts: Sequence[str],
    requests_per_slot: int,
    requests: int | None,
    seed: int,
) -> list[Workload]:
    lengths = [0] if prompts else sorted(input_lens)
    loads: list[tuple[int, float | None]] = [(max(concurrencies), rate) for rate in sorted(rates)]
    loads = loads or [(users, None) for users in sorted(concurrencies)]
    return [
        Workload(
            length,
            output_len,
            requests or users * requests_per_slot,
            users,
            seed + number,
            rate,
            tuple(prompts),
        )
        for number, (length, (users, rate)) in enumerate(
            (length, load) for length in lengths for load in loads
        )
    ]


def summarize(
    times: Sequence[RequestTimes],
    input_len: int,
    concurrency: int,
    *,
    rate: float | None = None,
    limits: dict[str, float] | None = None,
) -> SpeedRow:
    """Raises QuantkitError where every request failed: there is nothing to report then."""
    good = [one for one in times if one.error is None]
    errors = [one.error for one in times if one.error is not None]
    if not good:
        raise QuantkitError(
            f"all {len(times)} requests of {input_len} tokens failed: {errors[0]}",
            "see the server's log",
        )
    tpots = [one.tpot_ms for one in good if one.tpot_ms is not None]
    gaps = [1e3 * gap for one in good for gap in one.gaps]
    wall = max(one.last_token for one in good) - min(one.sent for one in good)
    series = {
        "ttft_s": [one.ttft_s for one in good],
        "latency_s": [one.latency_s for one in good],
        "tpot_ms": tpots,
        "itl_ms": gaps,
    }
    percentiles, left_out = _percentiles(series)
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
        percentiles,
        errors[0] if errors else None,
        fmean(gaps) if gaps else None,
        len(good) / wall,
        rate,
        sum(one.meets(limits) for one in good) / wall if limits else None,
        left_out,
        sum(not one.counted for one in good),
    )


def _percentiles(series: dict[str, list[float]]) -> tuple[dict[str, float], list[str]]:
    """Those that there are values enough for, and the names of the others."""
    found, left_out = {}, []
    for name, values in series.items():
        for percent in PERCENTILES if values else ():
            if len(values) >= min_values(percent):
                found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
            else:
                left_out.append(f"{name}_p{percent}")
    return found, left_out


def min_values(percent: int) -> int:
    """Values that the percentile takes: with fewer, none of them lies beyond it."""
    return -(-100 // (100 - percent))


def now() -> float:
    return time.perf_counter()
