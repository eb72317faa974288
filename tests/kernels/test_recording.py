"""A step that was recorded and is repeated over other values gives what computing it again would, to
the bit; what cannot be repeated is refused by name."""

import pytest
import torch
from kernel_weights import layer, random_experts
from quantkit_kernels import Routing, add_rms_norm, moe_gate, prepare, rms_norm, silu_and_mul
from quantkit_kernels.cpu.repeat import join
from quantkit_kernels.recording import record
from quantkit_kernels.samples import random_weight

ROWS, WIDTH = 3, 128


def _step():
    """Norms, linears of three grids, a router with experts, views, and results written in place."""
    rng = torch.Generator().manual_seed(0)
    linears = [
        prepare(random_weight(grid, WIDTH, WIDTH, rng), dtype=torch.bfloat16)
        for grid in ("int4-asym-32", "int8", "dense")
    ]
    gate_up = prepare(random_weight("int4-sym-32", 2 * WIDTH, WIDTH, rng), dtype=torch.bfloat16)
    experts = layer(random_experts("int4-asym-32", 6, WIDTH, 96, rng), "cpu", torch.bfloat16)
    router, gain = torch.randn(6, WIDTH, generator=rng) / 12, torch.rand(WIDTH, generator=rng)
    kept = torch.zeros(8, WIDTH, dtype=torch.bfloat16)

    def step(x, places):
        h = rms_norm(x, gain, 1e-6)
        for linear in linears:
            h, x = add_rms_norm(linear(h), x, gain, 1e-6)
        h = silu_and_mul(gate_up(h))
        h = h + experts(h, *moe_gate(h, router, None, Routing(6, 2)))
        kept.index_copy_(0, places, h)
        first, second = (kept[places].float() + torch.arange(WIDTH)).chunk(2, dim=1)
        return torch.cat((second, first), dim=1).argsort(dim=1), h, kept.flip(0)

    return step


@torch.inference_mode()
@pytest.mark.parametrize("joined", [False, True], ids=["by Python", "by C++"])
def test_a_repeated_step_is_one_computed_again(joined):
    step, fresh = _step(), _step()
    rng = torch.Generator().manual_seed(1)
    x, places = torch.randn(ROWS, WIDTH, generator=rng).bfloat16(), torch.arange(ROWS)
    results, recording = record(lambda: step(x, places))
    assert recording.refused == ""
    assert 0 < recording.nbytes < 1 << 20
    if joined:
        join(recording)
    for found, expected in zip(results, fresh(x, places)):
        assert torch.equal(found, expected)
    for turn in range(4):
        x.copy_(torch.randn(ROWS, WIDTH, generator=rng))
        places.copy_(torch.randperm(8, generator=rng)[:ROWS])
        recording.repeat()
        for found, expected in zip(results, fresh(x, places)):
            assert torch.equal(found, expected), turn


REFUSED = {
    "item": lambda x: x * float(x.sum()),
    "tolist": lambda x: x[: len(x.tolist())],
    "numpy": lambda x: x.numpy() is None or x,
    "tensor": lambda x: x + torch.tensor([1.0, 2.0]),
    "nonzero": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "condition": lambda x: x if (x > 0).any() else -x,
    "random": lambda x: x + torch.rand(2),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_depends_on_values_is_refused(name):
    x = torch.tensor([1.0, 2.0])
    result, recording = record(lambda: REFUSED[name](x))
    assert recording.refused
    if name != "random":
        assert torch.equal(result, REFUSED[name](x)), "it is computed all the same"
