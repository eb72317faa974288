"""Layers that keep a state of each sequence: whatever is computed together, in parts, or again, the
state is of the tokens before."""

import make_model
import pytest
import torch
from engines import capture, check_same_answers, completions, in_place, load
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.memory import ParallelSizes, fit
from quantkit.executor import memory_budget
from quantkit.executor.cache.sequence_state import recurrent_state_bytes
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


def test_what_cannot_be_shared_or_guessed_is_refused(model):
    rolled_back = "cannot be rolled back after a rejected draft; run it without --"
    for asked, told in (
        ({"prefix_cache": True}, "whose state requests cannot share"),
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
