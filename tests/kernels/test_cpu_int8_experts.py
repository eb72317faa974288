"""A layer's int8 experts in one call of the CPU's C++: a loop over their linears, bit for bit."""

import pytest
import torch
from kernel_weights import layer, random_experts
from quantkit_kernels import NO_EXPERT
from quantkit_kernels.cpu import build, int8
from quantkit_kernels.cpu.int8_experts import Int8Experts
from quantkit_kernels.reference.experts import LoopExperts

taken = (
    build.why_no_library("int8") is None
    and build.level() == "VNNI"
    and not torch.cpu._is_amx_tile_supported()
)
one_call = pytest.mark.skipif(
    not taken or not int8.qlinear_is_exact(), reason="needs VNNI, no AMX and a C++ compiler"
)
COUNT, TOP_K = 7, 4


def routing(tokens, rng):
    """The first half asks for other experts each, the rest for some twice and for none; one expert
    is never asked for."""
    ids = torch.rand(tokens, COUNT - 1, generator=rng).topk(TOP_K).indices
    ids[tokens // 2 :] = torch.randint(
        NO_EXPERT, COUNT - 1, ids[tokens // 2 :].shape, generator=rng
    )
    return ids, torch.rand(tokens, TOP_K, generator=rng)


@one_call
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (100, 37), (96, 24)])
def test_one_call_is_the_loop_bit_for_bit(hidden, intermediate, dtype):
    """Of any number of threads; few tokens, and more pairs than are computed together."""
    rng = torch.Generator().manual_seed(0)
    experts = layer(random_experts("int8", COUNT, hidden, intermediate, rng), "cpu", dtype)
    assert isinstance(experts, Int8Experts)
    before = torch.get_num_threads()
    try:
        for tokens in (1, 2, 9, 300):
            x = torch.randn(tokens, hidden, generator=rng).to(dtype)
            ids, weights = routing(tokens, rng)
            expected = LoopExperts.sorted(experts, x, ids, weights)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(experts(x, ids, weights), expected), (tokens, threads)
                assert torch.equal(experts(x, ids.int(), weights), expected), (tokens, threads)
    finally:
        torch.set_num_threads(before)


@one_call
def test_ids_are_checked_and_none_may_be_asked():
    rng = torch.Generator().manual_seed(4)
    experts = layer(random_experts("int8", COUNT, 64, 32, rng), "cpu", torch.float32)
    x, weights = torch.randn(3, 64, generator=rng), torch.ones(3, 1)
    assert torch.equal(experts(x, torch.full((3, 1), NO_EXPERT), weights), torch.zeros(3, 64))
    for wrong in (NO_EXPERT - 1, COUNT):
        with pytest.raises(ValueError, match=f"topk_ids: .*{wrong}.*expected 0..{COUNT - 1}"):
            experts(x, torch.tensor([[0], [wrong], [1]]), weights)
    x[1] = torch.nan
    assert experts(x, torch.zeros(3, 1, dtype=torch.int64), weights).isnan().all(
        dim=1
    ).tolist() == [False, True, False]


@one_call
def test_float16_is_the_loop():
    rng = torch.Generator().manual_seed(5)
    assert type(layer(random_experts("int8", 2, 64, 32, rng), "cpu", torch.float16)) is LoopExperts
