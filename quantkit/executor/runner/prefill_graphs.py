"""Prefill passes, captured as graphs up to a few hundred tokens, where launching takes longer than
computing.

A graph is captured for one size: decode rows, prompt tokens, sequences, and what else its launches
depend on. Unfilled places are padding, a sequence of its own in block 0. Sizes grow in steps of an
eighth to a quarter, so that little of a pass is padding, and a size is captured only when it has
come several times. Long passes are bound by the device and are launched eagerly, as are those of
models whose layers prefill sequence by sequence (index keys, compressed KV).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from quantkit_kernels import DeltaSpan, DeltaSpans, PaddedPrompts, PromptPart, SpansNow
from quantkit_kernels.delta import CHUNK, span_tables
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import MixedContext
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import (
    MIN_TABLE_WIDTH,
    Capture,
    DecodeBuffers,
    TokenModel,
    power_of_two,
)
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext, PromptContext
from quantkit.models.ngram_table import read_by_ids, recent_ids

MOST_TOKENS = 2048
"""Prompt tokens of the largest captured pass. With more the device is always busy."""
RUNS_BEFORE_CAPTURE = 8
"""Times that a size is launched before it is captured. A capture takes as long as the launches of
ten to thirty passes, and every request waits for it: with prompts of 8192 tokens, one of four ranks
of R1 met 16 sizes of 1024 tokens, most of them less than eight times."""
_MIN_TOKENS = 16
_MAX_CACHED = 8192
"""Cached tokens of all prompts in a captured pass, where these are expanded or decoded."""
_MAX_BLOCKS = 4096
"""Of a sequence in a captured pass: all tables are this wide, as nothing depends on their width."""
_MAX_GRAPHS = 128
"""Each holds some megabytes, and takes a few tenths of a second to capture."""


class PrefillChunk(NamedTuple):
    """New tokens of one sequence on the host, the first at position `start`. blocks: its cache
    blocks; state: its place in the cache's per-sequence states; before: ids of the tokens before
    them that n-grams of the new ones begin with."""

    token_ids: list[int]
    start: int
    blocks: list[int]
    state: int = 0
    before: Sequence[int] = ()

    @property
    def span(self) -> tuple[int, int]:
        return self.start, len(self.token_ids)


class PrefillGraphSize(NamedTuple):
    """What a graph is captured for. decode: rows and table width of decoding sequences; tokens,
    sequences: of prompts, with padding, which is a sequence too; cached: their cached tokens, where
    these are listed; all_hidden: whether hidden states of all tokens are returned."""

    decode: tuple[int, int]
    tokens: int
    sequences: int
    cached: int
    all_hidden: bool = True


def graph_size(
    decode: DecodeRows | None,
    prompts: list[PrefillChunk],
    cache: PagedCache,
    max_tokens: int = MOST_TOKENS,
    all_hidden: bool = True,
) -> PrefillGraphSize | None:
    """The size that holds such a pass; None if it is too large for a graph."""
    new = sum(len(one.token_ids) for one in prompts)
    if new > max_tokens or max(len(one.blocks) for one in prompts) > _MAX_BLOCKS:
        return None
    tokens, cached = _rounded(new, _MIN_TOKENS), 0
    if not cache.read_in_place:
        cached = _rounded(sum(sum(one.span) for one in prompts) + tokens - new, cache.block_size)
        if cached > _MAX_CACHED:
            return None
    rows = (0, 0)
    if decode is not None:
        rows = (
            power_of_two(len(decode.token_ids)),
            max(power_of_two(decode.tables.shape[1]), MIN_TABLE_WIDTH),
        )
    # 2 sequences, or a power of four: an absent one costs nearly nothing, and the number of prompts
    # varies from pass to pass.
    count = len(prompts) + 1
    sequences = 2 if count <= 2 else 1 << 2 * -(-(count - 1).bit_length() // 2)
    return PrefillGraphSize(rows, tokens, sequences, cached, all_hidden)


def captured_sizes(most: int) -> list[int]:
    """The numbers of prompt tokens that graphs are captured for, up to `most`."""
    sizes = {_rounded(count, _MIN_TOKENS) for count in range(1, most + 1)}
    return sorted(size for size in sizes if size <= most)


def _rounded(count: int, least: int) -> int:
    """Round up to a multiple of an eighth of the next power of two, and of at least `least`."""
    step = max(least, power_of_two(count) // 8)
    return -(-count // step) * step


class PrefillBuffers:
    """Static inputs of prompts of one size, in one tensor that a single copy fills. width: blocks
    of a table."""

    def __init__(self, size: PrefillGraphSize, width: int, cache: PagedCache) -> None:
        self._size, self._width, self._block_size = size, width, cache.block_size
        device, delta = cache.device, (0, 0)
        if cache.is_recurrent:
            delta = (5 * size.sequences, 2 * (size.tokens // CHUNK + size.sequences))
        count, wide = size.sequences, (size.tokens,) * 3 + (size.cached,)
        # Each begins at a multiple of 16 bytes, or Triton compiles its kernel for every alignment.
        narrow = tuple(
            -(-one // 4) * 4 for one in (count + 1, count, count, count, count * width, *delta)
        )
        host = np.zeros(sum(wide) + sum(narrow) // 2, dtype=np.int64)
        self._host = torch.from_numpy(host)
        self._device = torch.zeros(len(host), dtype=torch.int64, device=device)
        self._columns = _cut(host[: sum(wide)], wide) + _cut(
            host[sum(wide) :].view(np.int32), narrow
        )
        self.token_ids, self.positions, self.slots, cached = self._device[: sum(wide)].split(wide)
        ints = self._device[sum(wide) :].view(torch.int32).split(narrow)
        starts, (lengths, rows, zeros) = ints[0][: count + 1], (one[:count] for one in ints[1:4])
        part = PromptPart(cached, zeros, lengths, rows) if size.cached else None
        self.ends = starts[1:]
        """Where the tokens of each sequence end."""
        self._spans, tables = SpansNow(), ints[4][: count * width].view(count, width)
        self.prompts = PaddedPrompts(
            self._spans, tables, starts, lengths, size=size.tokens, part=part
        )
        self._delta_spans: list[DeltaSpan] = []
        self._delta = None
        if cache.is_recurrent:
            sequences_and_chunks = (ints[5][: delta[0]].view(-1, 5), ints[6].view(-1, 2))
            self._delta = DeltaSpans(self._delta_spans, *sequences_and_chunks)

    def fill(self, prompts: list[PrefillChunk]) -> None:
        """Absent sequences are empty, the last one is padding."""
        size = self._size
        padding = PrefillChunk(
            [0] * (size.tokens - sum(len(one.token_ids) for one in prompts)), 0, []
        )
        empty = [PrefillChunk([], 0, [])] * (size.sequences - len(prompts) - 1)
        every = [*prompts, *empty, padding]
        token_ids, positions, slots, cached, starts, lengths, rows, _, tables, *delta = (
            self._columns
        )
        tables.fill(0)
        cached.fill(0)
        num_new = num_cached = 0
        for number, one in enumerate(every):
            table = tables[number * self._width : (number + 1) * self._width]
            table[: len(one.blocks)] = one.blocks
            start, length = one.span
            at = np.arange(start + length)
            places = (
                table[at // self._block_size].astype(np.int64) * self._block_size
                + at % self._block_size
            )
            own = slice(num_new, num_new + length)
            token_ids[own], positions[own], slots[own] = one.token_ids, at[start:], places[start:]
            starts[number], lengths[number], rows[number] = num_new, start + length, num_cached
            if size.cached:
                cached[num_cached : num_cached + start + length] = places
            num_new, num_cached = num_new + length, num_cached + start + length
        starts[size.sequences] = num_new
        self._spans[:] = [one.span for one in every]
        if self._delta is not None:
            spans = [DeltaSpan(one.state, *one.span) for one in every]
            sequences, chunks = span_tables(spans)
            delta[0][: len(sequences)] = sequences
            # Further chunks are beyond the end of the first sequence.
            delta[1].reshape(-1, 2)[:] = (0, self._size.tokens // CHUNK + 1)
            delta[1][: len(chunks)] = chunks
            self._delta_spans[:] = spans
        self._device.copy_(self._host, non_blocking=self._device.is_cuda)

    def context(self, cache: PagedCache) -> PromptContext:
        return PromptContext(
            cache, self.positions, self.slots, self.prompts, delta_spans=self._delta
        )


def _cut(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Views of consecutive parts."""
    return np.split(array, np.cumsum(sizes))[: len(sizes)]


class _StaticPass:
    """A pass of one size over static buffers."""

    def __init__(self, model: TokenModel, cache: PagedCache, size: PrefillGraphSize) -> None:
        self._model, self._cache = model, cache
        self._decode = DecodeBuffers(*size.decode, cache.device) if size.decode[0] else None
        width = max(min(cache.num_blocks, _MAX_BLOCKS), MIN_TABLE_WIDTH)
        self._prompts = PrefillBuffers(size, width, cache)
        self.lengths = self._decode.lengths if self._decode else []
        self.rows = size.decode[0] + (size.tokens if size.all_hidden else size.sequences)
        """Of hidden states."""
        self._first, self._all_hidden = size.decode[0], size.all_hidden

    def fill(self, decode: DecodeRows | None, prompts: list[PrefillChunk]) -> None:
        if self._decode is not None and decode is not None:
            self._decode.fill(decode)
        self._prompts.fill(prompts)

    def compute(self) -> Tensor:
        """Hidden states of the decode rows, and of the prompts' tokens or the last one of each,
        padding included."""
        prompts, token_ids, rows = self._prompts.context(self._cache), self._prompts.token_ids, None
        context: PromptContext | MixedContext = prompts
        if self._decode is not None:
            token_ids = torch.cat((self._decode.token_ids, token_ids))
            context = MixedContext(self._decode.context(self._cache), prompts)
        if not self._all_hidden:
            # An empty sequence gets any row.
            ends = (self._prompts.ends + (self._first - 1)).clamp_(min=self._first)
            rows = torch.cat((torch.arange(self._first, device=token_ids.device), ends))
        return self._model(token_ids, context, rows)


class PrefillRunner:
    """Passes with prompts over a cache. capture: None to launch all of them eagerly."""

    def __init__(self, model: TokenModel, cache: PagedCache, capture: Capture | None) -> None:
        self.model, self.cache = model, cache
        self._capture = None if cache.prefills_per_sequence else capture
        self.max_tokens = MOST_TOKENS
        """Prompt tokens of a captured pass, at most."""
        self.keep_all_hidden = True
        """Whether hidden states of all prompt tokens are needed, not only those of the last token
        of each prompt."""
        self._runs: Counter[PrefillGraphSize] = Counter()
        self._graphs: dict[PrefillGraphSize, tuple[_StaticPass, Callable[[], Tensor]]] = {}
        self._hidden: Tensor | None = None
        """Results of graphs: what they keep in their shared pool any other graph may overwrite."""

    @property
    def can_capture(self) -> bool:
        return self._capture is not None

    @property
    def num_captured(self) -> int:
        """Captured sizes."""
        return len(self._graphs)

    def limit(self, tokens: int) -> None:
        """Launch passes with more prompt tokens eagerly, and discard their graphs."""
        self.max_tokens = min(tokens, MOST_TOKENS)
        self._graphs = {
            size: graph for size, graph in self._graphs.items() if size.tokens <= self.max_tokens
        }

    def capture(self, decode: DecodeRows | None, prompts: list[PrefillChunk]) -> Tensor:
        """As `run`, captured now if the size is captured at all."""
        size = graph_size(decode, prompts, self.cache, self.max_tokens, self.keep_all_hidden)
        if size is not None:
            self._runs[size] = RUNS_BEFORE_CAPTURE
        return self.run(decode, prompts)

    def run(
        self, decode: DecodeRows | None, prompts: list[PrefillChunk], *, all_hidden: bool = False
    ) -> Tensor:
        """Hidden states [R, H] of the decode rows, then of the prompts' tokens if `all_hidden` or
        `keep_all_hidden`, else of the last token of each; valid until the next pass."""
        all_hidden = all_hidden or self.keep_all_hidden
        size = None
        if self._capture is not None:
            size = graph_size(decode, prompts, self.cache, self.max_tokens, all_hidden)
        if size is None or not self._is_captured(size, decode, prompts):
            return self.launch(decode, prompts, all_hidden=all_hidden)
        static, replay = self._graphs[size]
        static.fill(decode, prompts)
        hidden, first = replay(), size.decode[0]
        count = sum(len(one.token_ids) for one in prompts) if all_hidden else len(prompts)
        if decode is None or len(decode.token_ids) == first:
            return hidden[: first + count]
        return torch.cat((hidden[: len(decode.token_ids)], hidden[first : first + count]))

    def context(
        self, decode: DecodeRows | None, prompts: list[PrefillChunk]
    ) -> PrefillContext | MixedContext:
        """Attention context of such a pass."""
        chunks = [
            Chunk(*one.span, torch.tensor(one.blocks, device=self.cache.device), one.state)
            for one in prompts
        ]

        def recent(count: int) -> Tensor:
            texts = [(len(one.before), [*one.before, *one.token_ids]) for one in prompts]
            return torch.cat([recent_ids(torch.tensor(ids), at, count) for at, ids in texts])

        read = read_by_ids(recent, self.cache.device) if self.model.ngram_rows else None
        context = PrefillContext(self.cache, chunks, read)
        return context if decode is None else MixedContext(decode.context(self.cache), context)

    def launch(
        self, decode: DecodeRows | None, prompts: list[PrefillChunk], *, all_hidden: bool = False
    ) -> Tensor:
        """As `run`, operator by operator."""
        token_ids, rows = [] if decode is None else decode.token_ids.tolist(), None
        if not (all_hidden or self.keep_all_hidden):
            ends = accumulate((len(one.token_ids) for one in prompts), initial=len(token_ids) - 1)
            rows = torch.tensor(
                [*range(len(token_ids)), *islice(ends, 1, None)], device=self.cache.device
            )
        token_ids += [token for one in prompts for token in one.token_ids]
        return self.model(
            torch.tensor(token_ids, device=self.cache.device), self.context(decode, prompts), rows
        )

    def _is_captured(
        self, size: PrefillGraphSize, decode: DecodeRows | None, prompts: list[PrefillChunk]
    ) -> bool:
        """Whether there is a graph of the size; captures it if the size has come often enough."""
        if size in self._graphs:
            return True
        if self._runs[size] < RUNS_BEFORE_CAPTURE or len(self._graphs) == _MAX_GRAPHS:
            self._runs[size] += 1
            return False
        assert self._capture is not None, "checked by the caller"
        static = _StaticPass(self.model, self.cache, size)
        # The warm-up of a capture writes to the cache, so it must compute this pass.
        static.fill(decode, prompts)
        if self._hidden is None or len(self._hidden) < static.rows:
            # Graphs captured before keep the tensor that they were captured with.
            like = self.model.embedding
            self._hidden = torch.empty(
                static.rows, self.model.width, dtype=like.dtype, device=like.device
            )
        hidden = self._hidden[: static.rows]
        try:
            replay = self._capture(lambda: hidden.copy_(static.compute()), static.lengths)
        except RuntimeError as fault:
            self._capture = None
            reason = str(fault).partition("\n")[0]
            warnings.warn(
                f"a pass with prompts could not be captured: {reason}; prompts are launched "
                "operator by operator",
                stacklevel=2,
            )
            return False
        self._graphs[size] = (static, replay)
        return True
