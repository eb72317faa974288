"""Several ranks compute what one computes, and stop together."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch
from engines import completions, load
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.common.errors import UsageError
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import Leader
from quantkit.executor.ranks.parallel import Parallel, join
from quantkit.executor.sampling.grammar import regex

PROMPTS = [list(range(10 + i, 40 + 2 * i)) for i in range(5)]
PLAIN = [
    SamplingParams(
        max_new_tokens=12, temperature=(i % 2) * 0.8, seed=i, ignore_eos=True, logprobs=0
    )
    for i in range(5)
]
PARAMS = [
    PLAIN[0],
    replace(
        PLAIN[1], min_p=0.01, top_k=50, stop_token_ids=(319,), min_new_tokens=3, prompt_logprobs=1
    ),
    replace(
        PLAIN[2],
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((40, 2.0),),
    ),
    replace(PLAIN[3], grammar=regex("[a-z]{12,}")),
    replace(PLAIN[4], prompt_logprobs=0),
]


class BrokenStream:
    """A decoder that fails at the third token."""

    stopped = False
    tokens = 0

    def push(self, token_id):
        self.tokens += 1
        return "x" * (2 // (3 - self.tokens))

    def finish(self):
        return ""


def _check_sockets(tp):
    """Nobody outside this machine can reach the ranks."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert len(processes) >= tp
    listening = [
        one.laddr.ip
        for process in processes
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert listening, "the ranks meet somewhere"
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def run(engine):
    return completions(engine, PROMPTS, PARAMS)


@pytest.mark.parametrize(("tp", "draft_length"), [(2, 1), (4, 0)])
def test_ranks_together_are_one(tiny_checkpoint, tp, draft_length):
    """Greedy and sampled tokens identical, log-probabilities to float tolerance; a request left
    early stops on every rank."""
    alone = run(load(tiny_checkpoint, tp=1))
    engine = load(tiny_checkpoint, tp=tp, draft_length=draft_length)
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    stream.close()
    stream = engine.submit(PROMPTS[0], replace(PARAMS[0], stop=("never",)))
    stream._stream = BrokenStream()  # on rank 0 alone
    together = run(engine)
    assert isinstance(stream.fault, ZeroDivisionError)
    _check_sockets(tp)
    engine.close()
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for ours, theirs in zip(together, alone):
        scored = zip(
            (ours.prompt_logprobs or []) + ours.logprobs,
            (theirs.prompt_logprobs or []) + theirs.logprobs,
            strict=True,
        )
        differences = [abs(a.logprob - b.logprob) for a, b in scored]
        assert max(differences) < 0.02, (
            "the cache is bfloat16: sums in another order may round to its other neighbour"
        )
    assert engine.loaded.nbytes < load(
        tiny_checkpoint, tp=1, draft_length=draft_length
    ).loaded.nbytes * (0.7 if tp == 2 else 0.5)


def test_a_rank_that_dies_is_named_within_seconds(tiny_checkpoint):
    engine = load(tiny_checkpoint, tp=2)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    ranks = engine.parallel._ranks
    ranks.processes[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    with refused(r"rank 1 of 2 died \(signal SIGKILL\)"):
        for _ in stream:
            pass
    assert time.monotonic() - start < 8
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"tp": 3},
            "the model has num_attention_heads = 4, which 3 ranks cannot share evenly; use --tp 1, "
            "2 or 4",
        ),
        ({"dp": 3}, "layer 1 has 8 routed experts, which 3 ranks cannot share evenly"),
        (
            {"tp": 2, "max_model_len": 10**6},
            "context of 1000000 tokens was requested, the model has",
        ),
        ({"tp": 2, "max_model_len": 1}, "a context of 1 has no room for a prompt and an answer"),
    ],
)
def test_what_ranks_cannot_do_is_said_before_they_start(
    tiny_checkpoint, options, told, monkeypatch
):
    monkeypatch.setattr(
        "quantkit.executor.ranks.parallel.launch", lambda options: pytest.fail("ranks were started")
    )
    with pytest.raises(UsageError, match=told):
        Engine.load(tiny_checkpoint, device="cpu", **options)


def test_more_ranks_than_devices_are_refused(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        "quantkit.executor.ranks.parallel.find_device", lambda name: torch.device("cuda")
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match="2 ranks need as many devices, and 1 are usable here"):
        join(EngineOptions(tiny_checkpoint, tp=2))


QUANTKIT = [sys.executable, "-m", "quantkit"]


def ended(line):
    """Exit code and stderr of a command in a process of its own."""
    done = subprocess.run([*QUANTKIT, *line.split()], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.strip()


def test_an_uneven_tp_is_bad_usage(tiny_checkpoint):
    code, said = ended(f"run {tiny_checkpoint} --raw --prompt a --device cpu --tp 3")
    assert code == 2
    assert said.startswith("error: the model has num_attention_heads = 4")
    assert len(said.splitlines()) == 1, said


def test_what_every_rank_refuses_is_told_once(tiny_checkpoint):
    """More tokens of a cache than there is memory for, which is known when the weights are
    there."""
    asked = "--port 18431 --device cpu --tp 2 --cache-tokens 1000000000000"
    code, said = ended(f"serve {tiny_checkpoint} {asked}")
    assert code == 1
    lines = said.splitlines()
    assert lines[-1].startswith("error: a cache of 1000000000000 tokens asked for"), said
    assert sum("cache of" in line for line in lines) == 1, said


def test_what_one_rank_alone_refuses_is_told_with_its_number(tiny_checkpoint, tmp_path):
    """Rank 1 misses a shard; this process, rank 0, opens no model and waits for it."""
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    next(model.glob("*.safetensors")).unlink()
    parallel = join(EngineOptions(model, device="cpu", tp=2))
    with refused(r"^rank 1 of 2: shard .* is missing from .*; start again$"):
        parallel.report(1)
    torch.distributed.destroy_process_group()


def test_ranks_that_a_launcher_started_lead_and_follow(tiny_checkpoint):
    """As torchrun starts them: rank 0 answers, rank 1 prints nothing, and both end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = f"run {tiny_checkpoint} --prompt a --max-new-tokens 3 --json --device cpu --tp 2"
    command = [*QUANTKIT, *asked.split()]
    meeting = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(command, env={**meeting, "RANK": rank}, stdout=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert json.loads(printed[0])["tokens"] == 3
    assert printed[1] == b""


def test_a_rank_that_follows_takes_no_requests(tiny_checkpoint):
    engine = load(tiny_checkpoint, tp=1)
    engine.leader = Leader(Parallel(1, 2))
    with refused("rank 1 follows rank 0"):
        engine.submit(PROMPTS[0], PARAMS[0])
    assert not engine.has_work


def test_a_refusal_ends_the_ranks_that_were_started(tiny_checkpoint):
    with refused("a cache of 1000000000000 tokens asked for"):
        Engine.load(tiny_checkpoint, device="cpu", tp=2, cache_tokens=10**12)
    time.sleep(0.5)
    watching = [thread for thread in threading.enumerate() if thread.name == "quantkit-ranks"]
    assert not watching, "who still watches the other rank would end this process for it"
