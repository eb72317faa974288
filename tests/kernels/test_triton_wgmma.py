"""The int8 kernel for Hopper, its source interpreted on the CPU: right for every shape, however
tiles and K are shared out."""

import random
from pathlib import Path

import pytest
import torch
from gluon_interpreter import Descriptor, Pointer, interpreted
from quantkit_kernels import triton
from quantkit_kernels.linear import quantize_rows
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.triton.layout import pack
from sample_sizes import sized

multiply = interpreted(Path(triton.__file__).parent / "wgmma_kernel.py", "multiply_int8")


@pytest.mark.parametrize("seed", range(sized(8, 24)))
def test_products_of_any_shape_and_plan(seed):
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, rows, stages, left = (
        choose.choice((16, 32, 64)),
        choose.choice((32, 64)),
        choose.randint(2, 5),
        bool(seed % 2),
    )
    m, n, k = choose.randint(1, 150), choose.randint(1, 200), 16 * choose.randint(1, 60)
    weight = random_weight("int8", n, k, rng)
    codes, _, row_scale = pack(weight)
    steps, padded = codes.shape[:2]
    split = min(choose.choice((1, 1, 2, 3, 5)), steps)
    token_tiles, row_tiles = -(-m // tokens), -(-n // rows)
    tiles = token_tiles * row_tiles
    programs = tiles * split if split > 1 else choose.choice((tiles, max(1, tiles // 3), 1))
    x = torch.randn(m, k, generator=rng).bfloat16()
    x_codes, x_scale = quantize_rows(x)
    out, arrived = (
        torch.full((m * n,), float("nan"), dtype=torch.bfloat16),
        torch.zeros(tiles, dtype=torch.int32),
    )
    sums = torch.zeros(tiles * tokens * rows, dtype=torch.int32)
    multiply(
        programs, Descriptor(x_codes, (tokens, 128)), Descriptor(codes.flatten(0, 1), (rows, 128)),
        Pointer(x_scale[:, 0]),
        Pointer(row_scale), Pointer(out), Pointer(sums), Pointer(arrived), m, n, padded, steps,
        split, token_tiles, row_tiles,
        BM=tokens, BN=rows, SHARED=split > 1, EARLY=split == 1 and choose.random() < 0.5,
        STAGES=stages, LEFT=left,
        BAND=choose.choice((1, 2, 8)), WARPS=4, PDL=True,
    )  # fmt: skip
    assert distance(out.view(m, n), exact_linear(x, weight)) < TOLERANCE[torch.bfloat16]
    assert not arrived.any()
    assert not sums.any()
