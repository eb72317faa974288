"""Attention of prompts on Hopper, its kernel's source interpreted on the CPU: right for every
shape, block, page and part of the keys."""

import random
from pathlib import Path

import pytest
import torch
from gluon_interpreter import Descriptor, Pointer, interpreted
from quantkit_kernels import PagedLatents, Prompts, Rotation, TopTokens, reference, triton
from quantkit_kernels.samples import TOLERANCE, distance, grouped_attention
from quantkit_kernels.triton.attention import prefill, wgmma
from sample_sizes import sized
from torch import Tensor

KERNEL = interpreted(
    Path(triton.__file__).parent / "attention" / "wgmma_kernel.py", "attend_prompts", readers=2
)


class Launched:
    """Stands in for the kernel of a launch: runs it interpreted."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        def launch(*args, num_warps, **named):
            self.calls.append(named)
            KERNEL(
                grid,
                *(Pointer(one.flatten()) if isinstance(one, Tensor) else one for one in args),
                **named,
            )

        return launch


@pytest.fixture
def calls(monkeypatch):
    """The CPU takes itself for a Hopper card; of every launch what is known when it is compiled."""
    found = []
    monkeypatch.setattr(wgmma, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(wgmma, "_kernel", lambda: Launched(found))
    monkeypatch.setattr(wgmma, "boxes", lambda rows, *box: Descriptor(rows, box))
    monkeypatch.setattr(prefill, "rope", reference.rope)
    return found


def chosen(choose, monkeypatch):
    cut = wgmma.WgmmaCut(choose.choice((64, 128)), choose.choice((2, 3)), choose.random() < 0.5)
    monkeypatch.setattr(wgmma, "_CUTS", (cut,))
    monkeypatch.setattr(wgmma, "_NARROW", cut)
    monkeypatch.setattr(wgmma, "_TOGETHER", choose.choice((1, 2, 4)))


@pytest.mark.parametrize("seed", range(sized(8, 24)))
def test_pages(seed, calls, monkeypatch):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    width, dtype = (
        choose.choice((16, 64, 80, 96, 128)),
        choose.choice((torch.bfloat16, torch.float16)),
    )
    chosen(choose, monkeypatch)
    monkeypatch.setattr(wgmma, "_LEAST_WINDOW", 1)
    seen = [choose.randint(1, 400) for _ in range(choose.randint(1, 3))]
    new = [choose.choice((1, length, choose.randint(1, length))) for length in seen]
    heads, window = choose.choice(((6, 2), (3, 3), (4, 1))), choose.choice((0, 0, 1, 17, 128, 190))
    sinks = torch.randn(heads[0]) * 2 if choose.random() < 0.4 else None
    case = grouped_attention(
        seen, new, heads, width, choose.choice((64, 128)), dtype, window=window, sinks=sinks
    )
    out = prefill.gqa_prefill(case.q, case.pages[:2], case.prompts, case.scale, window, sinks)
    assert distance(out, case.exact) < TOLERANCE[dtype]
    assert len(calls) == 1


def latents(spans, heads, nope, rotary, value, latent=40, blocks=24):
    """q, kv_b, rotation, the cache, the prompts, and a scale."""
    tokens, pages = sum(length for _, length in spans), blocks * len(spans)
    q = torch.randn(tokens, heads, nope + rotary).half()
    kv_b = (torch.randn(heads, nope + value, latent) / latent**0.5).half()
    cache, angles = torch.randn(pages, 16, latent + rotary).half(), torch.rand(tokens, rotary // 2)
    rotation = Rotation((6 * angles).cos(), (6 * angles).sin())
    prompts = Prompts.of(spans, torch.randperm(pages).view(len(spans), blocks))
    return q, kv_b, rotation, cache, prompts, (nope + rotary) ** -0.5


@pytest.mark.parametrize("seed", range(sized(3, 8)))
def test_latents_in_parts(seed, calls, monkeypatch):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    nope, rotary, value = (choose.choice(of) for of in ((64, 128), (16, 64), (32, 128)))
    chosen(choose, monkeypatch)
    monkeypatch.setattr(
        prefill, "_EXPANDED_BYTES", choose.choice((1 << 29, 150 * 3 * (nope + value) * 2))
    )
    spans = [
        (choose.choice((0, choose.randint(1, 200))), choose.randint(1, 180))
        for _ in range(choose.randint(1, 3))
    ]
    q, kv_b, rotation, cache, prompts, scale = latents(spans, 3, nope, rotary, value)
    exact = reference.mla_prefill(q.float(), kv_b.float(), rotation, cache.float(), prompts, scale)
    out = prefill.mla_prefill(q, kv_b, rotation, cache, prompts, scale, rope=reference.rope)
    assert distance(out, exact.double()) < 2 * TOLERANCE[torch.float16]
    assert calls


def test_latents_of_selected_tokens(calls, monkeypatch):
    """Two sequences; fewer tokens than are selected, and a block of which nothing is."""
    torch.manual_seed(1)
    monkeypatch.setattr(prefill, "selected_bits", packed_bits)
    spans, topk = [(250, 70), (0, 140)], 30
    q, kv_b, rotation, cache, prompts, scale = latents(spans, 2, 128, 64, 128)
    table, tokens = prompts.block_table, len(q)
    at = torch.cat([torch.arange(start, start + length) for start, length in spans])
    chosen = torch.rand(tokens, 320)
    chosen[:, 128:256] = 0
    chosen.masked_fill_(torch.arange(320) > at[:, None], -1)
    places = torch.sort(chosen.topk(topk).indices).values
    order = torch.where(chosen.gather(1, places) < 0, 1000, places).sort().values
    counts = (order < 1000).sum(1)
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor([70, 140]))
    valid = order.clamp(max=319)
    slots = table[rows].gather(1, valid // 16) * 16 + valid % 16
    selected = TopTokens(valid.int(), slots.int(), counts.int())
    pages = PagedLatents(cache.flatten(0, 1)[:, None].float(), slots.int(), counts.int())
    exact = reference.mla_decode(q.float(), kv_b.float(), rotation, pages, scale)
    out = prefill.mla_prefill(q, kv_b, rotation, cache, prompts, scale, selected, reference.rope)
    assert distance(out, exact.double()) < 2 * TOLERANCE[torch.float16]
    assert calls[0]["SELECTED"]
    assert prefill.takes_selected(q, kv_b, 64, 320 + 140)
    monkeypatch.setattr(prefill, "_EXPANDED_BYTES", 459 * 2 * 256 * 2)
    assert not prefill.takes_selected(q, kv_b, 64, 320 + 140), "in parts"


def packed_bits(selected, seen):
    """`selected_bits` without its kernel."""
    tokens, count = selected.positions.shape
    bits = torch.zeros(tokens, -(-seen // 128) * 4, dtype=torch.int32)
    valid = torch.arange(count) < selected.counts[:, None]
    places = selected.positions.long()
    ones = torch.where(valid, 1 << (places % 32), 0).int()
    return bits.scatter_add_(1, places // 32, ones)


def test_prompts_that_the_kernel_does_not_take_are_the_other_ones():
    cpu = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wgmma, "architecture", lambda device: "sm_90")
        assert wgmma.wgmma_cut(cpu, 128, 64, 128, 0, 0) == wgmma.WgmmaCut(128, 2, False)
        assert wgmma.wgmma_cut(cpu, 256, 0, 256, 64, 0) == wgmma.WgmmaCut(64, 2, True)
        assert wgmma.wgmma_cut(cpu, 64, 0, 64, 128, 0) == wgmma._NARROW
        assert wgmma.wgmma_cut(cpu, 128, 0, 128, 16, 0) is None
        assert wgmma.wgmma_cut(cpu, 128, 0, 128, 64, 511) is None
        assert wgmma.wgmma_cut(cpu, 128, 0, 128, 64, 512) == wgmma.WgmmaCut(128, 2, False)
        for other in ("sm_80", "sm_100", "sm_120", "gfx942"):
            patched.setattr(wgmma, "architecture", lambda device, other=other: other)
            assert wgmma.wgmma_cut(cpu, 128, 0, 128, 64, 0) is None
