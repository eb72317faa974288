"""Guesses of an MTP layer on R1's shapes, of which some count as right: how many pay, and what
guesses that are never right cost.

Made-up weights guess nothing right, so whether a guess is right is drawn when its successor was
chosen: the layer has computed and sampled, the guess went through the whole model, cache and rows
were kept for it, and then what the model chose in its place is made the guess, or another token. A
right guess brings a token, behind a wrong one is computed again. Rows of one user choose experts as
unlike each other as
those of two: real text's successive tokens share some. r1_box.py and r1_grid.py measure with it.
"""

import random
import statistics
from dataclasses import replace
from typing import Any

import torch
from made_engine import led

from quantkit.common.devices import to_device
from quantkit.evaluation.speed.engine import EngineTarget
from quantkit.evaluation.speed.measure import RequestTimes, Workload
from quantkit.executor.engine import Engine
from quantkit.executor.runner.graphs import SamplingGraph
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens, Sampler
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.speculation import Speculation
from quantkit.executor.weights.load import LoadedModel

PUBLISHED = 0.69
"""Share of guesses that are right, of those behind right ones: three bring 2.49 tokens a step, as
was published."""


class DraftingEngine(Engine):
    """Its requests' guesses are right as often as `acceptance` says."""

    acceptance = 0.7

    def __init__(self, loaded: LoadedModel, *given: Any, **options: Any) -> None:
        super().__init__(loaded, *given, **options)
        self.sampler = DrawnSampler(self)

    def sequence(
        self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True
    ) -> Sequence:
        """Its seed follows from the prompt: the same on every rank, and for any number of
        guesses."""
        return super().sequence(
            prompt, replace(params, seed=1000 * sum(prompt)), index, streams=False
        )


class DrawnSampler(Sampler):
    """Which guesses are right is drawn from their sequence's seed and their places."""

    def __init__(self, engine: DraftingEngine) -> None:
        super().__init__(
            engine.loaded.config.vocab_size, engine.loaded.device, lambda: engine.tokenizer.eos_ids
        )
        self._engine = engine

    def sample(self, done: ForwardPass, draw: SamplingGraph) -> SampledTokens:
        """As `Sampler.sample`, but behind every token before a guess."""
        chosen, wanted = super().sample(done, draw), []
        if not any(sequence.drafts for sequence, _ in done.counts):
            return chosen
        for sequence, count in done.counts:
            for place, guess in enumerate(sequence.drafts[: count - 1], len(sequence.token_ids)):
                right = random.Random(sequence.seed + place).random() < self._engine.acceptance
                wanted.append(guess if right else (guess + 1) % self._vocab)
            wanted.append(-1)
        told = to_device(wanted, chosen.token_ids.device)
        return chosen._replace(token_ids=torch.where(told < 0, chosen.token_ids, told))


def plain_row(engine: Engine, work: Workload) -> dict[str, Any]:
    """An engine without a layer that guesses. Empty on ranks above 0."""
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    return {"users": work.concurrency, "guesses": "none"} | _times(times) if times else {}


def guesses_row(
    engine: DraftingEngine, work: Workload, most: int, fixed: int | None, acceptance: float
) -> dict[str, Any]:
    """Empty on ranks above 0. most: guesses of the engine's layer, at most. fixed: as many in every
    step; None: chosen while running from what they bring and cost, by an engine that knows nothing
    yet."""
    engine.acceptance, drafter = acceptance, engine.speculation.drafter
    assert drafter is not None, "an engine with a layer that guesses"
    drafter.count = most
    engine.speculation = Speculation(drafter, 0, adaptive=fixed is None)
    if fixed is not None:
        engine.speculation.set_lengths(fixed, 0)
    steps = watched(engine.speculation)
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    if not times:
        return {}
    found, controller = engine.speculation.acceptance, engine.speculation.controller
    tokens = sum(one.output_tokens - 1 for one in times)
    return {
        "users": work.concurrency,
        "guesses": "chosen" if fixed is None else fixed,
        "right": acceptance,
        **_times(times),
        "kept": found.rate,
        "tokens_a_step": tokens / (tokens - found.accepted),
        "guessed_last": controller.drafts,
        "step_ms": {
            drafts: costs.by_rows(1e3) for drafts, costs in sorted(controller.step_times.items())
        },
        "slowest": sorted(steps, reverse=True)[:8],
        "tried": sum(rows > answers or drafts > 0 for _, drafts, rows, answers, _ in steps),
    }


def watched(speculation: Speculation) -> list[tuple[float, int, int, int, int]]:
    """Of every step of answers alone: its milliseconds, the guesses that it makes, its rows and
    answers, and which step it is."""
    steps: list[tuple[float, int, int, int, int]] = []
    controller = speculation.controller
    stepped = controller.record_step

    def noted(answers: int, rows: int, kept: int, seconds: float, longest: int) -> None:
        steps.append((seconds * 1e3, controller.drafts, rows, answers, len(steps)))
        stepped(answers, rows, kept, seconds, longest)

    setattr(controller, "record_step", noted)  # noqa: B010
    return steps


def warm(engine: DraftingEngine, input_len: int, users: int, most: int) -> None:
    """Every size of a step is captured: of each number of guesses, with fewer answers too."""
    for count in [1 << power for power in range(users.bit_length())]:
        for fixed in range(most, -1, -1):
            guesses_row(
                engine, Workload(input_len, 4 + 2 * fixed, count, count, seed=-1), most, fixed, 1.0
            )


def _times(times: list[RequestTimes]) -> dict[str, float]:
    return {
        "tpot_ms": statistics.mean(one.tpot_ms or 0.0 for one in times),
        "output_len": times[0].output_tokens,
    }
