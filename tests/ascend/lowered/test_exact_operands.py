"""Every kernel on operands whose result float32 holds exactly, in any order of its sums: whole
numbers of x and codes, scales of two bits, a factor that fp16 does not hold. So the result is
float64's, rounded once where it is stored, to the bit."""

import pytest
import torch
from ascend import npu_double
from ascend.lowered.ascend_ir import execute
from ascend.row_blocks import in_order
from quantkit_kernels import Fp4, Int4, Int8, dequantize
from quantkit_kernels.ascend import launch, layout

FACTORS = (2.0**40, 2.0**-40)
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


LARGE = 2.0**17
"""Times a code more than fp16 holds."""


def integers(rows, k, rng, low=-4, high=5):
    return torch.randint(low, high, (rows, k), generator=rng).bfloat16()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("grid", GRIDS, ids=named("rows"))
def test_rows(grid, factor):
    rng = torch.Generator().manual_seed(1)
    weights = [whole(grid, 72, 256, factor, rng) for _ in range(2)]
    x, out, experts = (
        LARGE * integers(3, 256, rng),
        torch.zeros(3, 72).bfloat16(),
        torch.tensor([1, 0, 1], dtype=torch.int32),
    )
    run(launch.rows(packed_of(weights), x, experts, out))
    exact = torch.cat(
        [times(x[row : row + 1], weights[expert]) for row, expert in enumerate(experts.tolist())]
    )
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("grid", [*GRIDS, "int8"], ids=named("blocks"))
def test_blocks(grid, factor):
    rng = torch.Generator().manual_seed(2)
    weights = [whole(grid, 72, 256, factor, rng) for _ in range(2)]
    x, out, experts = (
        integers(20, 256, rng),
        torch.zeros(20, 72).bfloat16(),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    scale = 2.0 ** torch.randint(-2, 3, (20,), generator=rng)
    by = scale if grid == "int8" else torch.full((20,), LARGE)
    codes, rows = (x.to(torch.int8), scale) if grid == "int8" else (LARGE * x, None)
    run(launch.blocks(packed_of(weights), codes, rows, in_order(experts, len(x), 16), out))
    exact = torch.cat([times(x[:16], weights[1]), times(x[16:], weights[0])])
    assert torch.equal(out, (exact * by.double().unsqueeze(1)).bfloat16())


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
    experts, share = (
        torch.tensor([2, 0, 1, 2], dtype=torch.int32),
        1 + (2 * torch.arange(4) + 1) / 256,
    )
    out = torch.zeros(2, 136).bfloat16()
    run(launch.down(packed_of(weights), x, experts, share, out))
    products = torch.cat(
        [times(x[row : row + 1], weights[expert]) for row, expert in enumerate(experts.tolist())]
    )
    exact = (products * share.double().unsqueeze(1)).unflatten(0, (2, 2)).sum(dim=1)
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
    experts, out = (
        torch.tensor([1, 0, 0], dtype=torch.int32).repeat(2),
        torch.zeros(6, 128).bfloat16(),
    )
    run(launch.gate_up(packed_of(both), x, experts, out))
    exact = []
    for row, expert in enumerate(experts.tolist()):
        gate, up = times(x[row // 3][None], gates[expert]), times(x[row // 3][None], ups[expert])
        assert bool((gate >= 17).all())
        exact.append(gate * up)
    assert torch.equal(torch.cat(exact).float().double(), torch.cat(exact))
    assert torch.equal(out, torch.cat(exact).bfloat16())
