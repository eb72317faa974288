"""How many tokens are guessed is chosen by what guesses brought and steps cost; where they come
from changes no token."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import engines
import guessed_models
import pytest
import torch
from engines import finish, load, note
from guessed_models import beyond_the_backlog
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.hub import find_model
from quantkit.executor.options import MAX_DRAFT_LENGTH
from quantkit.executor.rank0 import Leader, follow
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.scheduler.sequence import PROMPT_LOOKUP, Sequence
from quantkit.executor.speculation.adaptive_draft_length import DraftLengthController
from quantkit.executor.speculation.prompt_lookup import NgramIndex
from quantkit.executor.weights.load import LoadedModel

PROMPTS = [[40 + i, 5, 6, 7, 8, 9] * 6 for i in range(5)]


def params(temperature):
    return [
        SamplingParams(
            max_new_tokens=24 + i,
            temperature=temperature,
            top_p=0.95,
            seed=i,
            ignore_eos=True,
            frequency_penalty=0.1 * (i % 2),
        )
        for i in range(len(PROMPTS))
    ]


def tokens(engine, asked):
    return engines.tokens(engine, PROMPTS, asked)


def test_prompt_lookup_equals_a_linear_search():
    draw = random.Random(3)
    looked, said = NgramIndex(), [draw.randrange(4) for _ in range(5)]
    assert looked.draft([1, 2], 3) == looked.draft(said, 0) == []
    for _ in range(300):
        said += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
        places = [at for at in range(3, len(said)) if said[at - 3 : at] == said[-3:]]
        assert looked.draft(said, 5) == (said[places[-1] : places[-1] + 5] if places else [])


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"prompt_lookup": 4}, 0.0),
        ({"prompt_lookup": 3, "draft_length": 2, "cache_tokens": 512}, 0.7),
    ],
)
def test_tokens_are_those_of_plain_decoding(options, temperature, monkeypatch):
    """tiny-r1's reasoning repeats the question's numbers. torch's float32 products give a row other
    bits in a step of other rows, with each number of threads others. A cache of 16 bits makes 4e-3
    of it in logits, and one of float32 less than 1e-4; of these questions and seeds no token is
    another where logits move by 4e-3 at random."""
    monkeypatch.setattr(LoadedModel, "cache_dtype", torch.float32)
    plain, guessing = (
        load(find_model("tiny-r1"), max_model_len=192, **given) for given in ({}, options)
    )
    kept = (3, 6, 7, 9)
    asked = [
        plain.tokenizer.encode_chat(
            [{"role": "user", "content": f"What is {3 + i}+{41 + 17 * i}?"}]
        )
        for i in kept
    ]
    given = [
        SamplingParams(
            max_new_tokens=48, temperature=temperature, top_p=0.95, seed=i, ignore_eos=True
        )
        for i in kept
    ]
    found = [engines.tokens(engine, asked, given) for engine in (plain, guessing)]
    assert found[0] == found[1]
    assert guessing.speculation.controller.rates[PROMPT_LOOKUP].proposed
    assert 0 < guessing.speculation.acceptance.accepted < guessing.speculation.acceptance.drafted


@pytest.mark.parametrize("captured", [False, True])
def test_the_mtp_layer_catches_up_after_a_pause(tiny_checkpoint, monkeypatch, captured):
    """Where guesses were switched off for a while, those after it are the ones that were made
    without a pause; read as a prompt, or by the rows of a step that is captured already."""
    always = load(tiny_checkpoint, max_model_len=128, draft_length=1)
    expected = tokens(always, params(0.0))
    paused = load(tiny_checkpoint, max_model_len=128, draft_length=1)
    drafter = paused.speculation.drafter
    if captured:
        drafter.steps = DecodeSteps(drafter.mtp, paused.cache, lambda step, lengths: step)
        read = counted(monkeypatch, drafter)
    seen = {"always": {}, "paused": {}}
    extend = Sequence.extend

    def kept(where):
        def wrapped(self, chosen, now):
            if self.drafts:
                seen[where][self.index, len(self.token_ids)] = self.drafts[0]
            return extend(self, chosen, now)

        return wrapped

    monkeypatch.setattr(Sequence, "extend", kept("always"))
    tokens(always, params(0.0))
    monkeypatch.setattr(Sequence, "extend", kept("paused"))
    steps = Counter()

    def choose(self):
        steps["all"] += 1
        return (
            0 if steps["all"] % (6 if captured else 14) > 3 else 1
        ), 0  # what is behind after two steps fits in a step of guesses

    monkeypatch.setattr(DraftLengthController, "choose", choose)
    assert tokens(paused, params(0.0)) == expected
    if captured:
        assert read["rows"] > 4 * read["passes"] > 0, "most of what was behind came by rows"
    both = seen["always"].keys() & seen["paused"].keys()
    assert len(both) > 20
    assert sum(seen["always"][at] == seen["paused"][at] for at in both) >= 0.95 * len(both), (
        "the cache is bfloat16: a tie may turn"
    )


def counted(monkeypatch, drafter):
    """How often what is behind was read by rows of a captured step, and as a prompt."""
    found, catch_up, step, mtp = Counter(), drafter._catch_up, drafter.steps.run, drafter.mtp

    def reading():
        with monkeypatch.context() as inside:
            inside.setattr(
                drafter.steps,
                "run",
                lambda *given, **named: found.update(["rows"]) or step(*given, **named),
            )
            inside.setattr(drafter, "mtp", lambda *given: found.update(["passes"]) or mtp(*given))
            catch_up()

    monkeypatch.setattr(drafter, "_catch_up", reading)
    return found


def test_the_mtp_layer_reads_its_backlog_in_one_pass(tiny_checkpoint, monkeypatch):
    """Nothing of it is computed in a step without guesses: neither the layer, nor what it makes of
    hidden states."""
    engine = load(tiny_checkpoint, max_model_len=128, draft_length=1)
    drafter = engine.speculation.drafter
    read = []
    note(monkeypatch, drafter, "_states", lambda hidden: read.append(len(hidden)))
    engine.speculation.set_lengths(0, 0)
    sequence = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=64, ignore_eos=True))
    while len(sequence.generated) < 41:
        engine.step()
    assert read == [len(PROMPTS[0])]
    engine.speculation.set_lengths(1, 0)
    engine.step()
    assert read == [len(PROMPTS[0]), 40, 1], "what was behind at once, then the step's own"


def test_sequences_beyond_the_backlog_are_not_drafted_for(tiny_checkpoint, monkeypatch):
    """However long guesses are off, they cost nothing; who came later is guessed for, and so is who
    was computed again."""
    monkeypatch.setattr("quantkit.executor.speculation.mtp_drafter._BACKLOG_TOKENS", 8)
    engine = load(tiny_checkpoint, draft_length=1)
    drafter = engine.speculation.drafter
    read = []
    note(monkeypatch, drafter, "_states", lambda hidden: read.append(len(hidden)))
    old, recent = beyond_the_backlog(engine, 1, 1)
    prompts = guessed_models.PROMPTS[:2]
    assert read[:2] == [len(prompt) for prompt in prompts], (
        "nothing of the answer, though more than eight tokens of it came"
    )
    engine.scheduler._preempt(old)
    while not old.drafts:
        engine.step()
    finish(engine)
    asked = SamplingParams(max_new_tokens=60, ignore_eos=True)
    expected = engines.tokens(load(tiny_checkpoint), prompts, asked)
    assert [old.generated, recent.generated] == expected


@torch.inference_mode()
def test_an_adaptive_draft_length_changes_no_token(tiny_checkpoint):
    asked = params(0.0)
    engine = load(
        tiny_checkpoint, max_model_len=128, draft_length=2, prompt_lookup=3, measure_steps=True
    )
    plain = tokens(load(tiny_checkpoint, max_model_len=128), asked)
    for _ in range(2):
        assert tokens(engine, asked) == plain
    assert engine.speculation.controller.step_times[1].by_rows()


def test_other_ranks_get_the_draft_length():
    told = []
    leader = Leader(SimpleNamespace(size=2, rank=0, broadcast=told.append))
    leader.guess(2, 5)
    leader.step()
    heard = iter([json.loads(json.dumps(told[0])), None])
    called = []
    follower = SimpleNamespace(
        parallel=SimpleNamespace(listen=lambda: next(heard)),
        speculation=SimpleNamespace(set_lengths=lambda *given: called.append(given)),
        compute_step=lambda: called.append("step"),
    )
    follow(follower)
    assert called == [(2, 5), "step"]


@pytest.mark.parametrize(
    "asked", [{"draft_length": 129}, {"prompt_lookup": 100_000}, {"prompt_lookup": -1}]
)
def test_draft_lengths_out_of_bounds_are_refused(asked):
    (count,) = asked.values()
    with refused(
        f"^{count} draft tokens per step are too many or too few; use 0 to {MAX_DRAFT_LENGTH}$"
    ):
        Engine.load(find_model("tiny-r1"), **asked)
