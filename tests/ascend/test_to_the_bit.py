"""Backend torch_npu, operator by operator, against `exact` to the last bit: what a tolerance cannot
see, as an operand rounded once more.

Scales are stretched past what fp16 holds, where the compute dtype is bf16. And what an operator
holds is everything that it computes with.
"""

import pytest
import torch
from ascend import exact, npu_double
from ascend.test_latent_attention import layer_of, page_ends
from ascend.test_torch_npu import random
from kernel_weights import random_experts
from quantkit_kernels import (
    Fp4,
    PagedLatents,
    Rotation,
    Routing,
    doubled_angles,
    functional,
    moe_gate,
    prepare,
    prepare_mla_prolog,
    torch_npu,
)
from quantkit_kernels.ascend import AscendLayout, AscendLinear
from quantkit_kernels.paged import split_latents
from quantkit_kernels.samples import latent_attention, random_weight
from quantkit_kernels.torch_npu import experts_layout
from quantkit_kernels.torch_npu.calls import prefetch
from quantkit_kernels.weights import Dense
from torch import Tensor

pytestmark = pytest.mark.usefixtures("called")
CPU = torch.device("cpu")
GRIDS = ("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128", "int8", "fp4", "dense")
LINEARS = {
    "int4": {"npu_weight_quant_batchmatmul"},
    "int8": {"npu_format_cast", "npu_dynamic_quant", "npu_quant_matmul"},
}
"""Operators that a linear is, by its kind; the others are torch's own."""
LARGE = 2.0**40


def stretched(weight, factor):
    """Its scales times a power of two; fp16's largest is 2^16, its smallest 2^-24. Scales keep
    their float32 digits."""
    if isinstance(weight, Fp4):
        return weight._replace(global_scale=weight.global_scale * factor)
    if isinstance(weight, Dense):
        return Dense(weight.weight * factor)
    return weight._replace(scale=weight.scale * factor)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, 1.0), (torch.bfloat16, LARGE), (torch.bfloat16, 1 / LARGE)],
    ids=str,
)
def test_linear(grid, dtype, factor, called):
    called.clear()
    weight = stretched(random_weight(grid, 136, 256, torch.Generator().manual_seed(5)), factor)
    ours, twin = prepare(weight, backend="torch_npu", dtype=dtype), exact.linear(weight, dtype, CPU)
    for rows in (1, 9):
        x = random(rows, 256, dtype=dtype, seed=rows)
        assert torch.equal(ours(x), twin(x)), rows
    kind = grid.split("-")[0]
    assert set(called) == LINEARS.get(kind, set()) <= set(torch_npu.NEEDS[f"linear_{kind}"])


@pytest.mark.parametrize(
    "grid", ["int4-asym-32", "int4-asym-128", "int8", "int8-narrow", "fp4", "dense"]
)
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, 1.0), (torch.bfloat16, 2.0**20), (torch.bfloat16, 2.0**-30)],
    ids=str,
)
def test_experts(grid, dtype, factor, called):
    """gate and up are as they are, for a SiLU of a large value is linear; down is stretched, and
    tokens' weights too. In groups of 128 down has one, which is per channel, and gate and up
    have two."""
    rng = torch.Generator().manual_seed(2)
    weights = random_experts(grid, 5, 256, 128, rng)
    weights[2] = [stretched(one, factor) for one in weights[2]]
    made = []
    for layout in (
        experts_layout(5, weights[0][0], weights[2][0], dtype, CPU),
        exact.experts_layout(5, weights[0][0], weights[2][0], dtype, CPU),
    ):
        for index in range(5):
            layout.place(index, *(projection[index] for projection in weights))
        made.append(layout.finish())
    x, ids = random(6, 256, dtype=dtype), torch.rand(6, 5, generator=rng).topk(2, dim=-1).indices
    share = torch.rand(6, 2, generator=rng) * (LARGE if dtype == torch.bfloat16 else 1)
    called.clear()
    assert made[0].num_experts == 5
    found = made[0](x, ids, share)
    assert called.count("npu_grouped_matmul") == (0 if grid == "fp4" else 2)
    assert set(called) <= set(torch_npu.NEEDS[f"experts_{grid.split('-')[0]}"])
    assert torch.equal(found, made[1](x, ids, share))


@pytest.mark.parametrize("joined", [1, 2])
@pytest.mark.parametrize("least", [0.0, -50.0])
def test_gate(joined, least):
    """Scores that float32 tells apart and bf16 not; of -50, whose sum is next to an epsilon of
    1e-20."""
    rng = torch.Generator().manual_seed(1)
    x, router = random(7, 256), torch.randn(32, 256, generator=rng) / 16
    x[:, 0], router[:, 0] = 1.0, router[:, 0] + least
    how = Routing(
        32, 4, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_joined_experts=joined
    )
    bias = torch.rand(32, generator=rng) / 1000
    ids, weights = moe_gate(x, router, bias, how, backend="torch_npu")
    twin_ids, twin_weights = exact.moe_gate(x, router, bias, how)
    assert torch.equal(ids.long(), twin_ids)
    torch.testing.assert_close(weights, twin_weights, rtol=1e-6, atol=0)


def test_activation_and_rotation():
    slice_of_more = random(5, 512)[:, 128:384]
    assert torch.equal(
        functional.silu_and_mul(slice_of_more, backend="torch_npu"),
        exact.silu_and_mul(slice_of_more),
    )
    x, angles = random(5, 16, 64), torch.rand(9, 32, generator=torch.Generator().manual_seed(1)) * 6
    tables, positions = (angles.cos(), angles.sin()), torch.tensor([3, 0, 8, 8, 1])
    ours = functional.rope(x, positions, *tables, interleaved=True, backend="torch_npu")
    twin = exact.rope(x, positions, *tables, True)
    assert torch.equal(ours, twin)


@pytest.mark.parametrize(("grid", "nope"), [("dense", 128), ("int8", 128), ("dense", 192)])
def test_prolog(grid, nope):
    """From projections to values, with both caches, at the ends of pages."""
    weights, lengths = layer_of(grid, nope=nope), page_ends(16)
    heads = len(weights.kv_b)
    case = latent_attention(lengths, heads, 16, (nope, 64, 128, 512), torch.bfloat16)
    _, _, rotation, pages = case.arguments
    assert isinstance(pages.cache, Tensor)
    doubled = Rotation(*doubled_angles(*rotation[:2], torch.bfloat16))
    last = torch.tensor([max(length - 1, 0) for length in lengths])
    slots = torch.where(
        torch.tensor(lengths) > 0,
        pages.block_table[torch.arange(len(lengths)), last // 16] * 16 + last % 16,
        0,
    ).long()
    x, found = random(len(lengths), 7168, seed=4), []
    for prolog in (
        prepare_mla_prolog(weights, 64, eps=1e-6, interleaved=True, backend="torch_npu"),
        exact.ExactProlog(weights, 1e-6),
    ):
        cache = split_latents(pages.cache.clone().nan_to_num(7.0), 512, True)
        here = PagedLatents(cache, pages.block_table, pages.seq_lens, lengths)
        found.append((prolog(x, doubled, slots, here, scale=case.scale), *cache))
    for ours, twin in zip(*found):
        assert torch.equal(ours, twin)


def tensors_of(thing, depth=4):
    """What can be reached from an operator by attributes, tuples and lists."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for one in thing:
            yield from tensors_of(one, depth)
    elif depth and hasattr(thing, "__dict__"):
        for one in vars(thing).values():
            yield from tensors_of(one, depth - 1)


def bytes_of(tensors):
    return {(one.data_ptr(), one.nbytes) for one in tensors}


@pytest.mark.parametrize("backend", ["torch_npu", "ascend"])
@pytest.mark.parametrize("grid", [*GRIDS, "int8-narrow"])
def test_what_is_held_is_all_that_is_computed_with(grid, backend):
    """Else it is neither prefetched nor counted. The experts of FP4 on torch_npu and the gains of
    norms are small, and not prefetched."""
    rng = torch.Generator().manual_seed(1)
    if not (backend == "ascend" and grid == "dense"):
        weight = random_weight(grid, 64, 128, rng)
        linear = (
            AscendLinear(weight, torch.bfloat16, CPU)
            if backend == "ascend"
            else prepare(weight, backend=backend)
        )
        assert bytes_of(linear.held()) == bytes_of(tensors_of(linear))
        gate, up, down = random_experts(grid, 2, 128, 128, rng)
        made = (
            AscendLayout(2, torch.bfloat16, CPU)
            if backend == "ascend"
            else experts_layout(2, gate[0], down[0], torch.bfloat16, CPU)
        )
        for index in range(2):
            made.place(index, gate[index], up[index], down[index])
        experts = made.finish()
        assert bytes_of(experts.held()) == bytes_of(tensors_of(experts))


@pytest.mark.parametrize("grid", ["dense", "int8"])
def test_what_a_prolog_holds(grid):
    """kv_b is for prompts; two gains are 4 KB."""
    prolog = prepare_mla_prolog(layer_of(grid), 64, eps=1e-6, interleaved=True, backend="torch_npu")
    left = bytes_of(tensors_of(prolog)) - bytes_of(prolog.held())
    assert left == bytes_of([prolog.kv_b, *prolog._gains])


def test_every_byte_of_a_large_tensor_is_asked_for(monkeypatch):
    """Each not before the collective's operand is there."""
    asked, after = [], torch.zeros(1)

    def note(a):
        asked.append((a.max_size, a.dependency.data_ptr()))

    monkeypatch.setitem(npu_double.RESULTS, "npu_prefetch", note)
    large = torch.empty(33 << 20, dtype=torch.int16)
    prefetch([large, large[:5]], after)
    assert asked == [(66 << 20, after.data_ptr()), (10, after.data_ptr())]
