"""Attention over pages, one token a row and whole prompts, of every backend and every kind of
cache, against float64."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from kernel_backends import backends_of, device_of
from quantkit_kernels import (
    PagedLatents,
    Prompts,
    Rotation,
    backends,
    gqa_decode,
    gqa_prefill,
    mla_decode,
    mla_prefill,
    reference,
)
from quantkit_kernels import cpu as cpu_backend
from quantkit_kernels.codes import CODES
from quantkit_kernels.cpu.build import why_no_library
from quantkit_kernels.reference import prompts as prompts_in_torch
from quantkit_kernels.samples import (
    TOLERANCE,
    code_latents,
    distance,
    grouped_attention,
    latent_attention,
)

CACHES = pytest.mark.parametrize("codes", [None, *CODES.values()], ids=["plain", *CODES])
INTERLEAVED = pytest.mark.parametrize("interleaved", [True, False])
compiled_prompts = pytest.mark.skipif(
    bool(why_no_library("prompts")), reason=str(why_no_library("prompts"))
)


R1 = (128, 64, 128, 512)
TABLE = yaml.safe_load(Path(__file__).with_name("attention_cases.yaml").read_text())


def cases_of(backend, kind):
    return TABLE[backend if backend in TABLE else "small"][kind]


def lengths_of(case):
    given = case["lengths"]
    if isinstance(given, list):
        return given
    first, how, last = given.split()
    return [int(first)] * int(last) if how == "times" else [*range(int(first), int(last) + 1)]


def grouped(one, backend, dtype, codes):
    """The case, and the keywords of its call; sinks lie some far below every score, some far
    above."""
    device, window, lengths = device_of(backend), one.get("window", 0), lengths_of(one)
    sinks = torch.tensor([-30.0, -1.0, 0.0, 2.0, 8.0, 40.0], device=device)
    given = sinks if "sinks" in one else None
    sizes = one["heads"], one["width"], one["block_size"]
    news = one.get("news", [1] * len(lengths))
    case = grouped_attention(lengths, news, *sizes, dtype, device, window, given, codes)
    return case, {"scale": case.scale, "window": window, "sinks": given, "backend": backend}


def check(run, exact, lengths, dtype, case):
    """Right, zeros for rows without tokens, and the same to the bit when it is asked again."""
    out = run()
    assert out.dtype == dtype
    assert all(length or out[row].abs().max() == 0 for row, length in enumerate(lengths)), case
    if any(lengths):
        assert distance(out, exact) < TOLERANCE[dtype], case
    for _ in range(3 if out.is_cuda else 1):
        assert torch.equal(out, run()), case


@CACHES
@pytest.mark.parametrize(("backend", "dtype"), backends_of("gqa_decode"))
def test_gqa_decode(backend, dtype, codes, poisoned_memory):
    for one in cases_of(backend, "gqa"):
        case, how = grouped(one, backend, dtype, codes)
        lengths = lengths_of(one)
        empty_is_zero = [1] * len(lengths) if "sinks" in one else lengths
        check(partial(gqa_decode, case.q, case.pages, **how), case.exact, empty_is_zero, dtype, one)


@CACHES
@INTERLEAVED
@pytest.mark.parametrize(("backend", "dtype"), backends_of("mla_decode"))
def test_mla_decode(backend, dtype, interleaved, codes, poisoned_memory):
    cases = cases_of(backend, "mla")
    # The interpreter takes seconds for a case.
    short = backend == "triton" and (codes is not None or dtype == torch.bfloat16)
    for one in cases[:2] if short else cases:
        lengths = lengths_of(one)
        sizes = one["heads"], one["block_size"], one["sizes"]
        case = latent_attention(lengths, *sizes, dtype, device_of(backend), interleaved, codes)
        run = partial(mla_decode, *case.arguments, scale=case.scale, backend=backend)
        check(run, case.exact, lengths, dtype, one)


@pytest.fixture(params=[False, True], ids=["whole", "in parts"])
def in_parts(request, monkeypatch):
    """Keys are read, expanded or decoded all at once, and some at a time, in parts that begin within
    sequences."""
    if request.param:
        monkeypatch.setattr(prompts_in_torch, "_KEYS", 100)
        monkeypatch.setattr(prompts_in_torch, "AT_ONCE", 100)
        monkeypatch.setattr("quantkit_kernels.triton.attention.prefill._EXPANDED_BYTES", 1 << 20)


@CACHES
@pytest.mark.parametrize(("backend", "dtype"), backends_of("gqa_prefill"))
def test_gqa_prefill(backend, dtype, codes, in_parts, poisoned_memory):
    for one in cases_of(backend, "prompts"):
        case, how = grouped(one, backend, dtype, codes)
        out = gqa_prefill(case.q, case.pages.cache, case.prompts, **how)
        assert distance(out, case.exact) < TOLERANCE[dtype], one


@CACHES
@INTERLEAVED
@pytest.mark.parametrize(("backend", "dtype"), backends_of("mla_prefill"))
def test_mla_prefill_is_mla_decode(backend, dtype, interleaved, codes, in_parts):
    """Expanded or absorbed: each token of several prompts as a row of its own."""
    given = cases_of(backend, "latent_prompts")
    spans, heads = [(first, new) for first, new in given["spans"]], given["heads"]
    device, block = device_of(backend), 16
    for nope, rope, value, latent in given["sizes"]:
        tokens = sum(new for _, new in spans)
        q = torch.randn(tokens, heads, nope + rope, device=device).to(dtype)
        kv_b = (torch.randn(heads, nope + value, latent, device=device) * latent**-0.5).to(dtype)
        angles = torch.rand(tokens, rope // 2, device=device) * 6
        rotation = Rotation(angles.cos(), angles.sin(), interleaved)
        width = -(-max(map(sum, spans)) // block)
        table = (torch.randperm(len(spans) * width, device=device) + 1).view(len(spans), width)
        cache = torch.randn(len(spans) * width + 1, block, latent + rope, device=device).to(dtype)
        stored = cache if codes is None else code_latents(cache, latent, codes)
        rows = torch.cat([table[i].expand(new, -1) for i, (_, new) in enumerate(spans)])
        seen = torch.cat([torch.arange(new) + start + 1 for start, new in spans]).to(device)
        pages = PagedLatents(cache.float() if codes is None else stored, rows, seen)
        exact = mla_decode(q.float(), kv_b.float(), rotation, pages, scale=0.2, backend="reference")
        prompts = Prompts.of(spans, table)
        out = mla_prefill(q, kv_b, rotation, stored, prompts, scale=0.2, backend=backend)
        assert distance(out, exact.double()) < 2 * TOLERANCE[dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("operator", ["gqa", "mla"])
def test_a_captured_decode_follows_the_lengths(operator):
    grouped = grouped_attention([640] * 8, [1] * 8, (32, 8), 128, 64, torch.bfloat16, "cuda")
    latent = latent_attention([640] * 8, 32, 64, R1, torch.bfloat16, "cuda")
    lengths = (grouped.pages if operator == "gqa" else latent.arguments[-1]).seq_lens

    def run(backend):
        if operator == "mla":
            return mla_decode(*latent.arguments, scale=latent.scale, backend=backend)
        return gqa_decode(grouped.q, grouped.pages, scale=grouped.scale, backend=backend)

    run("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run("cuda")
    for now in ([640] * 8, [1, 2, 3, 33, 100, 400, 639, 640], [32] * 8, [0] * 7 + [1]):
        if operator == "gqa" or all(now):
            lengths.copy_(torch.tensor(now))
            graph.replay()
            torch.cuda.synchronize()
            assert distance(out, run("reference").double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", backends_of("gqa_prefill", ("cpu", "cuda"), dtypes=False))
def test_a_prompt_cut_anywhere_gives_the_same(backend):
    """To the bit on CUDA."""
    length, cuts = (2000, [0, 1, 130, 1111, 2000]) if backend == "cuda" else (200, [0, 1, 130, 200])
    dtype = torch.bfloat16 if backend == "cuda" else torch.float32
    case = grouped_attention([length], [length], (8, 2), 128, 64, dtype, device_of(backend))
    q, cache, table = case.q, case.pages.cache, case.pages.block_table
    whole = gqa_prefill(q, cache, case.prompts, scale=case.scale, backend=backend)
    for start, stop in pairwise(cuts):
        part = Prompts.of([(start, stop - start)], table)
        found = gqa_prefill(q[start:stop], cache, part, scale=case.scale, backend=backend)
        if backend == "cuda":
            assert torch.equal(found, whole[start:stop])
        assert distance(found, whole[start:stop].double()) < 1e-6


@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
@pytest.mark.parametrize("backend", backends_of("gqa_decode", ("triton",), dtypes=False))
def test_values_of_unlike_sizes_with_a_sink(backend, codes):
    """Tokens' scales differ by up to 2^30, smallest first: what was summed in a small unit is
    carried into a larger one."""
    device = device_of(backend)
    sinks = torch.randn(6, device=device)
    case = grouped_attention(
        [150], [1], (6, 2), 32, 16, torch.float16, device, sinks=sinks, codes=codes
    )
    factor = torch.exp2(torch.linspace(-30, 0, case.pages.keys.shape[0] * 16, device=device))
    keys, values = case.pages.scales
    pages = case.pages._replace(scales=(keys, torch.nan_to_num(values) * factor.view(-1, 16, 1)))
    found, exact = (
        gqa_decode(q, pages, scale=case.scale, sinks=sinks, backend=name)
        for q, name in ((case.q, backend), (case.q.float(), "reference"))
    )
    assert distance(found, exact.double()) < TOLERANCE[torch.float16]


@compiled_prompts
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at_once", [4096, 100])
@pytest.mark.parametrize("window", [0, 1, 130])
def test_compiled_attention_of_prompts_is_float32(window, at_once, threads, monkeypatch):
    """Odd heads, keys in one part or several, of which the first tokens may see none."""
    monkeypatch.setattr(prompts_in_torch, "AT_ONCE", at_once)
    monkeypatch.setattr(prompts_in_torch, "attend_one", None)  # it is not asked
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for heads, width in (((14, 2), 64), ((3, 3), 80), ((5, 1), 24), ((2, 1), 256)):
        case = grouped_attention(
            [1, 300, 257], [1, 200, 3], heads, width, 16, torch.float32, window=window
        )
        out = gqa_prefill(
            case.q, case.pages.cache, case.prompts, scale=case.scale, window=window, backend="cpu"
        )
        assert distance(out, case.exact) < 2e-6


def test_backends_without_sinks_are_named_and_the_reference_computes_them():
    cpu = torch.device("cpu")
    assert backends.find_with_sinks("gqa_prefill", "auto", cpu) is cpu_backend
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(cpu_backend, "SINKS")
        backends.forget()
        assert backends.find_with_sinks("gqa_prefill", "auto", cpu) is reference
        with pytest.raises(ValueError, match="cpu runs gqa_prefill without attention sinks"):
            backends.find_with_sinks("gqa_prefill", "cpu", cpu)
        reasons = {
            row.operator: row.reason for row in backends.table("cpu") if row.backend == "cpu"
        }
        assert reasons["gqa_prefill"] == "attention sinks: another backend"
        backends.forget()
