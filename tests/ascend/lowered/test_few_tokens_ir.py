"""The kernels of few tokens, executed from their IR: fewer programs than items, experts in no
order, operands at a guard page, fresh memory NaN, weights beyond 2 GiB, values no fp16 holds."""

import pytest
import torch
from ascend import npu_double
from ascend.guard import sparse
from ascend.lowered.ascend_ir import execute
from kernel_weights import exact_experts, random_experts
from quantkit_kernels import ascend
from quantkit_kernels.ascend import launch, layout
from quantkit_kernels.samples import distance, exact_expert

CPU = torch.device("cpu")
CANARY = 12345.0


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    ran = []

    def run(one):
        ran.append(one)
        execute(one.function, one.programs, one.args, one.constants)

    monkeypatch.setattr(launch, "cores", lambda device: (3, 5))
    monkeypatch.setattr(launch, "run", run)
    torch.use_deterministic_algorithms(True)  # torch then fills what `empty` gives with NaN
    with npu_double.installed():
        yield ran
    torch.use_deterministic_algorithms(False)


def placed(grid, hidden, intermediate, count, seed=6):
    weights = random_experts(grid, count, hidden, intermediate, torch.Generator().manual_seed(seed))
    made = ascend.experts_layout(count, weights[0][0], weights[2][0], torch.bfloat16, CPU)
    for index in reversed(range(count)):
        made.place(index, *(projection[index] for projection in weights))
    return made, weights


@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_what_is_not_theirs_stays(grid):
    """Nothing is written behind the outputs, and hidden sizes need not be whole tiles."""
    made, weights = placed(grid, 128 * 3, 128, 3)
    gate_up, down = made._gate_up, made._down
    rng, ids = torch.Generator().manual_seed(2), torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    x, share = torch.randn(2, 384, generator=rng).bfloat16(), torch.rand(4, generator=rng)
    memory = torch.full((6, 128), CANARY).bfloat16()
    launch.run(launch.gate_up(gate_up, x, ids, memory[:4]))
    assert bool((memory[4:] == CANARY).all())
    total = torch.full((3, 384), CANARY).bfloat16()
    launch.run(launch.down(down, memory[:4], ids, share, total[:2]))
    assert bool((total[2:] == CANARY).all())
    exact = exact_experts(x, ids.view(2, 2), share.view(2, 2), weights)
    assert distance(total[:2], exact) < 1e-2


def test_a_row_of_zeros_and_large_ones():
    """int8 rows of zeros have a scale; what no fp16 holds comes out."""
    made, weights = placed("int8", 128, 128, 2)
    x = torch.zeros(2, 128).bfloat16()
    x[1] = 3e6
    ids, share = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    result = made.finish()(x, ids, share)
    assert bool((result[0] == 0).all())
    assert distance(result[1:], exact_experts(x, ids, share, weights)[1:]) < 1e-2


@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4", "int8"])
def test_offsets_past_two_gib(grid):
    made, weights = placed(grid, 256, 128, 1)
    ends = []
    for small in (made._gate_up, made._down):
        count = (1 << 31) // small.tensors[0].numel() + 3
        tensors = tuple(sparse(count, one) for one in small.tensors)
        for room, one in zip(tensors, small.tensors):
            room[-1].copy_(one[0])
        ends.append(
            layout.PackedTiles(
                small.kind, small.n, small.k, count, tensors, small.group, small.has_zero
            )
        )
    x, one = (
        torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.ones(1),
    )
    activated, out = torch.zeros(1, 128).bfloat16(), torch.zeros(1, 256).bfloat16()
    launch.run(launch.gate_up(ends[0], x, torch.tensor([ends[0].num_experts - 1]).int(), activated))
    launch.run(
        launch.down(ends[1], activated, torch.tensor([ends[1].num_experts - 1]).int(), one, out)
    )
    assert distance(out, exact_expert(x, *(projection[0] for projection in weights))) < 1e-2


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(1, 256, 7168), (4, 40, 512), (3, 16, 256)]
)
def test_router(tokens, experts, hidden):
    rng = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(tokens, hidden, generator=rng).bfloat16(),
        torch.randn(experts, hidden, generator=rng),
    )
    memory = torch.full((tokens + 1, experts), CANARY)
    launch.run(launch.router(x, weight, memory[:tokens]))
    assert distance(memory[:tokens], x.double() @ weight.double().T) < 1e-6
    assert bool((memory[tokens:] == CANARY).all())


@pytest.mark.parametrize(
    ("tokens", "top_k", "joined"), [(1, 8, 1), (7, 8, 1), (4, 5, 3), (6, 1, 1)]
)
def test_join(tokens, top_k, joined):
    rng = torch.Generator().manual_seed(3)
    ids, weights = (
        torch.randint(0, 256, (tokens, top_k), generator=rng).int(),
        torch.rand(tokens, top_k, generator=rng),
    )
    numbers, shares = (
        torch.full((tokens + 1, top_k + joined), -7).int(),
        torch.full((tokens + 1, top_k + joined), CANARY),
    )
    launch.run(launch.join(ids, weights, numbers[:tokens], shares[:tokens], 256))
    behind = torch.arange(256, 256 + joined).int().expand(tokens, -1)
    assert torch.equal(numbers[:tokens], torch.cat([ids, behind], dim=1))
    assert torch.equal(shares[:tokens], torch.nn.functional.pad(weights, (0, joined), value=1.0))
    assert bool((numbers[tokens:] == -7).all())
    assert bool((shares[tokens:] == CANARY).all())


def test_the_canary_is_seen(few_cores):
    """A launch with an item too many ends at the guard page or writes over what is behind: tests
    above would see it."""
    memory = torch.full((2, 16), CANARY)
    one = launch.router(torch.randn(1, 256).bfloat16(), torch.randn(16, 256), memory[:1])
    args = (*one.args[:3], 2, *one.args[4:])
    with pytest.raises(AssertionError):
        execute(one.function, 1, args, one.constants)
