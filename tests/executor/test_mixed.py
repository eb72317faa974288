"""Answers and prompts in one pass, with chunks as measured: tokens are those of computing apart,
and nobody waits for a long prompt."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from engines import completions, load, note, tokens

from quantkit import Engine, SamplingParams
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner import prefill_tuner
from quantkit.executor.scheduler.scheduler import StepBudget

PROMPTS = [
    [7 + i] * 4 + list(range(20, 20 + length)) for i, length in enumerate((3, 9, 120, 30, 200, 64))
]
PARAMS = [
    SamplingParams(
        max_new_tokens=12,
        ignore_eos=True,
        temperature=(i % 2) * 0.8,
        seed=i,
        repetition_penalty=1.1,
    )
    for i in range(6)
]


@torch.inference_mode()
def test_a_mixed_pass_computes_what_two_do(tiny_checkpoint):
    """Logits and hidden states to 1e-5, and what the layers keep, but for the last place of
    bfloat16."""
    found = []
    for mixed in (False, True):
        engine = load(tiny_checkpoint)
        first, second = (engine.sequence(prompt, PARAMS[0]) for prompt in (PROMPTS[2], PROMPTS[3]))
        engine.add(first)
        engine.step()
        engine.add(second)
        step = engine.scheduler.schedule()
        assert (len(step.decode), len(step.prefill)) == (1, 1)
        passes = [engine._forward(one) for one in step.passes(mixed)]
        assert len(passes) == 2 - mixed
        cached = [
            part.clone()[1:].flatten(0, 1)[: len(PROMPTS[2]) + 1]
            for layer in engine.cache.layers
            for part in ([layer] if isinstance(layer, torch.Tensor) else layer)
        ]
        logits = torch.cat([one.logits for one in passes if one.logits is not None])
        found.append([torch.cat([one.hidden for one in passes]), logits, *cached])
    for ours, theirs in zip(*found):
        last_place = (
            2**-7 if ours.dtype == torch.bfloat16 else 0
        )  # where what is kept lies halfway between two
        torch.testing.assert_close(ours, theirs, rtol=last_place, atol=1e-5)


def test_a_pass_that_fails_for_one_fails_for_nobody_else(tiny_checkpoint, monkeypatch):
    engine, index = load(tiny_checkpoint), 4
    alone = tokens(engine, PROMPTS, PARAMS)
    engine.scheduler.budget = StepBudget(512, 16, mixed=True)

    def broken(self, step):
        if any(sequence.index == index for sequence, _ in step.per_sequence()):
            raise ValueError("no such row")

    note(monkeypatch, Engine, "_forward", broken)
    done = completions(engine, PROMPTS, PARAMS)
    assert [one.finish_reason for one in done] == ["length"] * index + ["error", "length"]
    del done[index], alone[index]
    assert [one.token_ids for one in done] == alone


@dataclass
class Clocked:
    """Passes that take as long as a rule says, and no less than launching them."""

    fixed: float
    each: float
    launches: float = 0.0
    pair: float = 0.0
    seen: float = 0.0
    measured: list[int] = field(default_factory=list)

    def __call__(self, tokens, start=0):
        self.measured.append(tokens)
        pairs = tokens * (start + tokens / 2) if start else prefill_tuner._pairs(tokens)
        return self.took(tokens, start, pairs)

    def took(self, tokens, start, pairs):
        computed = self.fixed + self.each * tokens + self.pair * pairs + self.seen * start
        return max(self.launches, computed)

    def first(self, tokens):
        """The first tokens of one prompt."""
        return self.took(tokens, 0, tokens * tokens / 2)


@pytest.mark.parametrize(
    ("fixed", "each", "launches", "step", "most", "chosen"),
    [
        (0.0, 1e-6, 0.0, 0.0, 4096, 4096),
        (5e-3, 200e-6, 0.0, 0.0, 4096, 1152),
        (0.3, 1e-6, 0.0, 0.0, 4096, 4096),
        (0.01, 2e-3, 0.0, 0.0, 4096, 112),
        (0.0, 24e-6, 0.0, 4e-3, 4096, 4096),
        (52e-3, 52e-6, 0.155, 10e-3, 4096, 3584),
        (6e-3, 24e-6, 0.0, 3.4e-3, 16384, 9216),
        (0.01, 2e-3, 0.0, 0.0, 48, 32),
    ],
)
def test_the_chunk_is_the_longest_that_nobody_waits_too_long_for(
    fixed, each, launches, step, most, chosen
):
    """Whatever weights, launches and the answers' own step between chunks take."""
    clock = Clocked(fixed, each, launches)
    chunk = prefill_tuner._PassTimes(clock, step).best_chunk(most, 0.25)
    assert chunk == chosen
    assert step + clock(chunk) <= max(0.25, 2 * (step + clock(32)))
    assert len(clock.measured) <= 12


@pytest.mark.parametrize(
    ("fixed", "chosen"),
    [(0.0, 8192), (5e-4, 8192), (1e-2, 32768), (6e-2, 26624), (0.15, 9216)],
)
def test_more_than_usual_is_taken_where_it_is_faster(fixed, chosen):
    """What each pass costs beside its tokens, as weights that it decodes."""
    passes = prefill_tuner._PassTimes(Clocked(fixed, 5e-6), 0.0)
    assert passes.best_of(8192, 32768, 0.2) == chosen


@pytest.mark.parametrize("seen", [0.0, 1.16e-6])
@pytest.mark.parametrize(
    ("launches", "most", "longest"), [(0.0, 4096, 0.25), (0.0, 2048, 0.4), (0.155, 8192, 0.2)]
)
def test_chunks_behind_a_context_take_as_long(launches, most, longest, seen):
    """What a pass costs beside its tokens, launches, and what it costs for each token that it is
    behind, as latents that are expanded."""
    clock = Clocked(52e-3, 48e-6, launches, pair=1.8e-9, seen=seen)
    passes = prefill_tuner._PassTimes(clock, 10e-3)
    chunk = passes.best_chunk(most, longest)
    found = passes.doubles_at(chunk, 8 * chunk, clock(chunk // 2, 8 * chunk))
    assert seen or found == pytest.approx(48e-6 / 1.8e-9, rel=0.1)
    limit = StepBudget(most, chunk, doubles_at=found)
    for start in (4096, 8192, 16384, 28672, 40960):
        count = limit.fitting(start, 1 << 20, limit.cost(0, chunk))
        assert count < chunk
        assert clock(count, start) <= 1.08 * clock.first(chunk)
        assert clock(count + 128, start) > 0.88 * clock.first(chunk)


class Launched:
    """A trial whose passes are replayed in 24 us a token, and launched in no less than
    `launches`."""

    def __init__(self, launches):
        self.launches = launches

    def seconds(self, took, tokens):
        return took(tokens)

    def bounded(self, tokens):
        return self.launched(tokens)

    def prompt(self, tokens):
        return 24e-6 * tokens

    def launched(self, tokens):
        return max(self.launches, self.prompt(tokens))


@pytest.mark.parametrize(
    ("launches", "most", "captured"),
    [(60e-3, 4096, 2048), (45e-3, 4096, 1024), (0.0, 4096, 1024), (45e-3, 100, 100)],
)
def test_passes_are_captured_where_they_wait_for_launches(launches, most, captured):
    trial = Launched(launches)
    assert prefill_tuner._largest_captured(trial, most) == captured


def test_what_is_measured_is_a_budget(tiny_checkpoint):
    engine = load(tiny_checkpoint, measure_steps=True, max_model_len=256)
    found = engine.scheduler.budget
    assert found.prefill_only == 1024
    assert 32 <= found.with_decodes <= 1024
    short = load(tiny_checkpoint, measure_steps=True, chunk_tokens=48).scheduler.budget
    assert (short.prefill_only, short.with_decodes) == (48, 48)
    alone = prefill_tuner.measure(engine.runner, SINGLE, StepBudget(512, 512), 1, 512)
    assert alone == StepBudget(512, 512), "one request waits for nobody"


def test_the_slowest_rank_decides(tiny_checkpoint):
    engine, told = load(tiny_checkpoint), []
    parallel = SimpleNamespace(minimum=lambda value: told.append(value) or -2_000_000_000)
    trial = prefill_tuner._Trial(engine.runner, parallel)
    with torch.inference_mode():
        assert [trial.seconds(trial.prompt, 32) for _ in range(2)] == [2.0, 2.0]
    assert len(told) == 2, "what is known is not measured again"
    assert all(value < 0 for value in told)
