"""Tune the prefill chunk on the loaded model: how many prompt tokens a step computes while
sequences decode, whether in one pass with them, and which passes are worth a graph.

A decoding sequence waits for the prompt tokens that a step computes, so there should be few; but
each chunk reads the weights again and is followed by a decode step, so with too few a prompt takes
longer. `measure` finds how many tokens keep the wait acceptable, and takes the most of them, unless
fewer are computed faster.

The longest step is computed once before anything is measured: on four H200 the first two prompts of
R1 that filled one together had their first tokens four seconds late, once.

Chunks of a long prompt have a context, a different one each time. So passes are measured as they
are computed: launched, not replayed; and half a chunk after a long context, where a token costs
more. The cost of prompt tokens attending to each other does not depend on how the prompt is cut, so
no pass is charged for it: no measured pass has prompts longer than `_PIECE`.

Where passes take seconds, as of a large model on a CPU, measuring takes minutes. So measurements
are limited to `_MAX_MEASURE_S`: a longer pass is assumed to take as long per token as the longest
measured one (an upper bound), and later measurements are skipped.

A captured pass waits for no launch. That is worth a capture, which takes as long as some passes and
happens while requests wait, only where launching is the bottleneck: with many tokens, and sooner in
large models, the device is always busy.
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

_MIN_CHUNK, _DECODE_ROWS = 32, 8
"""Prompt tokens of the shortest chunk; rows of the decode batch that chunks are measured with."""
_CAPTURE_GAIN = 1.1
"""How much slower a pass must be launched than replayed for graphs of its size to be captured."""
_ALWAYS_CAPTURED = 1024
"""Tokens of the longest pass captured without this test, which runs before there are requests,
whose handling takes the host's time too. Eight prompts of 128 tokens of Qwen3-8B, launched, had
their first token on an H200 after 45 ms, on one of another host after 77 to 102."""
_FASTER = 0.98
"""A shorter chunk is taken if its time per token is at most this share of the longer one's, and one
longer than usual if it is at most this share of the usual one's. With 7680 tokens instead of 4096,
Qwen3-8B on an H200 has 2 to 5 % more tokens/s in five cells, TPOT of 0.92 to 1.0, first tokens of
0.96 to 1.06; decoding sequences wait up to 0.21 s instead of 0.11."""
_MAX_WAIT_S, _MAX_WAIT_STEPS = 0.2, 4
"""A chunk and a decode step may take this long, or as long as this many decode steps if that is
longer. With chunks of 4096 tokens, 32 prompts of 4096 of Qwen3-8B have their first token on an H200
after 0.78 of the time that they need with 512. On four of R1's ranks a prompt of 16,384 next to 32
decoding sequences needs 1.7 s with chunks of 2048 and 2.5 with 1024, and the sequences wait 0.26 s
and 0.18."""
_ODD = (17, 33)
"""Tokens of short passes that nothing measures. Triton compiles kernels of few tokens again for
numbers that 16 does not divide, which took the first short prompts of Qwen3-Next on an H200 0.7 and
0.8 s."""
_PIECE = 1024
"""Tokens per prompt of a measured pass, at most; longer passes have several prompts. With one of
4096, Qwen3-8B on an H200 had chunks of 2048 and took 1.14 of vLLM's time for eight prompts of
16,000 tokens; with chunks of 4096 it took 0.96."""
_CONTEXT_CHUNKS, _MIN_CONTEXT_CHUNKS, _CONTEXT_TOKENS = 8, 2, 65536
"""Chunks of context before the half chunk that is measured, of so many tokens in all at most, if
the cache has room for them; with room for fewer chunks no context is long."""
_ITERATIONS = 8
"""Of the fixed point of the costs of a token and of a token that it sees."""
_NEVER = 1 << 24
"""Tokens of context: where a token costs twice as much only after more than this, all cost the
same."""
_STRIDE = 7
"""Between the ids of synthetic tokens: different tokens are routed to different experts, whose
weights are read."""
_MAX_MEASURE_S, _SLOW_S = 20.0, 1.0
"""Seconds of all measured passes, without compilation; a pass slower than _SLOW_S is not
repeated."""
_MIN_SLOPE = 0.5
"""Lower bound of a further token's time, as a share of the pass's mean time per token: in passes
bound by launches, tokens look free."""


@torch.inference_mode()
def measure(
    runner: Runner, parallel: Parallel, budget: StepBudget, max_batch: int, longest: int | None
) -> StepBudget:
    """The tuned budget. All ranks call it at the same time, before any request: it overwrites the
    cache.

    budget: usual tokens. longest: the most that are allowed, taken where they are faster; None
    where the user chose the usual ones, so that only mixing is measured.
    """
    room = (runner.cache.num_blocks - 1) * runner.cache.block_size
    usual = min(budget.prefill_only, room)
    most = min(max(usual, longest or 0), room)
    trial = _Trial(runner, parallel)
    if runner.device.type != "cpu" and trial.affords(trial.at_most(most)):
        # Compiles, loads and allocates what a step this long needs.
        trial.two_prompts(most)[:1].tolist()
        for tokens in _ODD:
            trial.launched(min(tokens, most))[:1].tolist()
    if max_batch == 1:
        return budget
    rows = min(_DECODE_ROWS, max_batch - 1)
    step = trial.seconds(trial.decode, rows)
    if runner.prefill_runner.can_capture:
        runner.prefill_runner.limit(_largest_captured(trial, most))
    chunk, doubles_at = usual, 0
    if longest is not None:
        times = _PassTimes(trial.bounded, step)
        chunk = times.best_of(usual, most, max(_MAX_WAIT_S, _MAX_WAIT_STEPS * step))
        context = min(_CONTEXT_CHUNKS, _CONTEXT_TOKENS // chunk, room // chunk - 1)
        if context >= _MIN_CONTEXT_CHUNKS and trial.affords((context + 1) * trial.at_most(chunk)):
            for part in range(context):
                trial.continued(chunk, part * chunk)
            start = context * chunk
            doubles_at = times.doubles_at(
                chunk, start, trial.seconds(trial.continued, chunk // 2, start)
            )
    prefill_only = max(budget.prefill_only, chunk)
    if not trial.affords(2 * trial.at_most(chunk)):
        return StepBudget(prefill_only, chunk, doubles_at=doubles_at)
    separate = step + trial.seconds(trial.launched, chunk)
    return StepBudget(
        prefill_only,
        chunk,
        mixed=trial.seconds(trial.mixed, rows, chunk) < separate,
        doubles_at=doubles_at,
    )


def _largest_captured(trial: "_Trial", most: int) -> int:
    """Tokens of the longest pass that is worth a graph."""
    tokens = min(MOST_TOKENS, most)
    while tokens > _ALWAYS_CAPTURED:
        launched = trial.bounded(tokens)
        if launched < _SLOW_S and launched >= _CAPTURE_GAIN * trial.seconds(trial.prompt, tokens):
            break
        tokens //= 2
    return tokens


class _PassTimes:
    """Times of passes without context. measure: seconds of a pass of so many tokens; step: seconds
    of the decode step after each chunk."""

    def __init__(self, measure: Callable[[int], float], step: float) -> None:
        self._measure, self._step = measure, step
        self._known: dict[int, float] = {}

    def seconds(self, tokens: int) -> float:
        if tokens not in self._known:
            self._known[tokens] = self._measure(tokens)
        return self._known[tokens]

    def best_of(self, usual: int, most: int, longest: float) -> int:
        """As `best_chunk`; more than `usual` tokens where those are faster."""
        chunk = self.best_chunk(most, longest)
        if chunk > usual and self._per_token(chunk) > _FASTER * self._per_token(usual):
            return self.best_chunk(usual, longest)
        return chunk

    def best_chunk(self, most: int, longest: float) -> int:
        """The most tokens that take, with a decode step, at most `longest` seconds; fewer where
        they are faster."""
        sizes = [min(_MIN_CHUNK, most)]
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        fits, too_long = self._longest(sizes, longest)
        if fits == 0 and self._gap(sizes[0]) > longest:
            # No chunk is short enough: then up to half of the time may be for its tokens.
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
        best = self._per_token(chunk)
        for fewer in [size for size in reversed(sizes) if size < chunk]:
            if self._per_token(fewer) > _FASTER * best:
                break
            chunk, best = fewer, self._per_token(fewer)
        return chunk

    def _longest(self, sizes: list[int], longest: float) -> tuple[int, int]:
        """Indices of the last size that takes at most `longest`, and of the first that takes
        longer; the smallest size is assumed to fit."""
        fits, too_long = 0, len(sizes)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (
                (middle, too_long) if self._gap(sizes[middle]) <= longest else (fits, middle)
            )
        return fits, too_long

    def doubles_at(self, chunk: int, start: int, with_context: float) -> int:
        """Context after which a token costs twice as much; 0 where it costs no more. with_context:
        seconds of half a chunk after `start` tokens.

        Half a chunk is about what is computed there, so it includes what a pass costs for each
        token of context, however few its own tokens are: latent KV that is expanded.
        """
        took = self.seconds(chunk)
        longer = min((tokens for tokens in self._known if tokens > chunk), default=chunk)
        shorter = (
            max((tokens for tokens in self._known if tokens < chunk), default=0)
            if longer == chunk
            else chunk
        )
        slope = (self.seconds(longer) - (self.seconds(shorter) if shorter else 0.0)) / (
            longer - shorter
        )
        pairs_per_token = (_pairs(longer) - _pairs(shorter)) / (longer - shorter)
        least, half, each = _MIN_SLOPE * took / chunk, chunk // 2, 0.0
        for _ in range(_ITERATIONS):
            # Tokens of a pass see each other, which a token without context does not pay for.
            token = max(slope / (1 + each * pairs_per_token), least)
            pairs = half * (start + half / 2) - _pairs(chunk)
            each = max((with_context - took) / token + chunk - half, 0.0) / pairs
        return round(1 / each) if each > 1 / _NEVER else 0

    def _gap(self, tokens: int) -> float:
        return self._step + self.seconds(tokens)

    def _per_token(self, tokens: int) -> float:
        return self._gap(tokens) / tokens


def _pairs(tokens: int) -> float:
    """(token, token that it sees) pairs of a measured pass."""
    whole, rest = divmod(tokens, _PIECE)
    return (whole * _PIECE * _PIECE + rest * rest) / 2


class _Trial:
    """Passes over synthetic tokens, in the cache's blocks from 1 on, timed on the slowest rank."""

    def __init__(self, runner: Runner, parallel: Parallel) -> None:
        self._runner, self._parallel = runner, parallel
        self._known: dict[tuple[Any, ...], float] = {}
        """Seconds by method and sizes."""
        self._spent = 0.0

    def seconds(self, compute: Callable[..., torch.Tensor], *sizes: int) -> float:
        """The faster of two runs, after two that compile and capture; of a slow pass the second
        run. Measured once per size."""
        if (compute, *sizes) not in self._known:
            runs = [self._once(lambda: compute(*sizes)) for _ in range(2)]
            if runs[1] < _SLOW_S:
                runs += [self._once(lambda: compute(*sizes)) for _ in range(2)]
            self._known[compute, *sizes] = min(runs[2:] or runs[1:])
            self._spent += len(runs) * self._known[compute, *sizes]
        return self._known[compute, *sizes]

    def bounded(self, tokens: int) -> float:
        """A launched pass: measured, or its upper bound if measuring would take too long."""
        most = self.at_most(tokens)
        return self.seconds(self.launched, tokens) if self.affords(2 * most) else most

    def at_most(self, tokens: int) -> float:
        """Upper bound of a launched pass, from the time per token of the longest measured one that
        is not longer; the shortest is always measured."""
        self.seconds(self.launched, min(_MIN_CHUNK, tokens))
        measured = [
            size for kind, size, *_ in self._known if kind == self.launched and size <= tokens
        ]
        longest = max(measured)
        return self._known[self.launched, longest] * tokens / longest

    def affords(self, seconds: float) -> bool:
        """Whether this much more may be measured; the same on all ranks, as all count the slowest
        rank's time."""
        return self._spent + seconds <= _MAX_MEASURE_S

    def _once(self, compute: Callable[[], torch.Tensor]) -> float:
        start_time = time.perf_counter()
        compute()[:1].tolist()  # waits for the device
        return -self._parallel.minimum(-round((time.perf_counter() - start_time) * 1e9)) * 1e-9

    def prompt(self, tokens: int) -> torch.Tensor:
        """As a graph, if its size is captured."""
        return self._logits(self._runner.prefill_runner.capture(None, self._prompt(tokens)))

    def launched(self, tokens: int) -> torch.Tensor:
        """Launched eagerly, as prompts of up to _PIECE tokens."""
        return self._logits(self._runner.prefill_runner.launch(None, self._pieces(tokens)))

    def continued(self, tokens: int, start: int) -> torch.Tensor:
        """Launched eagerly, the next tokens of a prompt after `start` cached ones."""
        return self._logits(self._runner.prefill_runner.launch(None, self._prompt(tokens, start)))

    def two_prompts(self, tokens: int) -> torch.Tensor:
        """Launched eagerly, half of the tokens each of two prompts."""
        return self._logits(
            self._runner.prefill_runner.launch(None, 2 * self._prompt(-(-tokens // 2)))
        )

    def decode(self, rows: int) -> torch.Tensor:
        return self._runner.steps.run(self._rows(rows)).greedy

    def mixed(self, rows: int, tokens: int) -> torch.Tensor:
        """A decode batch and prompts in one pass, launched eagerly."""
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
        """Of synthetic tokens, all of the vocabulary equally often."""
        return _STRIDE * np.arange(start, start + count) % len(self._runner.model.embedding)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.model.logits(hidden[:_DECODE_ROWS]).argmax(dim=-1)

    def _rows(self, rows: int) -> DecodeRows:
        """Rows that each write and see the first token of block 1."""
        zeros = np.zeros(rows, dtype=np.int64)
        slots = zeros + self._runner.cache.block_size
        return DecodeRows(
            self._ids(0, rows), zeros, slots, np.ones((rows, 1), dtype=np.int32), zeros
        )
