"""Passes with prompts as graphs: up to some hundred tokens a pass is launched more slowly than it
is computed.

A graph is captured for one size: rows of answers, tokens of prompts, sequences, and what else its
launches depend on. What is not filled is padding, a sequence of its own that lies in block 0, which
nobody owns. Sizes grow in steps of an eighth to a quarter, so that little of a pass is padding, and
a size is captured when it has come some times: what comes a few times costs no capture. Long passes
are bound by the device and are launched operator by operator, as are those of models whose layers
read a state or index keys, sequence after sequence.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from quantkit_kernels import PaddedPrompts, PromptPart, SpansNow
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import (
    Chunk,
    MixedContext,
    PrefillContext,
    PromptContext,
)
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import (
    MIN_TABLE_WIDTH,
    Capture,
    DecodeBuffers,
    TokenModel,
    power_of_two,
)

MOST_TOKENS = 2048
"""Tokens of prompts in a pass that is captured, at most. With more of them the device is busy all
the time."""
RUNS_BEFORE_CAPTURE = 8
"""Times that a size is launched before it is captured. A capture takes as long as its launches cost
ten to thirty passes, and everybody
waits for it: where prompts of 8192 tokens meet, one of four ranks of R1 met 16 sizes of 1024
tokens, most of them less than eight times."""
_LEAST_TOKENS = 16
_MOST_SEEN = 8192
"""Cached tokens of all prompts in a pass that is captured, where they are expanded or decoded."""
_MOST_BLOCKS = 4096
"""Of a sequence in such a pass: all tables are as wide, for nothing depends on their width."""
_MOST_GRAPHS = 128
"""Each holds some megabytes, and captures take a few tenths of a second."""


class PrefillChunk(NamedTuple):
    """New tokens of one sequence on the host, the first at position `start`. blocks: its cache;
    state: its place in the cache's states."""

    token_ids: list[int]
    start: int
    blocks: list[int]
    state: int = 0

    @property
    def span(self) -> tuple[int, int]:
        return self.start, len(self.token_ids)


class PrefillGraphSize(NamedTuple):
    """What a graph is captured for. answers: rows, and blocks of their tables; tokens, sequences:
    of prompts, with padding, which is a sequence too; seen: their cached tokens, where these are
    listed; whole: whether hidden states of all tokens are returned."""

    answers: tuple[int, int]
    tokens: int
    sequences: int
    seen: int
    whole: bool = True


def graph_size(
    answers: DecodeRows | None,
    prompts: list[PrefillChunk],
    cache: PagedCache,
    most: int = MOST_TOKENS,
    whole: bool = True,
) -> PrefillGraphSize | None:
    """The size that holds such a pass; None where it is too large for a graph. most: tokens of
    prompts of a pass that is captured."""
    new = sum(len(one.token_ids) for one in prompts)
    if new > most or max(len(one.blocks) for one in prompts) > _MOST_BLOCKS:
        return None
    tokens, seen = _rounded(new, _LEAST_TOKENS), 0
    if not cache.read_in_place:
        seen = _rounded(sum(sum(one.span) for one in prompts) + tokens - new, cache.block_size)
        if seen > _MOST_SEEN:
            return None
    rows = (0, 0)
    if answers is not None:
        rows = (
            power_of_two(len(answers.token_ids)),
            max(power_of_two(answers.tables.shape[1]), MIN_TABLE_WIDTH),
        )
    return PrefillGraphSize(rows, tokens, _sequences(len(prompts) + 1), seen, whole)


def captured_sizes(most: int) -> list[int]:
    """The numbers of tokens of prompts that graphs are captured for, up to `most`."""
    sizes = {_rounded(count, _LEAST_TOKENS) for count in range(1, most + 1)}
    return sorted(size for size in sizes if size <= most)


def _sequences(count: int) -> int:
    """`count` or more: 2, or a power of four. One that is not there costs nearly nothing, and ever
    other numbers come together."""
    return 2 if count <= 2 else 1 << 2 * -(-(count - 1).bit_length() // 2)


def _rounded(count: int, least: int) -> int:
    """`count` or some more: in steps of an eighth of the power of two above it, and of no less than
    `least`."""
    step = max(least, power_of_two(count) // 8)
    return -(-count // step) * step


class PrefillBuffers:
    """Inputs of prompts of one size, side by side in one tensor that a single copy fills."""

    def __init__(
        self, size: PrefillGraphSize, width: int, block_size: int, device: torch.device
    ) -> None:
        """width: blocks of a table, at most."""
        self._size, self._width, self._block_size = size, width, block_size
        count, wide = size.sequences, (size.tokens,) * 3 + (size.seen,)
        # Each begins at a multiple of 16 bytes, or Triton compiles its kernel for every way they
        # might lie.
        narrow = tuple(-(-one // 4) * 4 for one in (count + 1, count, count, count, count * width))
        host = np.zeros(sum(wide) + sum(narrow) // 2, dtype=np.int64)
        self._host, self._device = (
            torch.from_numpy(host),
            torch.zeros(len(host), dtype=torch.int64, device=device),
        )
        self._columns = _cut(host[: sum(wide)], wide) + _cut(
            host[sum(wide) :].view(np.int32), narrow
        )
        longs, ints = (
            self._device[: sum(wide)].split(wide),
            self._device[sum(wide) :].view(torch.int32).split(narrow),
        )
        self.token_ids, self.positions, self.slots, seen = longs
        starts, (lengths, rows, zeros) = ints[0][: count + 1], (one[:count] for one in ints[1:4])
        part = PromptPart(seen, zeros, lengths, rows) if size.seen else None
        self.ends = starts[1:]
        """Where the tokens of each sequence end."""
        self._spans, tables = SpansNow(), ints[4][: count * width].view(count, width)
        self.prompts = PaddedPrompts(
            self._spans, tables, starts, lengths, size=size.tokens, part=part
        )

    def fill(self, prompts: list[PrefillChunk]) -> None:
        """Sequences that are not there are empty, the last one is padding."""
        size = self._size
        padding = PrefillChunk(
            [0] * (size.tokens - sum(len(one.token_ids) for one in prompts)), 0, []
        )
        every = [
            *prompts,
            *[PrefillChunk([], 0, [])] * (size.sequences - len(prompts) - 1),
            padding,
        ]
        token_ids, positions, slots, seen, starts, lengths, rows, _, tables = self._columns
        tables.fill(0)
        seen.fill(0)
        new = cached = 0
        for number, one in enumerate(every):
            table = tables[number * self._width : (number + 1) * self._width]
            table[: len(one.blocks)] = one.blocks
            start, length = one.span
            at = np.arange(start + length)
            places = (
                table[at // self._block_size].astype(np.int64) * self._block_size
                + at % self._block_size
            )
            own = slice(new, new + length)
            token_ids[own], positions[own], slots[own] = one.token_ids, at[start:], places[start:]
            starts[number], lengths[number], rows[number] = new, start + length, cached
            if size.seen:
                seen[cached : cached + start + length] = places
            new, cached = new + length, cached + start + length
        starts[size.sequences] = new
        self._spans[:] = [one.span for one in every]
        self._device.copy_(self._host, non_blocking=self._device.is_cuda)

    def context(self, cache: PagedCache) -> PromptContext:
        return PromptContext(cache, self.positions, self.slots, self.prompts)


def _cut(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Parts of so many elements, which share its memory."""
    return np.split(array, np.cumsum(sizes))[: len(sizes)]


class _Pass:
    """One size: buffers, and what computes over them."""

    def __init__(self, model: TokenModel, cache: PagedCache, size: PrefillGraphSize) -> None:
        self._model, self._cache = model, cache
        self._answers = DecodeBuffers(*size.answers, cache.device) if size.answers[0] else None
        self._prompts = PrefillBuffers(
            size,
            max(min(cache.num_blocks, _MOST_BLOCKS), MIN_TABLE_WIDTH),
            cache.block_size,
            cache.device,
        )
        self.lengths = self._answers.lengths if self._answers else []
        self.rows = size.answers[0] + (size.tokens if size.whole else size.sequences)
        """Of hidden states."""
        self._first, self._whole = size.answers[0], size.whole

    def fill(self, answers: DecodeRows | None, prompts: list[PrefillChunk]) -> None:
        if self._answers is not None and answers is not None:
            self._answers.fill(answers)
        self._prompts.fill(prompts)

    def compute(self) -> Tensor:
        """Hidden states of the answers' rows and of the prompts' tokens, or of the last one of
        each, padding included."""
        prompts, token_ids, rows = self._prompts.context(self._cache), self._prompts.token_ids, None
        context: PromptContext | MixedContext = prompts
        if self._answers is not None:
            token_ids = torch.cat((self._answers.token_ids, token_ids))
            context = MixedContext(self._answers.context(self._cache), prompts)
        if not self._whole:
            answers = torch.arange(self._first, device=token_ids.device)
            rows = torch.cat(
                (answers, (self._prompts.ends + (self._first - 1)).clamp_(min=self._first))
            )  # an empty one has some row
        return self._model(token_ids, context, rows)


class PrefillRunner:
    """Passes with prompts over a cache. capture: None where none are captured."""

    def __init__(self, model: TokenModel, cache: PagedCache, capture: Capture | None) -> None:
        self.model, self.cache = model, cache
        self._capture = None if cache.prefills_per_sequence else capture
        self.most_tokens = MOST_TOKENS
        """Of prompts in a pass that is captured."""
        self.keep_all_hidden = True
        """Whether hidden states of all tokens of prompts are read, not those of the last one of
        each alone."""
        self._met: Counter[PrefillGraphSize] = Counter()
        self._graphs: dict[PrefillGraphSize, tuple[_Pass, Callable[[], Tensor]]] = {}
        self._hidden: Tensor | None = None
        """Where graphs leave their results: what others keep in the pool that they share may be
        written over by any of them."""

    @property
    def captures(self) -> bool:
        """Whether passes are captured at all."""
        return self._capture is not None

    @property
    def num_captured(self) -> int:
        """Sizes of passes that are captured."""
        return len(self._graphs)

    def limit(self, tokens: int) -> None:
        """Passes with more tokens of prompts are launched operator by operator; their graphs are
        let go of."""
        self.most_tokens = min(tokens, MOST_TOKENS)
        self._graphs = {
            size: graph for size, graph in self._graphs.items() if size.tokens <= self.most_tokens
        }

    def capture(self, answers: DecodeRows | None, prompts: list[PrefillChunk]) -> Tensor:
        """As `run`, captured now where the size is captured at all."""
        size = graph_size(answers, prompts, self.cache, self.most_tokens, self.keep_all_hidden)
        if size is not None:
            self._met[size] = RUNS_BEFORE_CAPTURE
        return self.run(answers, prompts)

    def run(
        self, answers: DecodeRows | None, prompts: list[PrefillChunk], *, whole: bool = False
    ) -> Tensor:
        """Hidden states [R, H] of the answers' rows, then of the prompts' tokens where `whole` or
        `keep_all_hidden`, else of the last token of each; valid until the next pass."""
        whole = whole or self.keep_all_hidden
        size = (
            graph_size(answers, prompts, self.cache, self.most_tokens, whole)
            if self._capture is not None
            else None
        )
        if size is None or not self._ready(size, answers, prompts):
            return self.launch(answers, prompts, whole=whole)
        made, replay = self._graphs[size]
        made.fill(answers, prompts)
        hidden = replay()
        count, first = (
            sum(len(one.token_ids) for one in prompts) if whole else len(prompts),
            size.answers[0],
        )
        if answers is None or len(answers.token_ids) == first:
            return hidden[: first + count]
        return torch.cat((hidden[: len(answers.token_ids)], hidden[first : first + count]))

    def context(
        self, answers: DecodeRows | None, prompts: list[PrefillChunk]
    ) -> PrefillContext | MixedContext:
        """Where such tokens attend."""
        chunks = [
            Chunk(*one.span, torch.tensor(one.blocks, device=self.cache.device), one.state)
            for one in prompts
        ]
        context = PrefillContext(self.cache, chunks)
        return context if answers is None else MixedContext(answers.context(self.cache), context)

    def launch(
        self, answers: DecodeRows | None, prompts: list[PrefillChunk], *, whole: bool = False
    ) -> Tensor:
        """As `run`, operator by operator."""
        token_ids, rows = [] if answers is None else answers.token_ids.tolist(), None
        if not (whole or self.keep_all_hidden):
            ends = accumulate((len(one.token_ids) for one in prompts), initial=len(token_ids) - 1)
            rows = torch.tensor(
                [*range(len(token_ids)), *islice(ends, 1, None)], device=self.cache.device
            )
        token_ids += [token for one in prompts for token in one.token_ids]
        return self.model(
            torch.tensor(token_ids, device=self.cache.device), self.context(answers, prompts), rows
        )

    def _ready(
        self, size: PrefillGraphSize, answers: DecodeRows | None, prompts: list[PrefillChunk]
    ) -> bool:
        """Whether there is a graph of the size, captured now where the size has come often
        enough."""
        if size in self._graphs:
            return True
        if self._met[size] < RUNS_BEFORE_CAPTURE or len(self._graphs) == _MOST_GRAPHS:
            self._met[size] += 1
            return False
        assert self._capture is not None, "asked before"
        made = _Pass(self.model, self.cache, size)
        # What the warm-up of a capture computes is written to the cache: it must be this pass, not
        # a made-up one.
        made.fill(answers, prompts)
        room = self._room(made.rows)

        def step() -> Tensor:
            return room.copy_(made.compute())

        try:
            self._graphs[size] = (made, self._capture(step, made.lengths))
        except RuntimeError as fault:
            self._capture = None
            told = str(fault).partition("\n")[0]
            warnings.warn(
                f"a pass with prompts could not be captured: {told}; prompts are launched operator "
                "by operator",
                stacklevel=2,
            )
            return False
        return True

    def _room(self, rows: int) -> Tensor:
        """For hidden states of so many rows. Graphs keep what they were captured with."""
        if self._hidden is None or len(self._hidden) < rows:
            like = self.model.embedding
            self._hidden = torch.empty(rows, self.model.width, dtype=like.dtype, device=like.device)
        return self._hidden[:rows]
