"""Int8 on the CPU: the C++ that the user's compiler makes, against the reference bit for bit, and
what is there without a compiler."""

import pytest
import torch
from quantkit_kernels import Int8, prepare
from quantkit_kernels.cpu import build, int8
from quantkit_kernels.cpu.int8 import Int8Linear, OneDnnInt8Linear, VnniInt8Linear, qlinear_is_exact
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight

DTYPES = list(TOLERANCE)
LEVELS = list(build._FLAGS)
REASON = build.why_no_library("int8")
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))
vnni = pytest.mark.skipif(build.level() != "VNNI" or not qlinear_is_exact(), reason="needs VNNI")


def runs_here(level):
    return level in ("PORTABLE", build.level()) or (
        build.level() in LEVELS[:3] and LEVELS.index(level) <= LEVELS.index(build.level())
    )


def fresh():
    return torch.Generator().manual_seed(0)


def activations(m, k, rng, dtype):
    """Of sizes far apart, every seventh row zeros."""
    x = torch.randn(m, k, generator=rng) * 10 ** torch.linspace(-3, 2, m).unsqueeze(1)
    x[6::7] = 0
    return x.to(dtype)


ROWS = ((64, 2048), (10, 100), (3, 5))
"""Whole vectors and whole fours of rows, and less than one."""
BLOCKS = ((64, 128), (288, 384), (160, 102), (80, 2048), (203, 1001), (3, 5), (2112, 7168))
"""Blocks of 64, 48, 32 and 16 rows, the last whole or not, and a K that is no multiple of 4."""
PACKED = ((64, 128), (200, 384), (192, 2048), (2112, 1024))
"""Blocks of whatever rows oneDNN chooses, the last not whole."""
KINDS = [
    pytest.param(
        Int8Linear, ROWS, one, marks=pytest.mark.skipif(not runs_here(one), reason="not this CPU")
    )
    for one in LEVELS
]
KINDS += [
    pytest.param(VnniInt8Linear, BLOCKS, "VNNI", marks=vnni),
    pytest.param(OneDnnInt8Linear, PACKED, "VNNI", marks=vnni),
]


@compiled
@pytest.mark.parametrize(("kind", "shapes", "level"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_the_reference_bit_for_bit(dtype, kind, shapes, level, monkeypatch):
    """Tokens one by one, up to four together, and one to more than two groups; by oneDNN few rows,
    and small products."""
    monkeypatch.setattr(build, "level", lambda: level)
    rng, taken = fresh(), set()
    for n, k in shapes:
        weight = random_weight("int8", n, k, rng)
        linear = kind(weight, dtype)
        reference = prepare(weight, backend="reference", dtype=dtype)
        counts = [1, 2, 3, 4, 5, 6, 7, 13, 63] if n < 2000 else [1, 8]
        if kind is VnniInt8Linear:
            taken.add(linear.block)
        if kind is OneDnnInt8Linear:
            assert linear._block is not None, "oneDNN packs blocks that int8.cpp cannot read"
            few = range(1, min(9, int8.vnni_rows() + 1))
            counts = [*few, *((40,) if 40 * n * k <= int8._SMALL_PRODUCT else ())]
            x = torch.randn(300, k, generator=rng).to(dtype)
            for rows in (x[:4], x) if n < 2000 else (x[:4],):
                assert distance(linear(rows), exact_linear(rows, weight)) < TOLERANCE[dtype] * 2
        for m in counts:
            x = activations(m, k, rng, dtype)
            assert torch.equal(linear(x), reference(x)), (n, k, m)
    assert kind is not VnniInt8Linear or taken == set(int8._BLOCKS)


@compiled
@vnni
@pytest.mark.parametrize("rows", [16, 32, 48, 64])
def test_blocks_of_any_rows(rows):
    """Blocks laid out here, one after the other, the last half empty, for a processor may never
    choose some of them."""
    n, k, rng = 5 * rows // 2, 64, fresh()
    weight = random_weight("int8", n, k, rng)
    padded = torch.cat([weight.codes, torch.full((-n % rows, k), 99, dtype=torch.int8)])
    blocks = padded.view(-1, rows, k // 4, 4).transpose(1, 2).contiguous()
    sums = weight.codes.sum(dim=1, dtype=torch.int32)
    x = torch.randn(7, k, generator=rng)
    addresses = (blocks.data_ptr(), weight.scale.data_ptr(), sums.data_ptr())
    y = int8._multiply(build.library("int8").qk_int8_blocks, addresses, x, (n, k, rows))
    assert torch.equal(y, prepare(weight, backend="reference", dtype=torch.float32)(x))


@compiled
@pytest.mark.parametrize(
    "kind",
    [
        Int8Linear,
        pytest.param(VnniInt8Linear, marks=vnni),
        pytest.param(OneDnnInt8Linear, marks=vnni),
    ],
)
def test_largest_codes_of_either_sign(kind):
    """R1's longest K, whose sums no float32 holds: every pair of signs by itself, and all
    together."""
    k = 18432
    signs = torch.ones(64, k, dtype=torch.int8)
    signs[1::2] = -1
    signs[2::4, ::3] = -1
    weight = Int8(signs * 127, torch.linspace(0.1, 2, 64).unsqueeze(1))
    x = signs[:3].float() * 3
    reference = prepare(weight, backend="reference", dtype=torch.float32)
    assert torch.equal(kind(weight, torch.float32)(x), reference(x))


@compiled
def test_steps_too_small_for_a_float_and_activations_that_are_none():
    """A 127th of the smallest number is zero, and that of the next few no 127th; a row that is not
    finite gives nothing that is."""
    tiny = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    x = torch.ones(6, 40) * tiny * torch.tensor([1, 90, 190, 1000, 1, 1]).unsqueeze(1)
    x[4, 7], x[5, 39] = torch.nan, -torch.inf
    weight = random_weight("int8", 64, 40, fresh())
    y = Int8Linear(weight, torch.float32)(x)
    reference = prepare(weight, backend="reference", dtype=torch.float32)(x)
    assert torch.equal(y[:4], reference[:4])
    assert y[4:].isnan().all()
