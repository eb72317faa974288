"""Every kernel on operands whose result float32 holds exactly, in any order of its sums: whole
numbers of x and codes, scales of two bits, a factor that fp16 does not hold. So the result is
float64's, rounded once where it is stored, to the bit; and nothing is written behind it."""

import pytest
import torch
from ascend import npu_double
from ascend.lowered.ascend_ir import execute
from quantkit_kernels import Fp4, Int4, Int8, dequantize
from quantkit_kernels.ascend import launch, layout

FACTORS = (2.0**40, 2.0**-40)
CANARY = 12345.0
GRIDS = ("int4-32", "int4-128", "fp4")


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda device: (3, 5))
    with npu_double.installed():
        yield


def named(kernel):
    """The kernel of a grid, by which mutants' tests are chosen."""
    return lambda grid: f"{grid.partition('-')[0]}_{kernel}-{grid}"


def run(one):
    execute(one.function, one.programs, one.args, one.constants)


def whole(grid, n, k, factor, rng, least=-8):
    """Codes from `least` on, scales of 1, 2 or 3 times the factor."""
    if grid == "fp4":
        codes = torch.randint(
            0 if least < 0 else 1, 16 if least < 0 else 8, (n, k), generator=rng, dtype=torch.uint8
        )
        scale = torch.randint(1, 4, (n, k // 16), generator=rng).to(torch.float8_e4m3fn)
        return Fp4(codes, scale, torch.full((n,), factor))
    codes = torch.randint(least, 8, (n, k), generator=rng, dtype=torch.int8)
    if grid == "int8":
        return Int8(
            codes, torch.full((n, 1), factor) * 2.0 ** torch.randint(0, 3, (n, 1), generator=rng)
        )
    groups = k // int(grid.partition("-")[2])
    zero = (
        torch.randint(-8, 8, (n, groups), generator=rng, dtype=torch.int8)
        if least < 0
        else torch.zeros(n, groups, dtype=torch.int8)
    )
    return Int4(codes, torch.randint(1, 4, (n, groups), generator=rng) * factor, zero)


def packed_of(weights):
    packed = layout.allocate(weights[0], len(weights), torch.device("cpu"))
    for index, weight in enumerate(weights):
        layout.place(packed, index, weight)
    return packed


def times(x, weight):
    return x.double() @ dequantize(weight, torch.float64).T


def each(x, experts, weights):
    """Every row by its expert."""
    pairs = zip(x.split(1), experts.tolist(), strict=True)
    return torch.cat([times(row, weights[expert]) for row, expert in pairs])


def room(rows, n):
    """Rows to write, and the memory behind them, in which nothing is to be written."""
    return torch.full((rows + 1, n), CANARY).bfloat16().split([rows, 1])


LARGE = 2.0**17
"""Times a code more than fp16 holds."""


def integers(rows, k, rng, low=-4, high=5):
    return torch.randint(low, high, (rows, k), generator=rng).bfloat16()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("grid", GRIDS, ids=named("rows"))
def test_rows(grid, factor):
    rng = torch.Generator().manual_seed(1)
    weights = [whole(grid, 72, 256, factor, rng) for _ in range(2)]
    x, experts = LARGE * integers(3, 256, rng), torch.tensor([1, 0, 1], dtype=torch.int32)
    out, behind = room(3, 72)
    run(launch.rows(packed_of(weights), x, experts, out))
    assert torch.equal(out, each(x, experts, weights).bfloat16())
    assert bool((behind == CANARY).all())


@pytest.mark.parametrize(("factor", "bm"), [*zip(FACTORS, (16, 32))])
@pytest.mark.parametrize("grid", [*GRIDS, "int8"], ids=named("blocks"))
def test_blocks(grid, factor, bm):
    """Whole blocks and ragged ones, in no order; rows of no block, and a block of no expert, are
    left alone."""
    rng, m = torch.Generator().manual_seed(2), 3 * bm + 8
    weights = [whole(grid, 152, 256, factor, rng) for _ in range(2)]
    first, last = torch.tensor(
        [[3, 0, bm + 3, bm + 4, m - bm], [bm + 3, bm, bm + 4, 2 * bm + 1, m]], dtype=torch.int32
    )
    of = launch.Blocks(bm, torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32), first, last)
    x, scale = integers(m, 256, rng), 2.0 ** torch.randint(-2, 3, (m,), generator=rng)
    by = scale if grid == "int8" else torch.full((m,), LARGE)
    codes, rows = (x.to(torch.int8), scale) if grid == "int8" else (LARGE * x, None)
    out, behind = room(m, 152)
    run(launch.blocks(packed_of(weights), codes, rows, of, out))
    exact = torch.full((m, 152), CANARY, dtype=torch.float64)
    for expert, *ends in zip(of.experts.tolist(), first.tolist(), last.tolist()):
        if expert >= 0:
            part = slice(*ends)
            exact[part] = times(x[part], weights[expert]) * by[part].double().unsqueeze(1)
    assert torch.equal(out, exact.bfloat16())
    assert bool((behind == CANARY).all())


def quantizable(rows, k, rng):
    """Rows of whole numbers whose largest is 127: their scale is 1, their codes are they."""
    x = integers(rows, k, rng, -100, 101)
    x[:, 3] = torch.where(torch.arange(rows) % 2 == 0, -127, 127)
    return x


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("grid", [*GRIDS, "int8"], ids=named("down"))
def test_down(grid, factor):
    """Experts' weights have nine bits, one more than bf16 has."""
    rng = torch.Generator().manual_seed(3)
    weights = [whole(grid, 136, 128, factor, rng, least=-1) for _ in range(3)]
    x = quantizable(4, 128, rng) if grid == "int8" else LARGE * integers(4, 128, rng, -2, 3)
    experts = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    share, (out, behind) = 1 + (2 * torch.arange(4) + 1) / 256, room(2, 136)
    run(launch.down(packed_of(weights), x, experts, share, out))
    assert bool((behind == CANARY).all())
    products = each(x, experts, weights) * share.double().unsqueeze(1)
    exact = products.unflatten(0, (2, 2)).sum(dim=1)
    if grid == "int8":  # more bits than float32 has, by the last of them
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)
    else:
        assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("grid", [*GRIDS, "int8"], ids=named("gate_up"))
@pytest.mark.parametrize("factor", FACTORS)
def test_gate_up(grid, factor):
    """Gates of 17 and more, which are their own SiLU: 1 + exp(-gate) is 1 there. A part of x alone
    is not zero, so that 24 bits hold their products with up."""
    rng = torch.Generator().manual_seed(4)
    pairs = [
        (whole(grid, 128, 128, 1.0, rng, least=1), whole(grid, 128, 128, factor, rng, least=-1))
        for _ in range(2)
    ]
    gates, ups = zip(*pairs)
    both = [
        type(gate)._make(None if parts[0] is None else torch.cat(parts) for parts in zip(gate, up))
        for gate, up in pairs
    ]
    x = integers(2, 128, rng, 1, 3) * (torch.arange(128) % 4 == 1)
    if grid == "int8":
        x[:, 5] = 127
    experts, (out, behind) = torch.tensor([1, 0, 0], dtype=torch.int32).repeat(2), room(6, 128)
    run(launch.gate_up(packed_of(both), x, experts, out))
    assert bool((behind == CANARY).all())
    gate, up = (each(x.repeat_interleave(3, dim=0), experts, side) for side in (gates, ups))
    assert bool((gate >= 17).all())
    assert torch.equal((gate * up).float().double(), gate * up)
    assert torch.equal(out, (gate * up).bfloat16())
