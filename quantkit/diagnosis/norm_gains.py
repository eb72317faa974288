"""Sizes along a chain: what a norm or a linear lost by scales that were folded, its readers gained,
and nothing else changed size.

A linear is fitted as W' = diag(r) W diag(c), which leaves a factor between r and c open. Its norm
tells c, and so r; its readers' c must undo r. Sizes are means of logarithms, which add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.models.table import ScaleGroup

_OFF = 0.4
"""Logarithm of a factor that neither rounding nor clipping explains: 1.5 times."""
_TRIM = 3.0


@dataclass(frozen=True)
class Gain:
    """Means of the logarithms of a linear's fitted factors of rows and of columns."""

    rows: float
    columns: float

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> "Gain":
        return cls(mean_log(rows), mean_log(columns))


def mean_log(factors: Tensor) -> float:
    """Mean logarithm of factors [n], without those far from the others: rows and columns that hold
    next to nothing have any factor."""
    known = factors[factors != 0].abs()
    if not known.numel():
        return 0.0
    logs = known.log()
    near = logs[(logs - logs.median()).abs() < _TRIM]
    return float(near.mean()) if near.numel() else float(logs.median())


def size_faults(
    groups: Sequence[ScaleGroup], gains: Mapping[str, Gain], lost: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """(module, evidence) of linears that changed size. lost: of norms, the mean logarithm of what
    they were divided by."""
    made: dict[str, float] = {}  # by module, what its inputs were divided by
    chains = [group for group in groups if not group.producer_is_norm]
    behind = {module for group in groups for module in group.consumers}
    made |= dict.fromkeys((module for module in gains if module not in behind), 0.0)
    for group in groups:
        if group.producer_is_norm and group.producer in lost:
            made |= dict.fromkeys(group.consumers, lost[group.producer])
    producers = {group.producer for group in chains}
    told = set()
    for module, gain in gains.items():
        if (
            module in made
            and module not in producers
            and abs(size := gain.columns + gain.rows - made[module]) > _OFF
        ):
            told.add(module)
            yield module, _tell(size)
    for group in chains:
        producer = gains.get(group.producer)
        if producer is None or group.producer not in made:
            continue
        left = producer.rows + producer.columns - made[group.producer]
        for module in group.consumers:
            gain = gains.get(module, Gain(-left, 0.0))
            if abs(size := left + gain.columns + gain.rows) > _OFF and module not in told:
                told.add(module)
                yield module, f"with {group.producer} {_tell(size)}"


def _tell(size: float) -> str:
    return (
        f"its values are {float(torch.tensor(size).exp()):.3g} times the source's, and no "
        "scale before or behind it makes up for that"
    )
