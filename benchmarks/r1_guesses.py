"""Guesses of an MTP layer on R1's shapes, of which some count as right: how many pay, and what guesses that are never right cost.

Made-up weights guess nothing right, so whether a guess counts as right is drawn when its successor was chosen: the layer has computed and
sampled, the guess went through the whole model, cache and rows were kept for it, and only the comparison of two token ids is replaced. A
right guess brings a token, a wrong one is computed again. Rows of one user choose experts as unlike each other as those of two: real
text's successive tokens share some. r1_box.py and r1_grid.py measure with it.
"""

import random
import statistics
from dataclasses import replace
from typing import Any

from made_engine import led

from quantkit.evaluation.speed.engine import EngineTarget
from quantkit.evaluation.speed.measure import RequestTimes
from quantkit.evaluation.speed.workload import Workload
from quantkit.executor.engine import Engine
from quantkit.executor.sampling import SamplingParams
from quantkit.executor.sequence import Sequence
from quantkit.executor.speculation import Speculation

PUBLISHED = 0.69
"""Share of guesses that are right, of those behind right ones: three bring 2.49 tokens a step, as was published."""


class DraftingEngine(Engine):
    """Its requests' guesses are right as often as `acceptance` says."""

    acceptance = 0.7

    def sequence(self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True) -> Sequence:
        super().sequence(prompt, params, index, streams=False)  # checks it
        drawn = DrawnSequence(index, prompt, replace(params, seed=1000 * sum(prompt)), self.tokenizer, self.max_model_len, streams=False)
        drawn.acceptance = self.acceptance
        return drawn


class DrawnSequence(Sequence):
    """Which guesses are right is drawn from the prompt and their places: the same on every rank, and for any number of guesses."""

    acceptance: float

    def extend(self, chosen: list[int], now: float) -> int:
        draws = [random.Random(self.seed + len(self.token_ids) + i).random() for i in range(len(self.drafts))]
        self.drafts = [token if number < self.acceptance else -1 for token, number in zip(chosen, draws)]
        return super().extend(chosen, now)


def plain_row(engine: Engine, work: Workload) -> dict[str, Any]:
    """An engine without a layer that guesses. Empty on ranks above 0."""
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    return {"users": work.concurrency, "guesses": "none"} | _times(times) if times else {}


def guesses_row(engine: DraftingEngine, work: Workload, most: int, fixed: int | None, acceptance: float) -> dict[str, Any]:
    """Empty on ranks above 0. most: guesses of the engine's layer, at most. fixed: as many in every step; None: chosen while running from
    what they bring and cost, by an engine that knows nothing yet."""
    engine.acceptance, drafter = acceptance, engine.speculation.drafter
    assert drafter is not None, "an engine with a layer that guesses"
    drafter.count = most
    engine.speculation = Speculation(drafter, 0, measured=fixed is None)
    if fixed is not None:
        engine.speculation.make(fixed, 0)
    times = led(engine, lambda: list(EngineTarget(engine, "R1", work.concurrency).run(work)))
    if not times:
        return {}
    found, guessing = engine.speculation.acceptance, engine.speculation.guessing
    tokens = sum(one.output_tokens - 1 for one in times)
    return {
        "users": work.concurrency,
        "guesses": "chosen" if fixed is None else fixed,
        "right": acceptance,
        **_times(times),
        "kept": found.rate,
        "tokens_a_step": tokens / (tokens - found.accepted),
        "guessed_last": guessing.drafts,
        "step_ms": {drafts: costs.by_rows(1e3) for drafts, costs in sorted(guessing.costs.items())},
    }


def warm(engine: DraftingEngine, input_len: int, users: int, most: int) -> None:
    """Every size of a step is captured: of each number of guesses, with fewer answers too."""
    for count in [1 << power for power in range(users.bit_length())]:
        for fixed in range(most, -1, -1):
            guesses_row(engine, Workload(input_len, 4 + 2 * fixed, count, count, seed=-1), most, fixed, 1.0)


def _times(times: list[RequestTimes]) -> dict[str, float]:
    return {"tpot_ms": statistics.mean(one.tpot_ms or 0.0 for one in times), "output_len": times[0].output_tokens}
