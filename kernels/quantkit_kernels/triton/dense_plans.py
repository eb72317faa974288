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

_SMALL_BYTES, _SMALL_FEATURES, _SMALL_TILES_BYTES = 16 << 20, 4096, 4 << 20


def is_small(n: int, k: int, itemsize: int = 2) -> bool:
    """Whether one row times W[n, k] takes no longer than launches do: on an H200 2.1 us for 576 x
    576 and 4.8 for 6144 x 1024 by `multiply_small`, 3.9 and 6.3 by the library."""
    return itemsize * n * k <= _SMALL_BYTES and k <= _SMALL_FEATURES and k % 8 == 0


def small_plan(n: int, k: int) -> "DenseRowsPlan | None":
    """Of more rows times a small weight: on an H200 2.6 us for 8 rows of 576 x 576 and 3.9 of 576 x
    1536, the library's 3.5 and 5.6. None: the library."""
    if 2 * n * k > _SMALL_TILES_BYTES or n % 16 or k % 64:
        return None
    return DenseRowsPlan(16, 128, 3, 2, 4) if k % 128 == 0 and k > 1024 else _SMALL_PLAN


@dataclass(frozen=True)
class DenseRowsPlan:
    """rows: of the weight, in a tile; features: of a step along K; split: programs that share K;
    warps; stages: steps of weights under way at once."""

    rows: int
    features: int
    split: int
    warps: int
    stages: int


_SMALL_PLAN = DenseRowsPlan(16, 64, 1, 2, 4)


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
