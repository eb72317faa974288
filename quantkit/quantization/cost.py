"""Expected run time: arithmetic and bytes divided by a machine's rates.

Operations are counted from the shapes, 2 per multiplication and addition: two forward passes of
every token, half of a symmetric Hessian for every input, its factorization, and GPTQ of every
linear, two-sided for those that write to the residual stream. A sweep of descent counts as GPTQ: it
has twice the operations, all in large products, which run at about twice the average rate. So do
the products of drift: they count half. Smaller terms are neglected: scale searches, scale fits,
held-out errors, output costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantkit.models.table import Parameter
from quantkit.quantization.job import Job

_FORWARDS = 2
_COMPARED = {"expert": 2, "alone": 4}
"""Additional forward passes with drift, for the linears of routed experts and others: both paths
are compared, before and after the linears before them are quantized, and the original one
advances."""
LINEAR_SECONDS = 0.05
"""For each linear outside of routed experts, whatever its size: searches, held-out errors, small
operators."""

CALIBRATED_SHARE = 0.98
"""Share of a calibrated run's time after which only units to round and copy are left."""


@dataclass(frozen=True)
class Rate:
    """A machine's rates: float32 operations a second in matrix products (of one core, for a CPU),
    bytes a second from disk."""

    name: str
    flops: float
    per_core: bool
    disk: float

    def assumption(self, cores: int) -> str:
        total = self.flops * cores if self.per_core else self.flops
        return (
            f"{total / 1e9:,.0f} GFLOP/s in "
            f"float32{f' on {cores} cores' if self.per_core else ''}, {self.disk / 1e9:g} GB/s "
            "disk"
        )


RATES = (Rate("cpu", 50e9, True, 1e9), Rate("h200", 24e12, False, 1.5e9))
"""For the operations counted here, with everything not counted included in the time: a core with
AVX2, whose large products alone run at 85 GFLOP/s, and an H200 (benchmarks/r1_shape.py)."""


@dataclass(frozen=True)
class RunWork:
    """Work of a run: floating-point operations, bytes read and written, linears searched and solved
    one by one."""

    operations: float
    transferred: int
    linears: int


def work_of(
    linears: Sequence[Parameter],
    tokens: int,
    chosen: float,
    transferred: int,
    sweeps: int = 0,
    drift: bool = False,
) -> RunWork:
    """Of quantizing `linears` on `tokens` tokens, of which every routed expert gets the share
    `chosen`; no tokens: no calibration. sweeps: of descent; drift: whether weights are corrected
    for drift."""
    if not tokens:
        return RunWork(0.0, transferred, 0)
    alone = sum(row.expert is None for row in linears)  # routed experts are solved many at a time
    return RunWork(operations(linears, tokens, chosen, sweeps, drift), transferred, alone)


def job_work(
    job: Job, linears: Sequence[Parameter], transferred: int, tokens: int | None = None
) -> RunWork:
    """Of those linears of a job, and so many bytes. tokens: of the calibration text; if unknown,
    the recipe's maximum."""
    recipe, calibrated = job.request.recipe, bool(job.request.methods)
    experts = len({row.expert for row in job.rows if row.expert is not None})
    routing = job.inventory.config.routing if experts and calibrated else None
    chosen = routing.num_experts_per_tok / experts if routing else 1.0
    most = (recipe.samples + recipe.held_out) * recipe.seq_len
    sweeps = recipe.sweeps if "descent" in job.request.methods else 0
    return work_of(
        linears,
        (tokens or most) if calibrated else 0,
        chosen,
        transferred,
        sweeps,
        "drift" in job.request.methods,
    )


def expected_seconds(work: RunWork, rate: Rate, cores: int = 1) -> float:
    """cores: of a CPU whose rate is per core."""
    flops = rate.flops * (cores if rate.per_core else 1)
    return work.operations / flops + work.transferred / rate.disk + work.linears * LINEAR_SECONDS


def operations(
    linears: Iterable[Parameter], tokens: int, chosen: float, sweeps: int, drift: bool
) -> float:
    """Floating-point operations of a calibrated run, those of sweeps and of drift as described
    above."""
    total, observed = 0.0, set[str]()
    for row in linears:
        n, k = row.shape
        seen = tokens * chosen if row.expert is not None else tokens
        total += _FORWARDS * 2.0 * seen * n * k + float(n) * k * k * (1 + sweeps)
        total += float(n) * n * k if row.split == "row" else 0.0
        if drift:
            total += (
                _COMPARED["alone" if row.expert is None else "expert"] * float(seen) * n * k
                + float(n) * k * k
            )
        # Gate and up of all experts of a layer share one input, and so do siblings of a fused
        # linear.
        site = (
            f"{row.layer}.gate_up"
            if row.expert is not None and row.fused
            else row.fused or row.module
        )
        if site not in observed:
            observed.add(site)
            shared = row.expert is not None and row.fused
            total += float(tokens if shared else seen) * k * k + k**3 / 3
            total += (float(tokens if shared else seen) * k * k + k**3) if drift else 0.0
    return total


def unit_shares(job: Job) -> dict[str, float]:
    """Of a calibrated run's expected time, by unit."""
    work = {}
    quantized = {row.module for row in job.linears}
    for unit, rows in job.units.items():
        work[unit] = expected_seconds(
            job_work(job, [row for row in rows if row.module in quantized], 0), RATES[0]
        )
    total = sum(work.values()) or 1.0
    return {unit: CALIBRATED_SHARE * seconds / total for unit, seconds in work.items()}
