"""Layers that keep a state of each sequence: whatever is computed together, in parts, or again, the
state is of the tokens before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_model
import pytest
import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.engines.memory import ParallelSizes, fit
from quantkit.executor import memory_budget
from quantkit.executor.cache.sequence_state import RecurrentStates, recurrent_state_bytes
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.runner.runner import Runner
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.speculation.draft_model import load_draft
from quantkit.executor.weights.load import load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.delta_rule import (
    DeltaInputs,
    DeltaNet,
    DeltaState,
    DeltaWeights,
    attend_sequence,
    attend_step,
)
from quantkit.models.stored_parameters import read_model

CONFIG = {
    "model_type": "qwen3_next",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
PROMPTS = [
    [7 + i] * 3 + list(range(20, 20 + length)) for i, length in enumerate((1, 9, 100, 30, 70))
]
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, rng = find_architecture(CONFIG), torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for row in architecture.parameters(architecture.Config.from_dict(CONFIG)):
        noise = torch.randn(row.shape, generator=rng)
        tensors[row.name] = (
            noise * 0.1 if row.role == "norm" else 2 * noise / row.shape[-1] ** 0.5
        ).bfloat16()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "next", CONFIG, tensors)


def answers(
    model: Path, budget: StepBudget | None = None, **options: Any
) -> Iterator[tuple[list[int], list[float]]]:
    engine = Engine.load(
        model, device="cpu", dtype="float32", **{"max_batch": 4, "max_model_len": 128} | options
    )
    if budget is not None:
        engine.scheduler.budget = budget
    yield from generated(engine)
    engine.close()


def generated(engine: Engine) -> Iterator[tuple[list[int], list[float]]]:
    for one in sorted(engine.generate(PROMPTS, PARAMS), key=lambda one: one.index):
        yield one.token_ids, [token.logprob for token in one.logprobs or []]
    assert sorted(engine.scheduler._free_states) == [1, 2, 3, 4], "every place was given back"


def same(
    found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]
) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    torch.testing.assert_close(
        torch.tensor([one for _, one in found]),
        torch.tensor([one for _, one in expected]),
        atol=2e-2,
        rtol=0,
    )


def test_answers_are_those_of_the_whole_text(model: Path) -> None:
    """Log-probabilities of the engine's tokens, of one forward over each whole text; keys and
    values are 16-bit in the engine."""
    loaded = load_model(model, device="cpu", dtype="float32")
    for prompt, (tokens, found) in zip(PROMPTS, list(answers(model))):
        with torch.inference_mode():
            hidden = loaded.model(
                torch.tensor(prompt + tokens), CausalContext([len(prompt) + len(tokens)])
            )
            expected = loaded.model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        torch.testing.assert_close(
            torch.tensor(found),
            expected.gather(1, torch.tensor(tokens)[:, None])[:, 0],
            atol=2e-2,
            rtol=0,
        )


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (StepBudget(16, 16), {}),
        (StepBudget(24, 8, mixed=True), {}),
        (None, {"cache_tokens": 192}),
        (None, {"measure_steps": True}),
    ],
    ids=["chunks", "mixed", "preempted", "measured"],
)
def test_answers_do_not_depend_on_how_they_are_computed(
    model: Path, budget: StepBudget | None, options: dict[str, Any]
) -> None:
    same(list(answers(model, budget, **options)), list(answers(model)))


def test_a_pass_may_be_computed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer fails after others have written their states: each sequence is computed alone then.
    And a captured step is computed first to compile it."""
    expected = list(answers(model))
    engine = Engine.load(model, device="cpu", dtype="float32", max_batch=4, max_model_len=128)
    layer, calls = engine.loaded.model.layers[2], [0]
    attend = layer.attention

    def failing(*given: Any) -> Tensor:
        calls[0] += 1
        if calls[0] in (2, 9):
            raise RuntimeError("out of memory")
        return attend(*given)

    monkeypatch.setattr(layer, "attention", failing)
    same(list(generated(engine)), expected)
    monkeypatch.undo()

    def capture(step: Any, lengths: list[int]) -> Any:
        step()
        return step

    engine.runner = Runner(engine.loaded.model, engine.cache, capture)
    same(list(generated(engine)), expected)


def test_what_cannot_be_shared_or_guessed_is_refused(model: Path) -> None:
    with pytest.raises(QuantkitError, match="whose state requests cannot share"):
        Engine.load(model, device="cpu", prefix_cache=True)
    with pytest.raises(QuantkitError, match="no MTP layer"):
        Engine.load(model, device="cpu", draft_length=1)
    with pytest.raises(
        QuantkitError,
        match="cannot be rolled back after a rejected draft; run it without --prompt-lookup",
    ):
        Engine.load(model, device="cpu", prompt_lookup=2)
    with pytest.raises(
        QuantkitError, match="cannot be rolled back after a rejected draft; run it without --draft"
    ):
        Engine.load(model, device="cpu", draft=model)
    with pytest.raises(QuantkitError, match="use another draft model"):
        load_draft(model, load_model(model, device="cpu"), EngineOptions(model, device="cpu"))


def test_the_rule_token_by_token_is_the_rule_in_chunks() -> None:
    """Against the definition in float64, with a state to begin with; and the bytes that are told
    are those held."""
    net, rng = DeltaNet(2, 4, 16, 8, 4, frozenset({0, 2})), torch.Generator().manual_seed(1)
    weights = DeltaWeights(torch.randn(sum(net.segments), 4, generator=rng), net)
    inputs = DeltaInputs(
        torch.randn(150, sum(net.segments), generator=rng),
        -torch.rand(150, 4, generator=rng),
        torch.rand(150, 4, generator=rng),
    )
    state = DeltaState(
        torch.randn(3, sum(net.segments), generator=rng), torch.randn(4, 16, 8, generator=rng)
    )
    exact, memory = _exact(inputs, weights, state)
    found, after = attend_sequence(inputs, weights, state)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.memory.double(), memory, atol=1e-4, rtol=1e-4)
    step = DeltaState(*(side[None] for side in state))
    for token in range(150):
        out, step = attend_step(
            DeltaInputs(*(side[token : token + 1] for side in inputs)), weights, step
        )
        torch.testing.assert_close(out[0].double(), exact[token], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step.recent[0], after.recent)
    assert RecurrentStates(net, 5, "cpu").nbytes == recurrent_state_bytes(net, 5, 1)


def _exact(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> tuple[Tensor, Tensor]:
    padded, memory = torch.cat((state.recent, inputs.mixed)).double(), state.memory.double()
    out = []
    for token, (decay, rate) in enumerate(zip(inputs.decay.double(), inputs.rate.double())):
        mixed = torch.nn.functional.silu(
            (padded[token : token + 4] * weights.convolution.double().t()).sum(0)
        )
        q, k, v = mixed[:32].view(2, 16), mixed[32:64].view(2, 16), mixed[64:].view(4, 8)
        q, k = (side / (side.square().sum(-1, keepdim=True) + 1e-6).sqrt() for side in (q, k))
        for head in range(4):
            memory[head] *= decay[head].exp()
            memory[head] += torch.outer(
                k[head // 2], rate[head] * (v[head] - k[head // 2] @ memory[head])
            )
        out.append(torch.stack([q[head // 2] @ memory[head] / 4 for head in range(4)]))
    return torch.stack(out), memory


def test_plans_count_the_states_of_each_request(model: Path) -> None:
    """Three requests of 50 tokens fit, and not one more; with a byte less two of them, and some
    tokens."""
    checkpoint, whole = Checkpoint.open(model), ParallelSizes(1)
    net = read_model(checkpoint).config.recurrent
    assert net is not None
    weights = fit(checkpoint, whole, 50, 1.0, 1.0, 0.0).weight_bytes
    request = (
        50 * 2 * 2 * 2 * 16 + net.state_bytes()
    )  # keys and values of two heads of 16, in one layer of four
    assert net.state_bytes() == recurrent_state_bytes(net, 0, 1) > 0
    enough = fit(checkpoint, whole, 50, (weights + 3 * request) / 2**30, 1.0, 0.0)
    assert (enough.tokens, enough.state_bytes_per_request) == (150, net.state_bytes())
    assert fit(checkpoint, whole, 50, (weights + 3 * request - 1) / 2**30, 1.0, 0.0).tokens == 149
    assert fit(checkpoint, whole, 50, (weights + request) / 2**30, 1.0, 0.0).fits
    assert not fit(checkpoint, whole, 50, (weights + request - 1) / 2**30, 1.0, 0.0).fits


def test_states_that_leave_no_room_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 10**6)
    with pytest.raises(QuantkitError, match="states of 64 sequences take") as fault:
        Engine.load(model, device="cpu", dtype="float32", max_batch=64, max_model_len=128)
    assert "--max-batch" in fault.value.remedy
