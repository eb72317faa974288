"""The executor on the double at DeepSeek-R1's sizes of latent attention, where torch_npu has
operators that a smaller model does not reach: npu_mla_prolog_v3 for INT8 and unquantized weights,
npu_kv_rmsnorm_rope_cache and npu_interleave_rope for 4-bit ones, a cache in two."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ascend import device_double, exact, npu_double
from ascend.test_executor import forced
from quantkit_kernels import accelerator

from quantkit import Engine, SamplingParams
from quantkit.executor.runner.graphs import DeviceCapture
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.sequence import TokenLogprob

PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(3)]
CHAIN = {"npu_kv_rmsnorm_rope_cache", "npu_interleave_rope"}
DECODED_BY = {
    "bf16": {"npu_mla_prolog_v3"},
    "int8-a8w8c16": {"npu_mla_prolog_v3"},
    "rtn-w4a16": CHAIN,
}
MIXED = {"int8-attention": {"npu_mla_prolog_v3"}}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def load(path, backend, **options):
    return Engine.load(
        path,
        device="cpu",
        dtype="bfloat16",
        backend=backend,
        max_batch=4,
        max_model_len=256,
        **options,
    )


def answers(engine):
    params = [
        SamplingParams(max_new_tokens=4 + 3 * i, ignore_eos=True, logprobs=2) for i in range(3)
    ]
    return sorted(engine.generate(PROMPTS, params), key=lambda done: done.index)


def tokens(engine):
    return [one.token_ids for one in answers(engine)]


@pytest.mark.parametrize("scheme", DECODED_BY | MIXED)
def test_the_double_is_exact(scheme, r1_attention):
    """Prefill and decode of three prompts: the tokens and log-probabilities of a second
    computation, bit for bit."""
    path = r1_attention(scheme)
    with exact.installed():
        expected = answers(load(path, "reference"))
    with npu_double.installed() as called:
        engine = load(path, "torch_npu")
        assert engine.cache.parts == (512, 64)
        assert engine.cache.block_size == 128
        got = answers(engine)
    fused = {"npu_mla_prolog_v3", *CHAIN}
    assert set(called) & fused == (DECODED_BY | MIXED)[scheme] | {
        "npu_kv_rmsnorm_rope_cache"
    }  # prefill caches by the chain
    assert "npu_fused_infer_attention_score_v2" in called
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [one.logprobs for one in got] == [one.logprobs for one in expected]


@pytest.mark.parametrize(("scheme", "way"), [
    ("halves", contextlib.nullcontext), ("rtn-w4a16", npu_double.few_rows_split),
])  # fmt: skip
def test_the_tokens_of_the_reference_backend(scheme, way, r1_attention):
    """Pairs half a head apart, and CANN's way for 4-bit linears of a decode step, where no bit need
    agree: tokens where the two best lie further apart than twice what the two computations differ
    by; a sequence is compared up to its first such."""
    path = r1_attention(scheme)
    expected = answers(load(path, "reference"))
    with npu_double.installed() as called, way():
        got = answers(load(path, "torch_npu"))
    assert set(called) >= DECODED_BY.get(scheme, {"npu_mla_prolog_v3"})
    agree([one.logprobs or [] for one in got], [one.logprobs or [] for one in expected])


def agree(got, expected):
    """The same tokens, of every sequence up to where the two best lie close."""
    compared = 0
    for one, other in zip(got, expected, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            if theirs.top[0][1] - theirs.top[1][1] < 0.1:
                break
            assert ours.token_id == theirs.token_id
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("scheme", ["bf16", "rtn-w4a16", "int8-a8w8c16"])
def test_as_far_from_float32_as_the_reference(scheme, r1_attention):
    """By the median of 41 decoded tokens: a mean is that of the few where random weights send a
    token to another expert."""
    path = r1_attention(scheme)
    text = torch.randint(6, 310, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    ideal = forced(path, "float32", "reference", [(text, 80)])
    reference = forced(path, "bfloat16", "reference", [(text, 80)])
    with npu_double.installed():
        ours = forced(path, "bfloat16", "torch_npu", [(text, 80)])
    far, ours_far = (
        (ideal.exp() * (ideal - other)).sum(dim=-1).median() for other in (reference, ours)
    )
    assert ours_far < 2 * far


RANK = """
import json, sys, torch
from ascend import npu_double
from ascend.test_r1_attention import answers, load
from quantkit.executor.worker import follow
with torch.inference_mode(), npu_double.installed() as called:
    engine = load(sys.argv[1], "torch_npu", tp=2)
    if engine.parallel.rank:
        follow(engine)
        engine.parallel.close()
        sys.exit(0)
    found = answers(engine)
    engine.close()
    print(json.dumps([sorted(set(called)), [[(one.token_id, one.logprob, one.top) for one in
    done.logprobs] for done in found]]))
"""


@pytest.mark.parametrize("scheme", ["bf16", "int8-a8w8c16"])
def test_two_ranks(scheme, r1_attention):
    """Each with one of the two heads, over gloo: the tokens of one rank, and each rank by the
    prolog."""
    path = r1_attention(scheme)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    shared["PYTHONPATH"] = os.pathsep.join(
        [
            str(Path(__file__).parents[1]),
            str(Path(__file__).parents[1] / "support"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    command = [sys.executable, "-c", RANK, str(path)]
    other = subprocess.Popen(command, env={**shared, "RANK": "1"}, stdout=subprocess.DEVNULL)
    first = subprocess.run(
        command, env={**shared, "RANK": "0"}, capture_output=True, text=True, timeout=300
    )
    assert other.wait(60) == 0
    called, found = json.loads(first.stdout.splitlines()[-1])
    assert {"npu_mla_prolog_v3", "npu_fused_infer_attention_score_v2"} <= set(called)
    with npu_double.installed():
        expected = answers(load(path, "torch_npu"))
    agree(
        [[TokenLogprob(*one) for one in done] for done in found],
        [one.logprobs or [] for one in expected],
    )


WAYS = [
    (way, scheme)
    for way in ("captured", "chunked", "drafts", "prefix")
    for scheme in ("int8-a8w8c16", "rtn-w4a16")
]


@pytest.fixture(scope="module")
def plain(r1_attention):
    """Tokens of plain steps on the double, computed once for a scheme."""

    @functools.cache
    def computed(scheme):
        with npu_double.installed():
            return tokens(load(r1_attention(scheme), "torch_npu"))

    return computed


@pytest.mark.parametrize(("option", "scheme"), [*WAYS, ("captured", "bf16"), ("prefix", "halves")])
def test_every_way_to_run(option, scheme, r1_attention, plain, monkeypatch):
    """A captured step, a prompt in chunks, guesses by the MTP layer and a shared beginning give the
    tokens of plain steps."""
    options = {
        "captured": {},
        "chunked": {"chunk_tokens": 16},
        "drafts": {"draft_length": 2},
        "prefix": {"prefix_cache": True},
    }[option]
    expected = plain(scheme)
    with npu_double.installed():
        engine = load(r1_attention(scheme), "torch_npu", **options)
        if option == "captured":
            monkeypatch.setattr(accelerator, "module", lambda device: device_double.driver())
            engine.runner = Runner(
                engine.loaded.model, engine.cache, DeviceCapture(torch.device("cpu"))
            )
        assert tokens(engine) == expected
        if option in ("captured", "prefix"):  # now there are graphs, and beginnings to share
            assert tokens(engine) == expected
        assert engine.runner.why_eager == "" or option != "captured"
