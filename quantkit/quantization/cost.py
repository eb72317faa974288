"""How long a run should take: its arithmetic and its bytes over what a machine does of each in a second.

Operations are counted from the shapes, 2 per multiplication and addition: two forward passes of every token, half of a symmetric Hessian
for every input, its factorization, and GPTQ of every linear, on both sides of what writes to the residual stream. What is smaller is
left out: searches, steps tried, held-out errors, the cost of errors in that stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.models.table import Parameter

_FORWARDS = 2


@dataclass(frozen=True)
class Rate:
    """What a machine does: float32 operations a second in matrix products (of one core, for a processor), bytes a second from disk."""

    name: str
    flops: float
    per_core: bool
    disk: float

    def assumption(self, cores: int) -> str:
        total = self.flops * cores if self.per_core else self.flops
        return f"{total / 1e9:,.0f} GFLOP/s in float32{f' on {cores} cores' if self.per_core else ''}, {self.disk / 1e9:g} GB/s disk"


RATES = (Rate("cpu", 50e9, True, 1e9), Rate("h200", 24e12, False, 1.5e9))
"""Of the operations counted here, with everything not counted in the time: a core with AVX2, whose large products alone run at 85 GFLOP/s,
and an H200 (benchmarks/r1_shape.py)."""


def seconds(linears: Iterable[Parameter], tokens: int, chosen: float, transferred: int, rate: Rate, cores: int) -> float:
    """For quantizing `linears` on `tokens` tokens, of which every routed expert sees the share `chosen`; no tokens: no calibration."""
    work = operations(linears, tokens, chosen) if tokens else 0.0
    return work / (rate.flops * (cores if rate.per_core else 1)) + transferred / rate.disk


def operations(linears: Iterable[Parameter], tokens: int, chosen: float) -> float:
    """Floating-point operations of a calibrated run."""
    total, observed = 0.0, set[str]()
    for row in linears:
        n, k = row.shape
        seen = tokens * chosen if row.expert is not None else tokens
        total += _FORWARDS * 2.0 * seen * n * k + float(n) * k * k
        total += float(n) * n * k if row.split == "row" else 0.0
        # Gate and up of all experts of a layer share one input, and so do siblings of a fused linear.
        site = f"{row.layer}.gate_up" if row.expert is not None and row.fused else row.fused or row.module
        if site not in observed:
            observed.add(site)
            shared = row.expert is not None and row.fused
            total += float(tokens if shared else seen) * k * k + k**3 / 3
    return total
