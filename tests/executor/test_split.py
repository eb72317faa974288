"""Shares of a weight put together are the weight."""

import pytest
import torch
from nearest import quantize_fp4, quantize_fp8_block, quantize_int
from refused import refused

from quantkit.executor.weights.weights import share_range
from quantkit.grids.base import cut_columns, cut_rows, dequantize
from quantkit.grids.int_groups import IntGrid, IntWeight

W = torch.randn(192, 256, generator=torch.Generator().manual_seed(0))
WEIGHTS = {
    "dense": W,
    "int4 asymmetric": quantize_int(W, IntGrid(4, 128, False), scale_dtype=torch.float16),
    "int4 symmetric": quantize_int(W, IntGrid(4, 64, True), scale_dtype=torch.float16),
    "int8": quantize_int(W, IntGrid(8, None, True), scale_dtype=torch.float32),
    "fp4": quantize_fp4(W),
    "fp8": quantize_fp8_block(W),
}


def row_share(weight, name, rank, size):
    return cut_rows(weight, *share_range(weight.shape[0], "output features", name, rank, size))


def column_share(weight, name, rank, size):
    return cut_columns(
        weight, name, *share_range(weight.shape[1], "input features", name, rank, size)
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_shares_make_the_whole(name, size):
    weight = WEIGHTS[name]
    rows = [dequantize(row_share(weight, name, rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat(rows), dequantize(weight))
    columns = [dequantize(column_share(weight, name, rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat(columns, dim=1), dequantize(weight))


def test_a_group_is_cut_into_whole_smaller_groups():
    """256 input features in groups of 128 on 4 ranks: 64 each, half a group, which keeps the
    group's scale."""
    share = column_share(WEIGHTS["int4 asymmetric"], "w", 1, 4)
    assert isinstance(share, IntWeight)
    assert share.group_size == 64
    assert torch.equal(share.scale[:, 0], WEIGHTS["int4 asymmetric"].scale[:, 0])


@pytest.mark.parametrize(
    ("size", "heads", "own"), [(2, 2, [0, 1]), (4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0])]
)
def test_ranks_beyond_the_key_heads_hold_copies_side_by_side(size, heads, own):
    """As query heads lie: those of a key head are on neighbours."""
    ranges = [
        share_range(heads * 64, "output features", "k", rank, size, heads) for rank in range(size)
    ]
    assert ranges == [(head * 64, (head + 1) * 64) for head in own]


def test_packed_weights_stay_packed():
    for name in ("int4 asymmetric", "int8", "fp4"):
        assert (
            type(column_share(WEIGHTS[name], name, 0, 2))
            is type(row_share(WEIGHTS[name], name, 0, 2))
            is type(WEIGHTS[name])
        )


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("int4 symmetric", 16, "groups of 64"), ("fp4", 32, "groups of 16"), ("dense", 3, "evenly")],
)
def test_what_cannot_be_cut_is_refused(name, size, said):
    with refused(f"^{name} .*{said}"):
        column_share(WEIGHTS[name], name, 0, size)
