"""The passes of a step: tokens of sequences in, hidden states out."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.cache import PagedCache
from quantkit.executor.context import Chunk, DecodeContext, PrefillContext
from quantkit.executor.sequence import Sequence


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a pass, from position `start` on."""

    sequence: Sequence
    start: int
    length: int


@dataclass(frozen=True)
class Pass:
    """What a pass computed: `hidden` [T, H] of the spans' tokens, one span after the other.

    rows int64 [R]: the tokens whose successors are to be chosen; counts: which sequence they belong to, and how many each has.
    """

    spans: list[Span]
    hidden: Tensor
    context: PrefillContext | DecodeContext
    rows: Tensor
    counts: list[tuple[Sequence, int]]


class Runner:
    """A model with its cache on one device."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.model, self.cache, self.device = model, cache, cache.device

    def prefill(self, parts: list[tuple[Sequence, int]]) -> Pass:
        """The next tokens of prompts; successors are chosen where a prompt is complete."""
        spans = [Span(sequence, sequence.num_cached, length) for sequence, length in parts]
        token_ids: list[int] = []
        rows, counts = [], []
        for sequence, start, length in spans:
            token_ids += sequence.token_ids[start : start + length]
            sequence.num_cached += length
            if sequence.num_new == 0:
                rows.append(len(token_ids) - 1)
                counts.append((sequence, 1))
        chunks = [Chunk(start, length, torch.tensor(sequence.blocks, device=self.device)) for sequence, start, length in spans]
        context = PrefillContext(self.cache, chunks)
        return Pass(spans, self._forward(token_ids, context), context, torch.tensor(rows, dtype=torch.int64, device=self.device), counts)

    def decode(self, sequences: list[Sequence]) -> Pass:
        """The newest token of each sequence, and the drafted ones after it: successors of all are chosen."""
        spans = [Span(sequence, sequence.num_cached, 1 + len(sequence.drafts)) for sequence in sequences]
        token_ids = [token for sequence in sequences for token in (sequence.token_ids[-1], *sequence.drafts)]
        context = self.decode_context([(sequence, start + i) for sequence, start, length in spans for i in range(length)])
        rows = torch.arange(len(token_ids), device=self.device)
        return Pass(spans, self._forward(token_ids, context), context, rows, [(span.sequence, span.length) for span in spans])

    def decode_context(self, tokens: list[tuple[Sequence, int]]) -> DecodeContext:
        """For one row per (sequence, position)."""
        size = self.cache.block_size
        positions = np.array([position for _, position in tokens])
        tables = np.zeros((len(tokens), max(len(sequence.blocks) for sequence, _ in tokens)), dtype=np.int64)
        for row, (sequence, _) in enumerate(tokens):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        slots = tables[np.arange(len(tokens)), positions // size] * size + positions % size
        moved = [torch.from_numpy(array).to(self.device) for array in (positions, tables, slots)]
        return DecodeContext(self.cache, moved[0], moved[1], moved[2])

    def _forward(self, token_ids: list[int], context: PrefillContext | DecodeContext) -> Tensor:
        hidden: Tensor = self.model(torch.tensor(token_ids, device=self.device), context)
        return hidden
