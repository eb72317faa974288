"""The kernels of few tokens, executed from their IR: fewer programs than items, experts in no
order, operands at a guard page, fresh memory NaN, weights beyond 2 GiB, values no fp16 holds."""

import pytest
import torch
from ascend import npu_double
from ascend.lowered.ascend_ir import execute
from ascend.row_blocks import last_of_many
from kernel_weights import exact_experts, random_experts
from quantkit_kernels import ascend
from quantkit_kernels.ascend import launch
from quantkit_kernels.samples import distance, exact_expert

CPU = torch.device("cpu")
CANARY = 12345.0


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda device: (3, 5))
    monkeypatch.setattr(
        launch, "run", lambda one: execute(one.function, one.programs, one.args, one.constants)
    )
    torch.use_deterministic_algorithms(True)  # torch then fills what `empty` gives with NaN
    with npu_double.installed():
        yield
    torch.use_deterministic_algorithms(False)


def placed(grid, hidden, intermediate, count, seed=6):
    weights = random_experts(grid, count, hidden, intermediate, torch.Generator().manual_seed(seed))
    made = ascend.experts_layout(count, weights[0][0], weights[2][0], torch.bfloat16, CPU)
    for index in reversed(range(count)):
        made.place(index, *(projection[index] for projection in weights))
    return made, weights


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
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    activated, out = torch.zeros(1, 128).bfloat16(), torch.zeros(1, 256).bfloat16()
    gate_up, down = map(last_of_many, (made._gate_up, made._down))
    launch.run(launch.gate_up(gate_up[0], x, gate_up[1], activated))
    launch.run(launch.down(down[0], activated, down[1], torch.ones(1), out))
    assert distance(out, exact_expert(x, *(projection[0] for projection in weights))) < 1e-2


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(1, 256, 7168), (4, 40, 512), (3, 16, 256)]
)
def test_router(tokens, experts, hidden):
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    weight = torch.randn(experts, hidden, generator=rng)
    memory = torch.full((tokens + 1, experts), CANARY)
    launch.run(launch.router(x, weight, memory[:tokens]))
    assert distance(memory[:tokens], x.double() @ weight.double().T) < 1e-6
    assert bool((memory[tokens:] == CANARY).all())


@pytest.mark.parametrize(
    ("tokens", "top_k", "joined"), [(1, 8, 1), (7, 8, 1), (4, 5, 3), (6, 1, 1)]
)
def test_join(tokens, top_k, joined):
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (tokens, top_k), generator=rng).int()
    weights = torch.rand(tokens, top_k, generator=rng)
    shares = torch.full((tokens + 1, top_k + joined), CANARY)
    numbers = shares.int()
    launch.run(launch.join(ids, weights, numbers[:tokens], shares[:tokens], 256))
    behind = torch.arange(256, 256 + joined).int().expand(tokens, -1)
    assert torch.equal(numbers[:tokens], torch.cat([ids, behind], dim=1))
    assert torch.equal(shares[:tokens], torch.nn.functional.pad(weights, (0, joined), value=1.0))
    assert bool((numbers[tokens:] == CANARY).all())
    assert bool((shares[tokens:] == CANARY).all())
