"""How many prompt tokens a step computes while answers run, whether in one pass with them, and
which passes are worth a graph: measured on the loaded model.

A running answer waits for the prompt tokens that a step computes beside it, so they should be few;
but weights are read for each step anew, and between two chunks come the answers' own steps, so with
too few of them a prompt takes longer. `measure` finds how many tokens nobody waits too long for,
and takes the most of them, unless fewer are computed faster.

The longest step is computed once before anything is measured: on four H200 the first two prompts of
R1 that filled one together had their first tokens four seconds late, once.

Chunks of a long prompt lie behind a context, ever another one. So passes are measured as these are
computed: launched, not replayed; and half a chunk behind a long context, for there a token costs
more. What tokens of a prompt cost because they see each other they cost however the prompt is cut.
So no pass is charged for it: of those that are compared none has prompts longer than `_PIECE`.

Where passes take seconds, as of a large model on a CPU, measuring them takes minutes. So no more is
computed than `_MOST_S` allow for: a longer pass is taken to last as its tokens do in the longest
that was measured, which it does at most, and what comes after goes without.

A pass that is captured waits for no launch. That is worth its capture, which takes as long as some
passes and happens while users wait, only where launching is what a pass waits for: with many
tokens, and sooner in large models, the device is busy all the time.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.prefill_graphs import MOST_TOKENS, PrefillChunk
from quantkit.executor.runner.runner import Runner
from quantkit.executor.scheduler.scheduler import StepBudget

_FEWEST, _ROWS = 32, 8
"""Prompt tokens of the shortest chunk; rows of answers beside which chunks are measured."""
_WORTH = 1.1
"""How much slower a pass must be launched than replayed, for graphs of its size to be captured."""
_ALWAYS_CAPTURED = 1024
"""Tokens of the longest pass that this is not asked of: it is asked before there are requests, and
these take the host's time, too. Eight prompts of 128 tokens of Qwen3-8B, launched, had their first
token on an H200 after 45 ms, on one of another host after 77 to 102."""
_FASTER = 0.98
"""Of the time of each token, what fewer of them must not exceed to be taken. With 7680 tokens, not
4096, Qwen3-8B on an H200 has 2 to 5 % more tokens a second in five cells, TPOT of 0.92 to 1.0,
first tokens of 0.96 to 1.06; answers wait up to 0.21 s for 0.11."""
_LONGEST_S, _STEPS = 0.2, 4
"""A chunk and the answers' step may take so long, or as long as so many of these steps, if that is
longer: answers wait for it. With chunks of 4096 tokens, 32 prompts of 4096 of Qwen3-8B have their
first token on an H200 after 0.78 of the time that they need with 512. On four of R1's ranks a
prompt of 16,384 beside 32 answers needs 1.7 s with chunks of 2048 and 2.5 with 1024, and the
answers wait 0.26 s and 0.18."""
_PIECE = 1024
"""Tokens of a prompt of a pass that is measured, at most; it has as many prompts as it takes. With
one of 4096, Qwen3-8B on an H200 had chunks of 2048 and took 1.14 of vLLM's time for eight prompts
of 16,000 tokens; with chunks of 4096 it took 0.96."""
_BEHIND, _FEWEST_BEHIND = 8, 2
"""Chunks of context behind which half a chunk is measured, where the cache has room for them; with
room for fewer no context is long."""
_TURNS = 8
"""What a token costs, and what one that it sees, are found in turns from each other."""
_NEVER = 1 << 24
"""Tokens of context: where one costs twice as much only behind more than so many, all cost the
same."""
_STRIDE = 7
"""Between the ids of made-up tokens: other tokens ask for other experts, whose weights are read."""
_MOST_S, _SLOW_S = 20.0, 1.0
"""Seconds of passes that are measured, what they compile aside; and of one that is not done again:
nothing small moves it."""
_CHEAPEST = 0.5
"""Of a pass's mean time a token, what one more takes at least: passes that wait for their launches
look as if tokens were free."""


@torch.inference_mode()
def measure(
    runner: Runner, parallel: Parallel, budget: StepBudget, max_batch: int, *, asked: bool
) -> StepBudget:
    """All ranks at the same time, before any request: what is in the cache is overwritten.

    budget: tokens that are allowed. asked: whether somebody chose them, so that only the mixing is
    to be measured.
    """
    room = (runner.cache.num_blocks - 1) * runner.cache.block_size
    most = min(budget.prefill_only, room)
    trial = _Trial(runner, parallel)
    if runner.device.type != "cpu" and trial.affords(trial.at_most(most)):
        trial.together(most)[
            :1
            # what is compiled, loaded and allocated for a step this long, no prompt waits for
        ].tolist()
    if max_batch == 1:
        return budget
    rows = min(_ROWS, max_batch - 1)
    step = trial.seconds(trial.answers, rows)
    if runner.prefill_runner.captures:
        runner.prefill_runner.limit(_captured(trial, most))
    chunk, doubles_at = most, 0
    if not asked:
        passes = _Passes(trial.bounded, step)
        chunk = passes.knee(most, max(_LONGEST_S, _STEPS * step))
        behind = min(_BEHIND, room // chunk - 1)
        if behind >= _FEWEST_BEHIND and trial.affords((behind + 1) * trial.at_most(chunk)):
            for part in range(behind):
                trial.continued(chunk, part * chunk)
            doubles_at = passes.doubles_at(
                chunk, behind * chunk, trial.seconds(trial.continued, chunk // 2, behind * chunk)
            )
    if not trial.affords(2 * trial.at_most(chunk)):
        return StepBudget(budget.prefill_only, chunk, doubles_at=doubles_at)
    apart = step + trial.seconds(trial.launched, chunk)
    return StepBudget(
        budget.prefill_only,
        chunk,
        mixed=trial.seconds(trial.mixed, rows, chunk) < apart,
        doubles_at=doubles_at,
    )


def _captured(trial: "_Trial", most: int) -> int:
    """The most tokens of a pass that is worth a graph."""
    tokens = min(MOST_TOKENS, most)
    while tokens > _ALWAYS_CAPTURED:
        launched = trial.bounded(tokens)
        if launched < _SLOW_S and launched >= _WORTH * trial.seconds(trial.prompt, tokens):
            break
        tokens //= 2
    return tokens


class _Passes:
    """Passes over the first tokens of a prompt. seconds: measures one of so many; step: of the
    answers, after each chunk."""

    def __init__(self, seconds: Callable[[int], float], step: float) -> None:
        self._measure, self._step = seconds, step
        self.took: dict[int, float] = {}

    def seconds(self, tokens: int) -> float:
        if tokens not in self.took:
            self.took[tokens] = self._measure(tokens)
        return self.took[tokens]

    def knee(self, most: int, longest: float) -> int:
        """The most tokens of a chunk that takes, with the answers' step, no longer than `longest`;
        fewer where they are faster."""
        sizes = [min(_FEWEST, most)]
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        fits, too_long = self._longest(sizes, longest)
        if (
            fits == 0 and self._gap(sizes[0]) > longest
        ):  # no chunk is short enough: then half of the time may be its tokens'
            longest = 2 * self._gap(sizes[0])
            fits, too_long = self._longest(sizes, longest)
        chunk = sizes[fits]
        if too_long < len(sizes) and (left := longest - self._gap(chunk)) > 0:
            more = (
                left
                / (self.seconds(sizes[too_long]) - self.seconds(chunk))
                * (sizes[too_long] - chunk)
            )
            chunk += int(more) // (unit := max(chunk // 8, 1)) * unit
        best = self._each(chunk)
        for fewer in [size for size in reversed(sizes) if size < chunk]:
            if self._each(fewer) > _FASTER * best:
                break
            chunk, best = fewer, self._each(fewer)
        return chunk

    def _longest(self, sizes: list[int], longest: float) -> tuple[int, int]:
        """Which of the sizes is the last that takes no longer, and which the first that does; the
        first of all is not asked."""
        fits, too_long = 0, len(sizes)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (
                (middle, too_long) if self._gap(sizes[middle]) <= longest else (fits, middle)
            )
        return fits, too_long

    def doubles_at(self, chunk: int, start: int, behind: float) -> int:
        """Behind how many tokens one costs twice as much; 0 where it costs no more. behind: seconds
        of half a chunk behind `start` tokens.

        Half a chunk is about what is computed there, so what a pass costs for each token behind
        which it is, however few its own are, is in
        it: latents that are expanded.
        """
        took = self.seconds(chunk)
        longer = min((tokens for tokens in self.took if tokens > chunk), default=chunk)
        shorter = (
            max((tokens for tokens in self.took if tokens < chunk), default=0)
            if longer == chunk
            else chunk
        )
        slope = (self.seconds(longer) - (self.seconds(shorter) if shorter else 0.0)) / (
            longer - shorter
        )
        seen = (_pairs(longer) - _pairs(shorter)) / (longer - shorter)
        least, half, each = _CHEAPEST * took / chunk, chunk // 2, 0.0
        for _ in range(
            _TURNS
        ):  # tokens of a pass see each other, which is no part of what one costs that sees nothing
            token = max(slope / (1 + each * seen), least)
            pairs = half * (start + half / 2) - _pairs(chunk)
            each = max((behind - took) / token + chunk - half, 0.0) / pairs
        return round(1 / each) if each > 1 / _NEVER else 0

    def _gap(self, tokens: int) -> float:
        return self._step + self.seconds(tokens)

    def _each(self, tokens: int) -> float:
        return self._gap(tokens) / tokens


def _pairs(tokens: int) -> float:
    """Of tokens of a measured pass and those that they see."""
    whole, rest = divmod(tokens, _PIECE)
    return (whole * _PIECE * _PIECE + rest * rest) / 2


class _Trial:
    """Passes over made-up tokens, in the cache's blocks from 1 on; each as long as the slowest rank
    takes."""

    def __init__(self, runner: Runner, parallel: Parallel) -> None:
        self._runner, self._parallel = runner, parallel
        self._known: dict[tuple[Any, ...], float] = {}
        """Seconds by what was computed, and its sizes."""
        self._spent = 0.0

    def seconds(self, compute: Callable[..., torch.Tensor], *sizes: int) -> float:
        """The better of two, after two that compile and capture; of a slow pass the one after the
        first. Measured once for each size."""
        if (compute, *sizes) not in self._known:
            runs = [self._once(lambda: compute(*sizes)) for _ in range(2)]
            if runs[1] < _SLOW_S:
                runs += [self._once(lambda: compute(*sizes)) for _ in range(2)]
            self._known[compute, *sizes] = min(runs[2:] or runs[1:])
            self._spent += len(runs) * self._known[compute, *sizes]
        return self._known[compute, *sizes]

    def bounded(self, tokens: int) -> float:
        """A pass that is launched: measured, or the longest that it can take, where measuring that
        would take too long."""
        most = self.at_most(tokens)
        return self.seconds(self.launched, tokens) if self.affords(2 * most) else most

    def at_most(self, tokens: int) -> float:
        """Seconds of a pass that is launched: measured, or as many for each token as in the longest
        that was; the shortest always is."""
        self.seconds(self.launched, min(_FEWEST, tokens))
        measured = [
            size for kind, size, *_ in self._known if kind == self.launched and size <= tokens
        ]
        longest = max(measured)
        return self._known[self.launched, longest] * tokens / longest

    def affords(self, seconds: float) -> bool:
        """Whether so many more may be measured; the same on all ranks, as all count what the
        slowest took."""
        return self._spent + seconds <= _MOST_S

    def _once(self, compute: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        compute()[:1].tolist()  # waits for the device
        return -self._parallel.minimum(-round((time.perf_counter() - began) * 1e9)) * 1e-9

    def prompt(self, tokens: int) -> torch.Tensor:
        """As a graph."""
        return self._logits(self._runner.prefill_runner.capture(None, self._prompt(tokens)))

    def launched(self, tokens: int) -> torch.Tensor:
        """Operator by operator, as prompts of up to _PIECE tokens."""
        return self._logits(self._runner.prefill_runner.launch(None, self._pieces(tokens)))

    def continued(self, tokens: int, start: int) -> torch.Tensor:
        """Operator by operator, the next tokens of a prompt behind `start` cached ones."""
        return self._logits(self._runner.prefill_runner.launch(None, self._prompt(tokens, start)))

    def together(self, tokens: int) -> torch.Tensor:
        """Operator by operator, half of the tokens each of two prompts."""
        return self._logits(
            self._runner.prefill_runner.launch(None, 2 * self._prompt(-(-tokens // 2)))
        )

    def answers(self, rows: int) -> torch.Tensor:
        return self._runner.steps.run(self._rows(rows)).greedy

    def mixed(self, rows: int, tokens: int) -> torch.Tensor:
        """Both in one pass, operator by operator."""
        return self._logits(
            self._runner.prefill_runner.launch(self._rows(rows), self._pieces(tokens))
        )

    def _pieces(self, tokens: int) -> list[PrefillChunk]:
        whole, rest = divmod(tokens, _PIECE)
        return whole * self._prompt(_PIECE) + (self._prompt(rest) if rest else [])

    def _prompt(self, tokens: int, start: int = 0) -> list[PrefillChunk]:
        blocks = range(1, -(-(start + tokens) // self._runner.cache.block_size) + 1)
        return [PrefillChunk(self._ids(start, tokens).tolist(), start, list(blocks))]

    def _ids(self, start: int, count: int) -> np.ndarray:
        """Of made-up tokens, every one of the vocabulary as often as another."""
        return _STRIDE * np.arange(start, start + count) % len(self._runner.model.embedding)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.model.logits(hidden[:_ROWS]).argmax(dim=-1)

    def _rows(self, rows: int) -> DecodeRows:
        """Rows that each write and see the first tokens of a block."""
        zeros = np.zeros(rows, dtype=np.int64)
        slots = zeros + self._runner.cache.block_size
        return DecodeRows(
            self._ids(0, rows), zeros, slots, np.ones((rows, 1), dtype=np.int32), zeros
        )
