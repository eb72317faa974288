"""Latent attention by backend torch_npu on the double: two caches at DeepSeek-V3's sizes, by the
prolog and by the chain it replaces."""

import pytest
import torch
from ascend import npu_double
from ascend.npu_double import NZ, layout_of
from ascend.test_torch_npu import EPS, random
from quantkit_kernels import (
    MlaWeights,
    Norms,
    PagedLatents,
    Rotation,
    cache_layout,
    doubled_angles,
    functional,
    prepare_mla_prolog,
    reference,
    torch_npu,
    why_no_prolog,
)
from quantkit_kernels.paged import pairs_apart, pairs_together, split_latents
from quantkit_kernels.samples import distance, latent_attention, random_weight
from quantkit_kernels.torch_npu.functional import attend

pytestmark = pytest.mark.usefixtures("called")


def page_ends(block_size):
    """A row of no tokens beside one of one, and rows that end before, at and behind the end of a
    page."""
    return [1, 0, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size]


def halves(x):
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_prepare(interleaved, called):
    """DeepSeek-V3's sizes: norm, rotation and both caches in one launch."""
    called.clear()
    qkv_a, angles, slots = (
        random(3, 1536 + 576),
        random(3, 32, dtype=torch.float32, seed=1),
        torch.tensor([5, 0, 17]),
    )
    gains, tables = (random(1536, seed=2), random(512, seed=3)), (angles.cos(), angles.sin())
    latents, keys = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 16, 64).bfloat16()
    norms, doubled = (
        Norms(*gains, EPS),
        Rotation(*doubled_angles(*tables, torch.bfloat16), interleaved),
    )
    q_a = functional.mla_prepare(qkv_a, norms, doubled, (latents, keys), slots, backend="torch_npu")
    twin = torch.zeros(2, 16, 576).bfloat16()
    expected = reference.mla_prepare(qkv_a, norms, Rotation(*tables, interleaved), twin, slots)
    assert distance(q_a, expected.double()) < 4e-3
    assert distance(latents, twin[..., :512].double()) < 4e-3
    assert (
        distance(keys, (halves(twin[..., 512:]) if interleaved else twin[..., 512:]).double())
        < 4e-3
    )
    assert called == ["npu_kv_rmsnorm_rope_cache", "npu_rms_norm"]
    assert set(called) <= set(torch_npu.NEEDS["mla_prepare"])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "block_size"), [(16, 128), (128, 16), (1, 128)])
def test_mla_decode(heads, block_size, interleaved, called):
    """Pages where they lie; NaN past a sequence's end and in the tables' other blocks; lengths from
    the host, and from the device."""
    called.clear()
    sizes = (128, 64, 128, 512)
    lengths = page_ends(block_size)
    case = latent_attention(
        lengths, heads, block_size, sizes, torch.bfloat16, interleaved=interleaved
    )
    q, kv_b, rotation, pages = case.arguments
    doubled = Rotation(*doubled_angles(rotation.cos, rotation.sin, torch.bfloat16), interleaved)
    apart = pages._replace(cache=split_latents(pages.cache, 512, interleaved))
    ours = functional.mla_decode(q, kv_b, doubled, apart, scale=case.scale, backend="torch_npu")
    assert distance(ours, case.exact) < 1e-2
    assert all(
        distance(one, exact) < 1e-2
        for one, exact, length in zip(ours, case.exact, lengths)
        if length
    )
    told = apart._replace(lengths=lengths)
    assert torch.equal(
        functional.mla_decode(q, kv_b, doubled, told, scale=case.scale, backend="torch_npu"), ours
    )
    products = "npu_transpose_batchmatmul"
    assert (
        called
        == [products, "npu_interleave_rope", "npu_fused_infer_attention_score_v2", products] * 2
    )
    assert set(called) <= set(torch_npu.NEEDS["mla_decode"])


def test_latents_of_small_models_are_keys_in_one_tensor(called):
    """Whose first channels are the values."""
    called.clear()
    case = latent_attention([17, 24], 2, 16, (128, 64, 128, 256), torch.bfloat16)
    ours = functional.mla_decode(*case.arguments, scale=case.scale, backend="torch_npu")
    assert distance(ours, case.exact) < 1e-2
    assert "npu_fused_infer_attention_score_v2" in called


def test_queries_need_not_lie_in_one_piece():
    """Parts of something wider, from one cache and from two; the operator's rules demand one
    piece. Tables need not be wider than what they name."""
    case = latent_attention([17, 24], 2, 16, (128, 64, 128, 512), torch.bfloat16)
    pages, wide = case.arguments[3], random(2, 2, 2 * 576)
    absorbed, q_pe = wide[..., :512], wide[..., 600:664]
    for one in (pages, pages._replace(cache=split_latents(pages.cache, 512, True))):
        expected = attend(absorbed.contiguous(), q_pe.contiguous(), one, 0.1)
        assert torch.equal(attend(absorbed, q_pe, one, 0.1), expected)
        full = one._replace(block_table=one.block_table[:, :2])
        assert torch.equal(attend(absorbed, q_pe, full, 0.1), expected)


def test_two_caches_are_read_by_the_operator_alone():
    """What it refuses is not computed in another way: three heads are no power of two."""
    case = latent_attention([17, 24], 3, 16, (128, 64, 128, 512), torch.bfloat16)
    pages = case.arguments[3]
    with pytest.raises(AssertionError, match="a power of two"):
        attend(
            random(2, 3, 512),
            random(2, 3, 64),
            pages._replace(cache=split_latents(pages.cache, 512, True)),
            0.1,
        )


def test_pairs_of_any_rank():
    assert pairs_apart(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    for shape in ((3, 8), (3, 2, 8), (3, 2, 2, 8)):
        x = random(*shape)
        assert torch.equal(pairs_apart(x), halves(x))
        assert torch.equal(pairs_together(halves(x)), x)


def test_the_cache_lies_as_the_operators_want():
    cpu = torch.device("cpu")
    assert cache_layout(512, 64, torch.bfloat16, cpu, backend="torch_npu") == ((512, 64), 128)
    assert cache_layout(512, 64, torch.float32, cpu, backend="torch_npu").widths == (576,)
    assert cache_layout(128, 32, torch.bfloat16, cpu, backend="torch_npu").widths == (160,)
    assert cache_layout(512, 32, torch.bfloat16, cpu, backend="torch_npu").widths == (544,)
    assert cache_layout(512, 64, torch.bfloat16, cpu, backend="reference").widths == (576,)
    case = latent_attention([3], 2, 16, (128, 64, 128, 512), torch.bfloat16)
    q, kv_b, rotation, pages = case.arguments
    apart = pages._replace(cache=split_latents(pages.cache, 512, True))
    with pytest.raises(ValueError, match="cache: in two tensors, which reference does not read"):
        functional.mla_decode(q, kv_b, rotation, apart, scale=1.0, backend="reference")


def layer_of(grid, seed=3, heads=2, nope=128):
    """One layer of R1's sizes but for the heads."""
    rng = torch.Generator().manual_seed(seed)
    q_a, q_b, kv_a = (
        random_weight(grid, n, k, rng)
        for n, k in ((1536, 7168), (heads * (nope + 64), 1536), (576, 7168))
    )
    kv_b = (torch.randn(heads, nope + 128, 512, generator=rng) / 512**0.5).bfloat16()
    return MlaWeights(q_a, q_b, kv_a, kv_b, random(1536, seed=4).abs(), random(512, seed=5).abs())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("grid", ["dense", "int8"])
def test_mla_prolog_is_the_chain_it_replaces(grid, interleaved, called, monkeypatch):
    """R1's sizes with two heads: queries, both caches and what the heads attended to, against the
    reference, launch by launch; weights in the layouts that the operator reads."""
    given = []
    computed = npu_double.RESULTS["npu_mla_prolog_v3"]
    monkeypatch.setitem(
        npu_double.RESULTS, "npu_mla_prolog_v3", lambda a: (given.append(a), computed(a))[1]
    )
    weights = layer_of(grid)
    x, angles, slots = (
        random(3, 7168),
        torch.rand(3, 32, generator=torch.Generator().manual_seed(3)) * 6,
        torch.tensor([5, 40, 17]),
    )
    tables = (angles.cos().bfloat16().float(), angles.sin().bfloat16().float())
    table, seq_lens = torch.tensor([[0, 2], [2, 0], [1, 0]]).int(), torch.tensor([6, 9, 2])
    prolog, chain = (
        prepare_mla_prolog(weights, 64, eps=EPS, interleaved=interleaved, backend=name)
        for name in ("torch_npu", "reference")
    )

    def order(pairs):
        return (halves(pairs) if interleaved else pairs).double()

    apart, whole = (
        (torch.zeros(3, 16, 512).bfloat16(), torch.zeros(3, 16, 64).bfloat16()),
        torch.zeros(3, 16, 576).bfloat16(),
    )
    called.clear()
    doubled, rotation = (
        Rotation(*doubled_angles(*tables, torch.bfloat16), interleaved),
        Rotation(*tables, interleaved),
    )
    absorbed, q_pe = prolog.query(x, doubled, apart, slots)
    assert called == ["npu_dynamic_quant", "npu_mla_prolog_v3"][grid != "int8" :]
    assert set(called) <= set(torch_npu.NEEDS["mla_prolog"])
    (call,) = given
    read = (call.weight_dq, call.weight_uq_qr, call.weight_dkv_kr, call.weight_uk)
    assert [*map(layout_of, read)] == [NZ, NZ, NZ, "ND"]
    expected, expected_pe = chain.query(x, rotation, whole, slots)
    assert distance(absorbed, expected.double()) < 2e-2
    assert distance(q_pe, order(expected_pe)) < 2e-2
    assert distance(apart[0], whole[..., :512].double()) < 2e-2
    assert distance(apart[1], order(whole[..., 512:])) < 2e-2
    written = torch.cat(apart, dim=-1).view(48, -1).abs().sum(dim=1).nonzero().flatten()
    assert written.tolist() == [5, 17, 40]
    ours = prolog(x, doubled, slots, PagedLatents(apart, table, seq_lens), scale=0.1)
    theirs = chain(x, rotation, slots, PagedLatents(whole, table, seq_lens), scale=0.1)
    assert distance(ours, theirs.double()) < 2e-2
    for one in ("qkv_a", "q_b"):  # for prefill
        inputs = x if one == "qkv_a" else random(3, 1536)
        assert distance(getattr(prolog, one)(inputs), getattr(chain, one)(inputs).double()) < 1e-2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grid": "int4-asym-128"}, "int8 or all unquantized, not int4"),
        ({"grid": "fp4"}, "not fp4"),
        ({"heads": 3}, "heads = 3"),
        ({"dtype": torch.float16}, "bfloat16 only"),
    ],
)
def test_mla_prolog_is_refused_with_the_reason(change, reason):
    how = {"grid": "int8", "heads": 2, "dtype": torch.bfloat16} | change
    weights = layer_of(how["grid"], heads=how["heads"])
    why = why_no_prolog(weights, 64, "torch_npu", how["dtype"], torch.device("cpu"))
    assert reason in (why or "")
