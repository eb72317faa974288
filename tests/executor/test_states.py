"""Layers that keep a state of each sequence: whatever is computed together, in parts, or again, the
state is of the tokens before."""

from dataclasses import replace

import make_model
import pytest
import torch
from engines import capture, check_same_answers, completions, finish, in_place, load
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.memory import ParallelSizes, fit
from quantkit.executor import memory_budget
from quantkit.executor.cache.sequence_state import recurrent_state_bytes
from quantkit.executor.memory_budget import plan_kv_cache
from quantkit.executor.options import EngineOptions
from quantkit.executor.runner import prefill_graphs
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.speculation.draft_model import load_draft
from quantkit.executor.weights.load import load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model

PROMPTS = [
    [7 + i] * 3 + list(range(20, 20 + length)) for i, length in enumerate((1, 9, 100, 30, 70))
]
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=["states", "latent_states"])
def model(request, tmp_path_factory):
    """Linear attention next to keys and values of heads, and next to selected latents, in several
    residual streams."""
    config = make_model.CONFIGS[request.param]
    architecture, rng = find_architecture(config), torch.Generator().manual_seed(3)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=rng)
        tensors[row.name] = (
            noise * 0.1 if row.role == "norm" else 2 * noise / row.shape[-1] ** 0.5
        ).bfloat16()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "next", config, tensors)


def generated(engine):
    found = [
        (one.token_ids, [token.logprob for token in one.logprobs or []])
        for one in completions(engine, PROMPTS, PARAMS)
    ]
    assert sorted(engine.scheduler._free_states) == [1, 2, 3, 4], "every place was given back"
    return found


def same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    ours, theirs = (torch.tensor([one for _, one in side]) for side in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)


def test_answers_are_those_of_the_whole_text(model):
    """Log-probabilities of the engine's tokens, of one forward over each whole text; keys and
    values are 16-bit in the engine."""
    loaded = load_model(model, device="cpu", dtype="float32")
    for prompt, (tokens, found) in zip(PROMPTS, generated(load(model, max_model_len=128))):
        ids, chosen = torch.tensor(prompt + tokens), torch.tensor(tokens)[:, None]
        with torch.inference_mode():
            hidden = loaded.model(ids, CausalContext([len(ids)]))
            expected = loaded.model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = expected.gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-2, rtol=0)


def test_answers_do_not_depend_on_how_they_are_computed(model):
    check_same_answers(model, (False, {"measure_steps": True}))


def test_a_pass_may_be_computed_again(model, monkeypatch):
    """A layer fails after others have written their states: each sequence is computed alone then.
    And a captured step is computed first to compile it; prompts are captured, too."""
    monkeypatch.setattr(prefill_graphs, "RUNS_BEFORE_CAPTURE", 0)
    expected, engine = generated(load(model, max_model_len=128)), load(model, max_model_len=128)
    layer, calls = engine.loaded.model.layers[2], [0]
    attend = layer.attention

    def failing(*given):
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("out of memory")
        return attend(*given)

    with monkeypatch.context() as broken:
        broken.setattr(layer, "attention", failing)
        same(generated(engine), expected)
    assert calls[0] > 2

    def compiled(step, lengths):
        step()
        return in_place(step, lengths)

    capture(engine, compiled).scheduler.budget = StepBudget(24, 8, mixed=True)
    same(generated(engine), expected)
    assert (engine.runner.prefill_runner.num_captured > 2) != engine.cache.prefills_per_sequence


def beginnings(count):
    """Of 130 tokens, the same in two prompts each."""
    return [[20 + i // 2] * 130 + [7 + i] * (10 + 20 * i) for i in range(count)]


def test_states_are_shared_by_requests_that_make_way(model, monkeypatch):
    """In captured steps too; requests are computed again from where their states were kept. The
    cache is in float32: answers are long."""
    monkeypatch.setattr("quantkit.executor.weights.load.cached_dtype", lambda dtype: dtype)
    params = replace(PARAMS, max_new_tokens=56)
    given = {"prefix_cache": True, "max_model_len": 384, "cache_tokens": 704}
    expected = completions(load(model, max_model_len=384), beginnings(4), params)
    for engine in (
        load(model, **given, chunk_tokens=50),
        capture(load(model, **given)),
    ):
        first, again = (completions(engine, beginnings(4), params) for _ in range(2))
        assert [one.token_ids for one in first] == [one.token_ids for one in expected]
        assert [one.token_ids for one in again] == [one.token_ids for one in expected]
        assert engine.scheduler.num_preempted > 0 < sum(one.cached_tokens for one in again)
        assert sorted(engine.scheduler._free_states) == [1, 2, 3, 4]


def test_the_states_used_last_are_kept(model):
    """Four, of a request at a time; one that was cancelled leaves what it had computed."""
    prompts = [[20 + i] * 150 for i in range(6)]
    given = {"max_batch": 1, "cache_tokens": 2048, "chunk_tokens": 128}
    engine = load(model, prefix_cache=True, **given)
    expected = [one.token_ids for one in completions(engine, prompts, PARAMS)]
    assert (engine.plan.checkpoints, engine.cache.checkpoints.nbytes > 0) == (4, True)
    asked = [5, 4, 3, 2, 0, 5]
    again = [completions(engine, [prompts[i]], PARAMS)[0] for i in asked]
    assert [one.token_ids for one in again] == [expected[i] for i in asked]
    assert [one.cached_tokens for one in again] == [128, 128, 128, 128, 0, 0]
    cancelled = engine.submit(prompts[1][:-1], PARAMS)
    engine.step()
    engine.step()
    engine.cancel(cancelled)
    finish(engine)
    (found,) = completions(engine, [prompts[1]], PARAMS)
    assert (found.token_ids, found.cached_tokens) == (expected[1], 128)


def test_checkpoints_are_part_of_the_plan(model, monkeypatch):
    """A small share, one where that is less than one, or none without room."""
    loaded, asked = load_model(model, device="cpu"), EngineOptions(model, prefix_cache=True)
    one, states = loaded.checkpoint_bytes(0), loaded.sequence_bytes(64, 0)
    assert loaded.new_cache(2, checkpoints=5).checkpoints.nbytes <= 5 * one

    def planned(room):
        monkeypatch.setattr(memory_budget, "free_bytes", lambda device: states + room)
        return plan_kv_cache(loaded, asked)

    for count, room in ((256, 10**5 * one), (3, 48 * one), (1, 8 * one)):
        assert planned(room).checkpoints == count
    whole = planned(8 * one).num_blocks
    asked = EngineOptions(model)
    assert planned(7 * one).num_blocks == whole, "a checkpoint's bytes are no blocks'"
    asked = EngineOptions(model, prefix_cache=True)
    with refused("a checkpoint of the model's states, .* run it without --prefix-cache"):
        planned(one)


def test_what_cannot_be_guessed_is_refused(model):
    rolled_back = "cannot be rolled back after a rejected draft; run it without --"
    for asked, told in (
        ({"draft_length": 1}, "no MTP layer"),
        ({"prompt_lookup": 2}, f"{rolled_back}prompt-lookup"),
        ({"draft": model}, f"{rolled_back}draft"),
    ):
        with refused(told):
            load(model, **asked)
    with refused("use another draft model"):
        load_draft(model, load_model(model, device="cpu"), EngineOptions(model, device="cpu"))


def test_plans_count_the_states_of_each_request(model):
    """Three requests of 50 tokens fit, and not one more; with a byte less two of them, and some
    tokens."""
    checkpoint, whole = Checkpoint.open(model), ParallelSizes(1)
    config = read_model(checkpoint).config
    net = config.recurrent
    weights = fit(checkpoint, whole, 50, 1.0, 1.0, 0.0).weight_bytes
    request = 50 * config.num_cached_layers * config.cache.token_bytes(16) + net.state_bytes()
    assert net.state_bytes() == recurrent_state_bytes(net, 0, 1) > 0
    enough = fit(checkpoint, whole, 50, (weights + 3 * request) / 2**30, 1.0, 0.0)
    assert (enough.tokens, enough.state_bytes_per_request) == (150, net.state_bytes())
    assert fit(checkpoint, whole, 50, (weights + 3 * request - 1) / 2**30, 1.0, 0.0).tokens == 149
    assert fit(checkpoint, whole, 50, (weights + request) / 2**30, 1.0, 0.0).fits
    assert not fit(checkpoint, whole, 50, (weights + request - 1) / 2**30, 1.0, 0.0).fits


def test_states_that_leave_no_room_are_refused(model, monkeypatch):
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 10**6)
    with refused("states of 64 sequences take") as fault:
        Engine.load(model, device="cpu", dtype="float32", max_batch=64, max_model_len=128)
    assert "--max-batch" in fault.value.remedy
