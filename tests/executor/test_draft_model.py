"""A draft model that somebody brought changes how many tokens a step brings, and no token."""

from dataclasses import replace

import make_model
import pytest
import torch
from engines import finish, in_place, note
from forked_ranks import run_ranks
from guessed_models import (
    LLAMA,
    MIXED,
    PROMPTS,
    QWEN3,
    beyond_the_backlog,
    load,
    measured,
    ranked,
    tokens,
)
from refused import refused
from tied_model import tied_tensors

from quantkit import SamplingParams
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner.prefill_tuner import StepBudget
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.draft_model import VocabAdapter, load_draft, make_drafter
from quantkit.executor.speculation.speculation import Speculation
from quantkit.executor.weights.load import load_model

SMALL = QWEN3 | {"num_hidden_layers": 1, "max_position_embeddings": 48}
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


def write(path, config, seed=0, tokens=320):
    """A random model whose layers change little, so that its first ones guess well, and sampled
    tokens are often the likeliest."""
    tensors = tied_tensors(QWEN3 if config is SMALL else config, seed)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.05
        if name == "lm_head.weight":
            tensors[name] = tensors[name] * 6
    make_model.write_dense(
        path,
        config,
        {name: tensor for name, tensor in tensors.items() if name in tied_tensors(config)},
    )
    make_model.write_tokenizer(path, tokens)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """near: the first layer of qwen3 alone, of few positions. short, long: tables of fewer and
    more ids."""
    folder = tmp_path_factory.mktemp("models")
    found = {"qwen3": write(folder / "qwen3", QWEN3), "near": write(folder / "near", SMALL)}
    for name, rows in {"llama": 320, "short": 318, "long": 352}.items():
        config = LLAMA | {"vocab_size": rows}
        found[name] = write(folder / name, config, seed=3, tokens=min(rows, 320))
    return found


@pytest.fixture(scope="module")
def plain(models):
    """Answers without guesses."""
    return {name: tokens(load(models[name]), MIXED) for name in ("qwen3", "llama")}


@pytest.mark.parametrize(
    ("target", "draft", "least", "most"),
    [
        ("qwen3", "qwen3", 1.0, 1.0),
        ("llama", "llama", 1.0, 1.0),
        ("llama", "long", 0.0, 0.5),
        ("llama", "short", 0.5, 1.0),
    ],
)
def test_tokens_are_those_of_plain_decoding(models, plain, target, draft, least, most):
    """Greedy and sampled, in a batch, prompts in chunks. A draft model that is the model itself is
    always right."""
    engine = load(models[target], models[draft], draft_length=3, chunk_tokens=19)
    engine.scheduler.budget = StepBudget(19, 7, mixed=True)
    assert tokens(engine, MIXED) == plain[target]
    assert least <= measured(engine) <= most


def test_prefixes_and_preemption_keep_both_caches_in_step(models):
    """Whatever is found in the cache, or computed again, the draft model knows it too: the same
    model is always right."""
    prompts = [PROMPTS[5] * 2 + [5 + i] for i in range(4)]
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    expected = tokens(load(models["qwen3"], max_model_len=256), params, prompts)
    options = {"draft_length": 2, "prefix_cache": True, "max_model_len": 256}
    engine = load(models["qwen3"], models["qwen3"], cache_tokens=448, **options)
    for _ in range(2):
        assert tokens(engine, params, prompts) == expected
        assert measured(engine) == 1
    assert engine.scheduler.num_preempted > 0
    longer = [prompt + answer + [7] for prompt, answer in zip(prompts, expected)]
    (done,) = engine.generate([longer[0]], SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert done.cached_tokens >= 128
    assert measured(engine) == 1


def test_after_a_pause_guesses_are_as_good(models, monkeypatch):
    """Answers are not read while nothing is guessed, and are read before the next guess, or before
    their blocks are others'."""
    engine = load(
        models["qwen3"], models["qwen3"], draft_length=2, prefix_cache=True, max_model_len=256
    )
    expected = tokens(load(models["qwen3"], max_model_len=256), GREEDY)
    for most_read in (8, 1024):
        monkeypatch.setattr("quantkit.executor.speculation.draft_model._MAX_CATCH_UP", most_read)
        often = iter([(0, 0), *[(0, 0), (0, 0), (0, 0), (2, 0)] * 200])
        monkeypatch.setattr(engine.speculation.controller, "choose", often.__next__)
        assert tokens(engine, GREEDY) == expected
        assert measured(engine) == 1
    monkeypatch.setattr(engine.speculation.controller, "choose", lambda: (0, 0))
    answers = tokens(engine, SamplingParams(max_new_tokens=40, ignore_eos=True))
    monkeypatch.setattr(engine.speculation.controller, "choose", lambda: (2, 0))
    tokens(engine, GREEDY, [prompt + answer + [7] for prompt, answer in zip(PROMPTS, answers)])
    assert measured(engine) == 1


def test_sequences_beyond_the_backlog_are_not_drafted_for(models, monkeypatch):
    """However long nothing is guessed, it costs nothing; who came later is guessed for. Tokens are
    the same."""
    monkeypatch.setattr("quantkit.executor.speculation.draft_model._MAX_CATCH_UP", 8)
    engine = load(models["qwen3"], models["qwen3"], draft_length=2)
    drafter = engine.speculation.drafter
    read = []

    def seen(answers, parts):
        read.append(sum(len(one.token_ids) for one in parts))

    note(monkeypatch, drafter._own.prefill_runner, "run", seen)
    old, recent = beyond_the_backlog(engine, 2, 4)
    assert read[:2] == [len(PROMPTS[0]), len(PROMPTS[1])]
    assert sum(read[2:]) == 4, "what was missing of the recent one"
    finish(engine)
    assert measured(engine) == 1
    expected = tokens(load(models["qwen3"]), replace(GREEDY, max_new_tokens=60), PROMPTS[:2])
    assert [old.generated, recent.generated] == expected


@pytest.mark.parametrize("captured", [False, True])
def test_nothing_is_guessed_behind_the_draft_models_positions(models, plain, captured, monkeypatch):
    """In static buffers, too, as graphs have them; the results of a pass lie where the next one of
    its size leaves its own."""
    guessed = []

    def seen(one, *_):
        guessed.extend(len(one.token_ids) + i for i in range(len(one.drafts)))

    note(monkeypatch, Sequence, "extend", seen)
    engine = load(models["qwen3"], models["near"], draft_length=3)
    if captured:
        draft = load_model(models["near"], device="cpu", dtype="float32")
        given = (draft, engine.loaded, engine.plan, engine.runner, 3, SINGLE)
        drafter = make_drafter(*given, shared=False, capture=in_place)
        engine.speculation = Speculation(drafter, 0)
    assert tokens(engine, MIXED) == plain["qwen3"]
    assert 0.1 < measured(engine) < 0.9
    assert max(guessed) == 47
    assert max(len(prompt) for prompt in PROMPTS) > 48
    assert not captured or drafter.steps.failure == ""


def test_two_ranks_guess_as_one(models, plain, tmp_path):
    """Each rank has the draft model whole; what rank 0 guesses counts."""

    def rank(parallel):
        asked = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_batch": 4}
        asked |= {"draft": models["qwen3"], "draft_length": 3, "prompt_lookup": 2}
        options = EngineOptions(models["qwen3"], chunk_tokens=31, **asked)
        engine = ranked(parallel, options)
        loaded = engine.loaded
        if parallel.rank:
            follow(engine)
            return [load_draft(models["qwen3"], loaded, options).nbytes, loaded.nbytes]
        found = tokens(engine, MIXED)
        engine.leader.dismiss()
        return [found, engine.speculation.acceptance.rate]

    (found, rate), (draft_bytes, nbytes) = run_ranks(2, tmp_path, rank)
    assert found == plain["qwen3"]
    assert rate > 0.9, "sums in another order may turn a tie"
    assert draft_bytes > nbytes, "whole beside a half"


def test_its_cache_is_planned(models):
    loaded, draft = (
        load_model(models[name], device="cpu", dtype="float32") for name in ("qwen3", "near")
    )
    engine = load(models["qwen3"], models["near"])
    per_token = loaded.cache_token_bytes + draft.cache_token_bytes
    assert per_token == 1.5 * loaded.cache_token_bytes
    held = engine.speculation.drafter.steps.cache.nbytes
    assert held == engine.cache.nbytes / 2
    assert held == engine.plan.num_blocks * 64 * draft.cache_token_bytes


@pytest.mark.parametrize(("vocab", "known"), [(300, 320), (352, 320)])
def test_ids_that_one_model_lacks(models, vocab, known):
    seen = []
    loaded = load_model(models["llama"], device="cpu", dtype="float32")

    def forward(token_ids, context, rows):
        seen.append(token_ids)
        return token_ids

    forward.embedding, forward.logits, forward.width = (
        loaded.model.embedding,
        loaded.model.logits,
        64,
    )
    model = VocabAdapter(forward, vocab)
    model(torch.tensor([5, vocab - 1]), None)
    assert seen[0].tolist() == [5, min(vocab, known) - 1]
    assert model.logits(torch.zeros(2, 64)).shape == (2, min(vocab, known))


def test_other_tokens_are_refused(models, tmp_path):
    other = write(tmp_path / "other", LLAMA)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        text.replace('"<unused3>"', '"<swap>"').replace('"<unused5>"', '"<unused3>"')
    )
    with refused(
        r"other has other tokens than .*qwen3: 2 of 320 ids differ, 265 is '<swap>' there"
    ):
        load(models["qwen3"], other)
    few = write(tmp_path / "few", LLAMA, tokens=300)
    with refused(r"few has 300 tokens, .*qwen3 has 320, and 300 are in both"):
        load(models["qwen3"], few)
    with refused("nowhere"):
        load(models["qwen3"], tmp_path / "nowhere")
    with refused("--dp 2 does not go with --draft"):
        load(models["qwen3"], models["near"], dp=2)
