"""Answers and prompts in one pass, with chunks as measured: tokens are those of computing apart, and nobody waits for a long prompt."""

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running_server import Running, load, wait_for

from quantkit.executor import budget
from quantkit.executor.engine import Engine
from quantkit.executor.parallel import SINGLE
from quantkit.executor.runner import Runner
from quantkit.executor.sampling import SamplingParams
from quantkit.executor.scheduler import ScheduledStep, StepBudget
from quantkit.executor.sequence import Sequence

PROMPTS = [[7 + i] * 4 + list(range(20, 20 + length)) for i, length in enumerate((3, 9, 120, 30, 200, 64))]
PARAMS = [SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=(i % 2) * 0.8, seed=i, repetition_penalty=1.1) for i in range(6)]


def tokens(engine: Engine) -> list[list[int]]:
    done = sorted(engine.generate(PROMPTS, PARAMS), key=lambda one: one.index)
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
    return [one.token_ids for one in done]


@pytest.mark.parametrize("options", [{}, {"num_drafts": 2, "prefix_cache": True, "cache_tokens": 512}])
def test_tokens_are_those_of_passes_apart(tiny_checkpoint: Path, options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_checkpoint, max_model_len=320, **options)
    assert engine.scheduler.budget == StepBudget(512, 512), "nothing is measured unless asked for"
    apart = tokens(engine)
    sizes: list[tuple[int, int]] = []
    mixed = Runner.mixed

    def counted(self: Runner, sequences: list[Sequence], parts: list[tuple[Sequence, int]]) -> Any:
        sizes.append((len(sequences), sum(count for _, count in parts)))
        return mixed(self, sequences, parts)

    monkeypatch.setattr(Runner, "mixed", counted)
    engine.scheduler.budget = StepBudget(64, 16, mixed=True)
    assert tokens(engine) == apart
    assert len(sizes) > 3
    assert max(answers for answers, _ in sizes) > 1
    assert max(count for _, count in sizes) == 16


@torch.inference_mode()
def test_a_mixed_pass_computes_what_two_do(tiny_checkpoint: Path) -> None:
    """Logits and hidden states, and what the layers keep, to 1e-5."""
    found = []
    for mixed in (False, True):
        engine = load(tiny_checkpoint)
        first, second = (engine.sequence(prompt, PARAMS[0]) for prompt in (PROMPTS[2], PROMPTS[3]))
        engine.add(first)
        engine.step()
        engine.add(second)
        step = engine.scheduler.schedule()
        assert (len(step.decode), len(step.prefill)) == (1, 1)
        passes = [engine._compute(one) for one in step.passes(mixed)]
        assert len(passes) == 2 - mixed
        cached = [part.clone()[1:] for layer in engine.cache.layers for part in ([layer] if isinstance(layer, torch.Tensor) else layer)]
        used = [part.flatten(0, 1)[: len(PROMPTS[2]) + 1] for part in cached]
        logits = torch.cat([one.logits for one in passes if one.logits is not None])
        found.append([torch.cat([one.hidden for one in passes]), logits, *used])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_pass_that_fails_for_one_fails_for_nobody_else(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_checkpoint)
    alone = tokens(engine)
    engine.scheduler.budget = StepBudget(512, 16, mixed=True)
    compute = Engine._compute

    def broken(self: Engine, step: ScheduledStep) -> Any:
        if any(sequence.index == 4 for sequence, _ in step.alone()):
            raise ValueError("no such row")
        return compute(self, step)

    monkeypatch.setattr(Engine, "_compute", broken)
    done = sorted(engine.generate(PROMPTS, PARAMS), key=lambda one: one.index)
    assert [one.finish_reason for one in done] == ["length"] * 4 + ["error", "length"]
    assert [one.token_ids for one in done if one.index != 4] == [one for index, one in enumerate(alone) if index != 4]


@pytest.mark.parametrize("mixed", [False, True])
def test_answers_go_on_while_a_long_prompt_is_computed(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    """On a real server: eight answers get a token in every step, and a step computes no more of the prompt than its budget."""
    engine = load(tiny_checkpoint, max_batch=16, max_model_len=1024)
    engine.scheduler.budget = StepBudget(512, 32, mixed=mixed)
    steps: list[tuple[dict[int, int], dict[int, int]]] = []
    compute = Engine.compute_step

    def counted(self: Engine) -> list[Sequence]:
        running = {id(one): len(one.token_ids) for one in self.scheduler.running if one.num_new == 1}
        computed = {id(one): one.num_cached for one in self.scheduler.running if one.num_new > 1}
        advanced = compute(self)
        gained = {id(one): len(one.token_ids) - running[id(one)] for one in advanced if id(one) in running}
        assert set(gained) == set(running)
        grown = {id(one): one.num_cached - computed.get(id(one), 0) for one in self.scheduler.running if one.prompt_len > 600}
        steps.append((gained, grown if len(running) >= 8 else {}))
        return advanced

    monkeypatch.setattr(Engine, "compute_step", counted)
    running = Running(engine)
    try:
        client = running.client()
        extra = {"ignore_eos": True}

        def answer(prompt: list[int], count: int) -> None:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=count, temperature=0, extra_body=extra)

        threads = [threading.Thread(target=answer, args=([5 + i] * 6, 120)) for i in range(8)]
        for thread in threads:
            thread.start()
        wait_for(lambda: sum(one.num_new == 1 for one in list(engine.scheduler.running)) == 8)
        answer([9] * 620, 2)
        for thread in threads:
            thread.join()
    finally:
        running.stop()
    beside = [grown for _, grown in steps if grown]
    assert len(beside) >= 620 // 32, "the prompt was computed beside the answers"
    assert max(count for grown in beside for count in grown.values()) <= 32
    gained: dict[int, int] = defaultdict(int)
    for step, _ in steps:
        for one, count in step.items():
            gained[one] += count
    assert sorted(gained.values())[-8:] == [119] * 8


class Clocked:
    """Passes that take as long as a rule says: those of up to 1024 tokens are captured, others cost `launches` more."""

    def __init__(self, fixed: float, each: float, launches: float = 0.0) -> None:
        self.fixed, self.each, self.launches, self.passes = fixed, each, launches, 0

    def __call__(self, tokens: int) -> float:
        self.passes += 1
        return self.fixed + self.each * tokens + self.launches * (tokens > 1024)


@pytest.mark.parametrize(
    ("fixed", "each", "step", "chosen"),
    [
        (0.0, 1e-6, 0.0, 32),
        (10e-3, 30e-6, 0.0, 4096),
        (5e-3, 200e-6, 0.0, 1024),
        (1e-3, 100e-6, 0.0, 512),
        (0.2, 1e-6, 0.0, 32),
        (0.01, 2e-3, 0.0, 64),
        (0.0, 24e-6, 4e-3, 4096),
        (0.0, 24e-6, 0.1e-3, 256),
    ],
)
def test_the_chunk_is_where_more_tokens_bring_little(fixed: float, each: float, step: float, chosen: int) -> None:
    """The time of weights, and of the answers' own step between chunks, makes larger chunks worth while; nobody waits long."""
    clock = Clocked(fixed, each)
    assert budget._knee(clock, 4096, 0.25, step) == chosen
    assert budget._knee(clock, 48, 0.25, step) == 32
    assert clock.passes <= 10


def test_a_dip_behind_captured_passes_does_not_end_the_search() -> None:
    """2048 tokens bring no more than 1024 where only the latter are captured, 4096 do."""
    clock = Clocked(0.5e-3, 24e-6, launches=4e-3)
    assert 2048 / (3e-3 + clock(2048)) < 1.02 * 1024 / (3e-3 + clock(1024))
    assert budget._knee(clock, 4096, 0.25, 3e-3) == 4096


class Launched:
    """A trial whose passes are replayed in 24 us a token, and launched in no less than `launches`."""

    def __init__(self, launches: float) -> None:
        self.launches = launches

    def seconds(self, took: Callable[[], float]) -> float:
        return took()

    def prompt(self, tokens: int) -> float:
        return 24e-6 * tokens

    def launched(self, tokens: int) -> float:
        return max(self.launches, self.prompt(tokens))


@pytest.mark.parametrize(("launches", "most", "captured"), [(45e-3, 4096, 1024), (14e-3, 4096, 512), (0.0, 4096, 64), (45e-3, 100, 100)])
def test_passes_are_captured_where_they_wait_for_launches(launches: float, most: int, captured: int) -> None:
    trial: Any = Launched(launches)
    assert budget._captured(trial, most) == captured


def test_what_is_measured_is_a_budget(tiny_checkpoint: Path) -> None:
    engine = load(tiny_checkpoint, measure_steps=True, max_model_len=256)
    found = engine.scheduler.budget
    assert found.alone == 512
    assert 32 <= found.beside_answers <= 512
    assert found.beside_answers & (found.beside_answers - 1) == 0
    asked = load(tiny_checkpoint, measure_steps=True, prefill_tokens=48, max_model_len=256).scheduler.budget
    assert (asked.alone, asked.beside_answers) == (48, 48)
    alone = budget.measure(engine.runner, SINGLE, StepBudget(512, 512), 1, asked=False)
    assert alone == StepBudget(512, 512), "one request waits for nobody"


def test_the_slowest_rank_decides(tiny_checkpoint: Path) -> None:
    engine = load(tiny_checkpoint)
    told: list[int] = []
    parallel: Any = SimpleNamespace(minimum=lambda value: told.append(value) or -2_000_000_000)
    trial = budget._Trial(engine.runner, parallel)
    with torch.inference_mode():
        assert trial.seconds(lambda: trial.prompt(32)) == 2.0
        assert trial.mixed(2, 32).shape == (8,)
    assert all(value < 0 for value in told)
