"""One rank's share of a linear: columns of the output (rows of W) or of the input, as the model's
table says.

A packed weight is cut as it is, never unpacked: along K on group boundaries, or inside a group
where all of it goes to whole smaller groups that keep its scale. FP8 blocks are expanded first, as
their operator would. Where activations are rounded too (int8, a scale per token), each rank rounds
its own inputs with their own scale: finer than one rank's, which takes the largest of them all.
"""

import math
from dataclasses import replace

from torch import Tensor

from quantkit.common.errors import UsageError
from quantkit.grids.schemes import Fp4Grid, Grid, IntGrid, Mxfp4Grid
from quantkit.grids.weights import (
    FP4_GROUP,
    MX_GROUP,
    Fp4Weight,
    Fp8BlockWeight,
    IntWeight,
    Mxfp4Weight,
    Weight,
    dequantize,
)

_SMALLEST_GROUP = 32
"""Of the int4 operators."""


def share_range(
    features: int, what: str, name: str, rank: int, size: int, heads: int = 0
) -> tuple[int, int]:
    """From where to where the features of a rank go. heads: of keys, that they are; more ranks than
    these hold copies."""
    if 0 < heads < size and size % heads == 0:
        rank, size = rank * heads // size, heads
    if features % size:
        raise UsageError(
            f"{name} has {features} {what}, which {size} ranks cannot share evenly",
            "use another --tp",
        )
    return rank * features // size, (rank + 1) * features // size


def check_inputs(name: str, grid: Grid | None, width: int) -> None:
    """Raises UsageError where a linear on this grid cannot be cut into shares of `width` input
    features."""
    match grid:
        case IntGrid(bits=4, group_size=stored):
            _check_group(
                name, math.gcd(stored or width, width), _SMALLEST_GROUP, stored or width, width
            )
        case Fp4Grid(stored) | Mxfp4Grid(stored):
            _check_group(name, math.gcd(stored, width), stored, stored, width)


def cut_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows of W [N, K]: output features start..stop."""
    match weight:
        case IntWeight():
            zero_point = None if weight.zero_point is None else weight.zero_point[start:stop]
            return IntWeight(
                weight.codes[start:stop], weight.scale[start:stop], zero_point, weight.bits
            )
        case Fp4Weight():
            return replace(weight, codes=weight.codes[start:stop], scale=weight.scale[start:stop])
        case Mxfp4Weight():
            return Mxfp4Weight(weight.codes[start:stop], weight.exponent[start:stop])
        case Fp8BlockWeight():
            return dequantize(weight)[start:stop]
        case _:
            return weight[start:stop]


def cut_columns(weight: Weight, name: str, start: int, stop: int) -> Weight:
    """Columns of W [N, K]: input features start..stop; the ranks' outputs add up to the whole."""
    match weight:
        case IntWeight(bits=8):
            assert weight.scale.shape[1] == 1, f"{name}: int8 in groups"
            return IntWeight(
                weight.codes[:, start:stop].contiguous(),
                weight.scale,
                weight.zero_point,
                weight.bits,
            )
        case IntWeight():
            group = math.gcd(weight.group_size, stop - start)
            _check_group(name, group, _SMALLEST_GROUP, weight.group_size, stop - start)
            scale = _regroup(weight.scale, weight.group_size, group, start, stop)
            zero_point = (
                None
                if weight.zero_point is None
                else _regroup(weight.zero_point, weight.group_size, group, start, stop)
            )
            return IntWeight(
                weight.codes[:, start:stop].contiguous(), scale, zero_point, weight.bits
            )
        case Fp4Weight():
            _check_group(
                name, math.gcd(FP4_GROUP, stop - start), FP4_GROUP, FP4_GROUP, stop - start
            )
            scale = weight.scale[:, start // FP4_GROUP : stop // FP4_GROUP].contiguous()
            return replace(weight, codes=weight.codes[:, start:stop].contiguous(), scale=scale)
        case Mxfp4Weight():
            _check_group(name, math.gcd(MX_GROUP, stop - start), MX_GROUP, MX_GROUP, stop - start)
            exponent = weight.exponent[:, start // MX_GROUP : stop // MX_GROUP].contiguous()
            return Mxfp4Weight(weight.codes[:, start:stop].contiguous(), exponent)
        case Fp8BlockWeight():
            return dequantize(weight)[:, start:stop].contiguous()
        case _:
            return weight[:, start:stop].contiguous()


def _check_group(name: str, group: int, smallest: int, stored: int, width: int) -> None:
    if group < smallest:
        raise UsageError(
            f"{name} cannot be cut into shares of {width} input features in groups of {stored}",
            "use a smaller --tp",
        )


def _regroup(values: Tensor, stored: int, group: int, start: int, stop: int) -> Tensor:
    """values [N, K / stored] -> [N, (stop - start) / group] of the columns start .. stop: repeated
    where groups became smaller."""
    return values.repeat_interleave(stored // group, dim=1)[
        :, start // group : stop // group
    ].contiguous()
