"""The published grid by the scheduler alone: what it computes in which step, over what passes of
R1's shapes took on four H200.

    python benchmarks/scheduled_prompts.py [--chunk 2560] [--doubles-at 23000] [--inputs 1024,4096
    ...] [--floor 0.155]

Nothing is computed and no time passes: a step of the scheduler's is charged what `PASSES` says, so
that a rule can be tried on every cell in seconds, and a run on cards be predicted. Every user sends
one request, all at once, 512 tokens out. Printed: mean seconds to the first token, mean
milliseconds for each one after it, and the largest gap between two tokens of an answer.

The times: passes with prompts and steps of R1's grid at commit 932a246, between which it goes in
straight lines; 33 ms more for each 4096 tokens in front of which 4096 stand (one rank alone since
27 November; 44 on the box before), of which 4.8 are latents expanded again; and a pass with prompts
that is no graph is launched in no less than `--floor`.
"""

import argparse
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from command import measured, numbers, parser
from r1_grid import published_cells

from quantkit.checkpoint.hub import find_model
from quantkit.executor.cache.cache import BLOCK_SIZE, CachePlan
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence as Request
from quantkit.tokenizer.chat import ChatTokenizer

PASSES = (
    (16, 0.020),
    (128, 0.0355),
    (512, 0.075),
    (1024, 0.0985),
    (2048, 0.158),
    (4096, 0.263),
    (8192, 0.500),
)
"""Tokens of prompts at the beginning, and seconds without their attention."""
STEPS = ((1, 5.0e-3), (2, 6.23e-3), (4, 7.35e-3), (8, 10.25e-3), (16, 15.1e-3), (32, 22.07e-3))
"""Answers, and seconds of a step at some hundred tokens of context."""
PAIR, EXPANDED, CACHED = 1.67e-9, 1.16e-6, 3.3e-8
"""Seconds of a new token of a prompt and one that it sees, of a token whose latents are expanded,
of one that an answer sees."""
BESIDE = 0.3
"""Of a step of answers, what they cost in one pass with prompts, which reads the weights in any
case."""
CAPTURED = 1024
"""Tokens of prompts in a pass at the beginning of prompts that is a graph."""
OUTPUT = 512


def between(points: Sequence[tuple[int, float]], at: int) -> float:
    """On the line through the points on both sides of `at`."""
    place = min(max(bisect_left([one for one, _ in points], at), 1), len(points) - 1)
    (low, first), (high, last) = points[place - 1], points[place]
    return first + (last - first) * (at - low) / (high - low)


@dataclass
class Times:
    """floor: seconds that launching a pass with prompts takes."""

    floor: float

    def seconds(self, step: ScheduledStep) -> float:
        answers = self._answers(step.decode)
        if not step.prefill:
            return answers
        new = sum(count for _, count in step.prefill)
        took = between(PASSES, new) + BESIDE * answers
        for one, count in step.prefill:
            took += PAIR * count * (one.num_cached + count / 2) + EXPANDED * one.num_cached
        graph = new <= CAPTURED and all(one.num_cached == 0 for one, _ in step.prefill)
        return took if graph else max(took, self.floor)

    @staticmethod
    def _answers(decode: Sequence[Request]) -> float:
        return (
            between(STEPS, len(decode)) + CACHED * sum(one.num_cached for one in decode)
            if decode
            else 0.0
        )


def cell(
    budget: StepBudget, times: Times, tokenizer: ChatTokenizer, length: int, users: int
) -> dict[str, Any]:
    """One request of every user, all at once."""
    total, now = length + OUTPUT, 0.0
    scheduler = Scheduler(
        CachePlan(users * (-(-total // BLOCK_SIZE) + 1) + 1, BLOCK_SIZE, total),
        max_batch=users,
        chunk_tokens=budget.prefill_only,
    )
    scheduler.budget = budget
    requests = [
        Request(index, [1] * length, SamplingParams(), tokenizer, total, streams=False)
        for index in range(users)
    ]
    for one in requests:
        scheduler.add(one)
    first: dict[Request, float] = {}
    last: dict[Request, float] = {}
    gaps = [0.0]
    while scheduler.has_work:
        step = scheduler.schedule()
        now += times.seconds(step)
        for one, count in [*step.prefill, *((one, 1) for one in step.decode)]:
            one.num_cached += count
            if one.num_new:
                continue
            one.token_ids.append(1)
            gaps.append(now - last.get(one, now))
            first.setdefault(one, now)
            last[one] = now
            if len(one.token_ids) == total:
                scheduler.remove(one)
    return {
        "input_len": length,
        "users": users,
        "ttft_s": statistics.mean(first.values()),
        "tpot_ms": statistics.mean((last[one] - first[one]) / (OUTPUT - 1) for one in requests)
        * 1e3,
        "largest_gap_s": max(gaps),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer, times = ChatTokenizer(find_model("tiny-r1")), Times(options.floor)
    budget = StepBudget(options.alone, options.chunk, mixed=True, doubles_at=options.doubles_at)
    report: dict[str, Any] = {"budget": vars(budget), "rows": []}
    print(
        f"{'in':>6} {'users':>5} {'TTFT s':>7} {'report':>7} {'TPOT ms':>8} {'report':>7} "
        f"{'largest gap s':>14}"
    )
    for row in published_cells():
        if options.inputs and row["input_len"] not in options.inputs:
            continue
        found = cell(budget, times, tokenizer, row["input_len"], row["concurrency"])
        report["rows"].append(found)
        print(
            f"{found['input_len']:>6} {found['users']:>5} {found['ttft_s']:>7.3f} "
            f"{row['ttft_s']:>7.3f} {found['tpot_ms']:>8.2f} "
            f"{row['tpot_ms']:>7} {found['largest_gap_s']:>14.3f}",
            flush=True,
        )
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--alone", type=int, default=8192, help="tokens of prompts in a step where nobody answers"
    )
    options.add_argument("--chunk", type=int, default=2560, help="and beside answers")
    options.add_argument(
        "--doubles-at", type=int, default=23000, help="0: chunks are as long behind any context"
    )
    options.add_argument("--floor", type=float, default=0.155)
    options.add_argument("--inputs", type=numbers, help="these input lengths alone")
    measured(run, options)


if __name__ == "__main__":
    main()
