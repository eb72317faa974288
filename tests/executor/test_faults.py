"""What goes wrong with one sequence ends that sequence: the others' tokens are those they have
without it, and no cache is lost."""

import json
import shutil

import pytest
import torch
from engines import completions
from refused import refused

from quantkit import Engine, QuantkitError, SamplingParams
from quantkit.tokenizer.chat import TextStream

PROMPTS = [list(range(10 + i, 30 + 2 * i)) for i in range(4)]
PARAMS = [
    SamplingParams(
        max_new_tokens=12, ignore_eos=True, temperature=(i % 2) * 0.8, seed=i, stop=("never",)
    )
    for i in range(4)
]
BAD = 2


@pytest.fixture(scope="module", params=[0, 1], ids=["plain", "drafts"])
def engine(request, tiny_checkpoint):
    options = {"draft_length": request.param, "prefix_cache": True}
    return Engine.load(
        tiny_checkpoint, device="cpu", dtype="float32", max_batch=4, max_model_len=256, **options
    )


@pytest.fixture(scope="module")
def alone(engine):
    return [
        next(iter(engine.generate([prompt], params))).token_ids
        for prompt, params in zip(PROMPTS, PARAMS)
    ]


def check(done, alone, fault):
    for index, one in enumerate(done):
        if index == BAD:
            assert one.finish_reason == "error"
            assert isinstance(one.fault, fault)
        else:
            assert (one.finish_reason, one.fault) == ("length", None)
            assert one.token_ids == alone[index]


@pytest.mark.parametrize("fault", [ValueError, type("Panic", (BaseException,), {})])
def test_text_that_cannot_be_decoded(engine, alone, monkeypatch, fault):
    push = TextStream.push

    def broken(self, token_id):
        if self._stop == ("broken",) and token_id == alone[BAD][4]:
            raise fault("no such text")
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", broken)
    params = [*PARAMS]
    params[BAD] = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=BAD, stop=("broken",))
    check(completions(engine, PROMPTS, params), alone, fault)


def test_a_row_that_cannot_be_sampled(engine, alone):
    """A bound that a request got round, as a top_k of 2**63 once did."""
    params = [*PARAMS]
    params[BAD] = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0)
    object.__setattr__(params[BAD], "top_k", 2**63)
    check(completions(engine, PROMPTS, params), alone, ValueError)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_pass_that_fails_for_one(engine, alone, monkeypatch, kind):
    compute = getattr(engine.runner, kind)

    def broken(parts):
        for part in parts:
            sequence = part[0] if kind == "prefill" else part
            if sequence.token_ids[:2] == PROMPTS[BAD][:2] and (
                kind == "prefill" or len(sequence.generated) > 5
            ):
                raise RuntimeError("out of memory")
        return compute(parts)

    monkeypatch.setattr(engine.runner, kind, broken)
    check(completions(engine, PROMPTS, PARAMS), alone, RuntimeError)
    monkeypatch.undo()
    again = completions(engine, PROMPTS, PARAMS)
    assert [one.token_ids for one in again] == alone, (
        "what the failed pass left in the cache was found again"
    )


def test_a_pass_that_fails_for_all_ends_all_and_no_more(engine, alone, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", lambda parts: 1 // 0)
        assert [type(one.fault) for one in completions(engine, PROMPTS, PARAMS)] == [
            ZeroDivisionError
        ] * 4
    assert [one.token_ids for one in completions(engine, PROMPTS, PARAMS)] == alone


def test_a_lost_device_is_told(engine, monkeypatch):
    sequence = engine.submit(PROMPTS[0], PARAMS[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", lambda parts: 1 // 0)
        patch.setattr(torch, "ones", lambda *shape, **options: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.cancel(sequence)


def test_logits_that_are_not_numbers(engine, monkeypatch):
    logits = engine.runner.model.logits
    monkeypatch.setattr(engine.runner.model, "logits", lambda hidden: logits(hidden) * float("nan"))
    (done,) = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=3, logprobs=2))
    assert isinstance(done.fault, QuantkitError)


@pytest.mark.parametrize(
    ("place", "token"),
    [("generation_config.json", 10**6), ("config.json", -1), ("generation_config.json", "x")],
)
def test_ends_that_are_no_tokens_are_refused_at_load(tiny_checkpoint, tmp_path, place, token):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    file = path / place
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, "eos_token_id": [1, token]}))
    with refused("eos_token_id"):
        Engine.load(path, device="cpu", max_model_len=64)
