"""How many prompt tokens a step computes while answers run, whether in one pass with them, and which passes are worth a graph: measured
on the loaded model.

A running answer waits for the prompt tokens that a step computes beside it, so they should be few; but weights are read for each step
anew, and between two chunks come the answers' own steps, so with too few of them a prompt takes longer. `measure` doubles their number
until everybody would wait too long, and takes the fewest that come near the best rate of prompt tokens.

A pass that is captured waits for no launch. That is worth its capture, which takes as long as some passes and happens while users wait,
only where launching is what a pass waits for: with many tokens, and sooner in large models, the device is busy all the time.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from quantkit.executor.graphs import DecodeRows
from quantkit.executor.parallel import Parallel
from quantkit.executor.prompt_graphs import MOST_TOKENS, PromptRows
from quantkit.executor.runner import Runner
from quantkit.executor.scheduler import StepBudget

_FEWEST, _ROWS = 32, 8
"""Prompt tokens of the first chunk measured; rows of answers beside which it is."""
_WORTH = 1.1
"""How much slower a pass must be launched than replayed, for graphs of its size to be captured."""
_LEAST_CAPTURED = 64
"""Tokens of the shortest pass that this is asked of."""
_NEAR = 1.02
"""How much faster the best rate may be than that of the chunk that is taken."""
_LONGEST_S, _STEPS = 0.2, 4
"""A chunk may take so long, or as long as so many steps of the answers beside it, if that is longer: they wait for it. With chunks of 4096
tokens, 32 prompts of 4096 of Qwen3-8B have their first token on an H200 after 0.78 of the time that they need with 512. On four of R1's
ranks a prompt of 16,384 beside 32 answers needs 1.7 s with chunks of 2048 and 2.5 with 1024, and the answers wait 0.26 s and 0.18."""


@torch.inference_mode()
def measure(runner: Runner, parallel: Parallel, budget: StepBudget, max_batch: int, *, asked: bool) -> StepBudget:
    """All ranks at the same time, before any request: what is in the cache is overwritten.

    budget: tokens that are allowed. asked: whether somebody chose them, so that only the mixing is to be measured.
    """
    most = min(budget.alone, (runner.cache.num_blocks - 1) * runner.cache.block_size)
    if max_batch == 1:
        return budget
    trial, rows = _Trial(runner, parallel), min(_ROWS, max_batch - 1)
    step = trial.seconds(lambda: trial.answers(rows))
    if runner.prompts.captures:
        runner.prompts.limit(_captured(trial, most))
    longest = max(_LONGEST_S, _STEPS * step)
    chunk = most if asked else _knee(lambda tokens: trial.seconds(lambda: trial.prompt(tokens)), most, longest, step)
    apart = step + trial.seconds(lambda: trial.prompt(chunk))
    return StepBudget(budget.alone, chunk, mixed=trial.seconds(lambda: trial.mixed(rows, chunk)) < apart)


def _captured(trial: "_Trial", most: int) -> int:
    """The most tokens of a pass that is worth a graph."""
    tokens = min(MOST_TOKENS, most)
    while tokens > _LEAST_CAPTURED:
        if trial.seconds(lambda: trial.launched(tokens)) >= _WORTH * trial.seconds(lambda: trial.prompt(tokens)):  # noqa: B023  called at once
            break
        tokens //= 2
    return tokens


def _knee(seconds: Callable[[int], float], most: int, longest: float, step: float) -> int:
    """The fewest tokens of a chunk whose rate, with the answers' own step of `step` seconds after each, is near the best one of chunks that
    take no longer than `longest`. seconds: of a pass over so many tokens. All are measured: passes of more than 1024 tokens are not
    captured, so that twice the tokens may bring less where four times bring more."""
    tokens = min(_FEWEST, most)
    took = {tokens: seconds(tokens)}
    while 2 * tokens <= most and 2 * took[tokens] <= longest:
        tokens *= 2
        took[tokens] = seconds(tokens)
    each = {tokens: (step + pass_s) / tokens for tokens, pass_s in took.items()}
    return min(tokens for tokens, one in each.items() if one <= _NEAR * min(each.values()))


class _Trial:
    """Passes over made-up tokens, in the cache's blocks from 1 on; each as long as the slowest rank takes."""

    def __init__(self, runner: Runner, parallel: Parallel) -> None:
        self._runner, self._parallel = runner, parallel

    def seconds(self, compute: Callable[[], torch.Tensor]) -> float:
        """The better of two, after two that compile and capture."""
        compute()
        compute()
        return min(self._once(compute), self._once(compute))

    def _once(self, compute: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        compute()[:1].tolist()  # waits for the device
        return -self._parallel.minimum(-round((time.perf_counter() - began) * 1e9)) * 1e-9

    def prompt(self, tokens: int) -> torch.Tensor:
        return self._with_prompt(None, tokens)

    def launched(self, tokens: int) -> torch.Tensor:
        """As `prompt`, operator by operator."""
        return self._logits(self._runner.prompts.launch(None, self._prompt(tokens)))

    def answers(self, rows: int) -> torch.Tensor:
        return self._runner.steps.run(self._rows(rows)).greedy

    def mixed(self, rows: int, tokens: int) -> torch.Tensor:
        return self._with_prompt(self._rows(rows), tokens)

    def _with_prompt(self, answers: DecodeRows | None, tokens: int) -> torch.Tensor:
        return self._logits(self._runner.prompts.capture(answers, self._prompt(tokens)))

    def _prompt(self, tokens: int) -> list[PromptRows]:
        return [PromptRows([0] * tokens, 0, list(range(1, -(-tokens // self._runner.cache.block_size) + 1)))]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.model.logits(hidden[:_ROWS]).argmax(dim=-1)

    def _rows(self, rows: int) -> DecodeRows:
        """Rows that each write and see the first tokens of a block."""
        zeros = np.zeros(rows, dtype=np.int64)
        return DecodeRows(zeros, zeros, zeros + self._runner.cache.block_size, np.ones((rows, 1), dtype=np.int32), zeros)
