"""How many tokens are guessed is chosen by what guesses brought and steps cost; where they come
from changes no token."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import engines
import guessed_models
import make_model
import pytest
import torch
from engines import capture, finish, load, note
from guessed_models import beyond_the_backlog
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.hub import find_model
from quantkit.executor.options import MAX_DRAFT_LENGTH
from quantkit.executor.rank0 import Leader, follow
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DevicePositions
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.scheduler.sequence import PROMPT_LOOKUP, Sequence
from quantkit.executor.speculation.adaptive_draft_length import DraftLengthController
from quantkit.executor.speculation.speculation import NgramIndex
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
    questions = [f"What is {3 + i}+{41 + 17 * i}?" for i in kept]
    asked = [plain.tokenizer.encode_chat([{"role": "user", "content": one}]) for one in questions]
    given = [SamplingParams(48, temperature, top_p=0.95, seed=i, ignore_eos=True) for i in kept]
    found = [engines.tokens(engine, asked, given) for engine in (plain, guessing)]
    assert found[0] == found[1]
    assert guessing.speculation.controller.rates[PROMPT_LOOKUP].proposed
    assert 0 < guessing.speculation.acceptance.accepted < guessing.speculation.acceptance.drafted


@pytest.mark.parametrize("captured", [False, True])
def test_the_mtp_layer_catches_up_after_a_pause(tiny_checkpoint, monkeypatch, captured):
    """Where guesses were switched off for a while, those after it are the ones that were made
    without a pause; read as a prompt, or by the rows of a step that is captured already."""
    always = load(tiny_checkpoint, max_model_len=128, draft_length=1)
    paused = load(tiny_checkpoint, max_model_len=128, draft_length=1)
    drafter, read = paused.speculation.drafter, Counter()
    if captured:
        drafter.steps = DecodeSteps(drafter.mtp, paused.cache, lambda step, lengths: step)
        catch_up = drafter._catch_up

        def reading():
            """How often what is behind is read by rows of a captured step, and as a prompt."""
            with monkeypatch.context() as inside:
                note(inside, drafter.steps, "run", lambda *_, **__: read.update(["rows"]))
                note(inside, drafter, "mtp", lambda *_: read.update(["passes"]))
                catch_up()

        monkeypatch.setattr(drafter, "_catch_up", reading)

    seen, steps, kind = {"always": {}, "paused": {}}, [0], "always"

    def kept(one, *_):
        if one.drafts:
            seen[kind][one.index, len(one.token_ids)] = one.drafts[0]

    def choose(self):
        """What is behind after two steps fits in a step of guesses."""
        steps[0] += 1
        return 0 if steps[0] % (6 if captured else 14) > 3 else 1, 0

    note(monkeypatch, Sequence, "extend", kept)
    expected = tokens(always, params(0.0))
    kind = "paused"
    monkeypatch.setattr(DraftLengthController, "choose", choose)
    assert tokens(paused, params(0.0)) == expected
    if captured:
        assert read["rows"] > 4 * read["passes"] > 0, "most of what was behind came by rows"
    both = seen["always"].keys() & seen["paused"].keys()
    assert len(both) > 20
    assert sum(seen["always"][at] == seen["paused"][at] for at in both) >= 0.95 * len(both), (
        "the cache is bfloat16: a tie may turn"
    )


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
    assert engine.speculation.controller.step_times[1].seconds(1)


GUESSED = [list(range(6 + i, 30 + 3 * i)) for i in range(6)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_are_the_same_however_they_are_computed(easy_checkpoint, temperature, monkeypatch):
    """Tokens are those of plain decoding: by a host that waits for the first, as for an NPU; in one chain, which the host waits for
    once a step; over static buffers."""
    asked = [
        SamplingParams(20 + 7 * i, temperature, top_p=0.9, seed=i, ignore_eos=True)
        for i in range(6)
    ]
    found, waited = [], Counter()
    plain = engines.tokens(load(easy_checkpoint), GUESSED, asked)
    note(monkeypatch, Parallel, "agree", lambda *_: waited.update([kind]))
    for kind in ("waits", "chain", "captured"):
        engine = load(easy_checkpoint, draft_length=3)
        if kind == "captured":
            capture(engine, lambda step, _: step, 3)
        drafter = engine.speculation.drafter
        assert not drafter.waits
        drafter.waits = kind == "waits"
        assert engines.tokens(engine, GUESSED, asked) == plain
        found.append(vars(engine.speculation.acceptance))
    assert found[0] == found[1] == found[2]
    assert 0.2 < engine.speculation.acceptance.rate < 1, "all or no guesses are right"
    assert waited["chain"] == waited["captured"] < 0.6 * waited["waits"]


def test_places_that_are_nobodys_lie_in_block_0():
    """Behind the last block, behind the blocks of a sequence, and from the reach on; and nothing is
    read beyond the tables."""
    tables = torch.tensor([[5, 7], [3, 0]], dtype=torch.int32)
    found = DevicePositions.of(torch.tensor([9, 3]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([9, 3], [7 * 8 + 1, 3 * 8 + 3])
    found = DevicePositions.of(torch.tensor([17, 12]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([15, 12], [1, 4])
    found = DevicePositions.of(torch.tensor([9, 6]), tables, 8, 6)
    assert (found.positions.tolist(), found.slots.tolist()) == ([5, 5], [1, 6])


def test_a_model_without_the_layer_is_refused(tmp_path):
    config = make_model.tiny_config(num_nextn_predict_layers=0)
    make_model.write_dense(tmp_path / "none", config, make_model.random_tensors(config))
    with refused("no MTP layer"):
        load(tmp_path / "none", draft_length=1)
    dropped = make_model.tiny_config()
    make_model.write_dense(tmp_path / "dropped", dropped, make_model.random_tensors(config))
    with refused("promises MTP layer 3, of which no tensor is stored: left out"):
        load(tmp_path / "dropped", draft_length=1)


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
