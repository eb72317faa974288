"""Plans of dense_rows_kernel.py, products of few rows by 16-bit weights: what `quantkit kernels
--tune` tries. There is a rule for small weights alone: without a measured plan the vendor's library
multiplies."""

from dataclasses import dataclass

MOST_ROWS = 64
"""Of tokens: from there on the library was as fast on an H200 (docs/lab/linears.md)."""
_SHAPES = ((64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 8, 3), (64, 256, 4, 3))
_SPLITS = (1, 2, 3, 4, 6, 8)
_FEWEST_STEPS, _PROGRAMS = 4, (0.9, 3.2)
"""Steps along K of a program at least; programs a multiprocessor."""

SMALL_ROWS = 8
"""Of tokens: the most that small weights are multiplied by here."""
_SMALL_BYTES, _SMALL_FEATURES = 8 << 20, 2048


def is_small(n: int, k: int) -> bool:
    """Whether reading W[n, k] takes less time than launching a product."""
    return 2 * n * k <= _SMALL_BYTES and k <= _SMALL_FEATURES and k % 8 == 0


@dataclass(frozen=True)
class DenseRowsPlan:
    """rows: of the weight, in a tile; features: of a step along K; split: programs that share K;
    warps; stages: steps of weights under way at once."""

    rows: int
    features: int
    split: int
    warps: int
    stages: int


def dense_candidates(processors: int, n: int, k: int, room: int) -> list[DenseRowsPlan]:
    """Those for W[n, k] that fill the card and leave each program some of K, with as many of their
    stages as fit `room` bytes of shared memory, two at least."""
    least, most = (processors * times for times in _PROGRAMS)
    found: list[DenseRowsPlan] = []
    for rows, features, warps, stages in _SHAPES:
        fitting = min(stages, room // ((rows + MOST_ROWS) * features * 2))
        if n % rows or k % features or fitting < 2:
            continue
        for split in _SPLITS:
            plan = DenseRowsPlan(rows, features, split, warps, fitting)
            if (
                least <= n // rows * split <= most
                and k // features // split >= _FEWEST_STEPS
                and plan not in found
            ):
                found.append(plan)
    return found
