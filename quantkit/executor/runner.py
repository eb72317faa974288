"""The passes of a step: token ids of sequences in, logits of the tokens to choose out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.cache import PagedCache
from quantkit.executor.context import Chunk, DecodeContext, PrefillContext
from quantkit.executor.sequence import Sequence


class Runner:
    """A model with its cache on one device."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.model, self.cache, self.device = model, cache, cache.device

    def prefill(self, parts: list[tuple[Sequence, int]]) -> tuple[list[Sequence], Tensor]:
        """Compute the next tokens of prompts. Returns the sequences whose prompt is complete and their logits float32 [n, V]."""
        token_ids, chunks, complete, last_rows, rows = [], [], [], [], 0
        for sequence, length in parts:
            start = sequence.num_cached
            token_ids += sequence.token_ids[start : start + length]
            chunks.append(Chunk(start, length, torch.tensor(sequence.blocks, device=self.device)))
            rows += length
            sequence.num_cached += length
            if sequence.num_new == 0:
                complete.append(sequence)
                last_rows.append(rows - 1)
        hidden = self.model(torch.tensor(token_ids, device=self.device), PrefillContext(self.cache, chunks))
        return complete, self.model.logits(hidden[torch.tensor(last_rows, dtype=torch.int64, device=self.device)])

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """Compute the newest token of each sequence. Returns logits float32 [B, V]."""
        size = self.cache.block_size
        positions = np.array([sequence.num_cached for sequence in sequences])
        tables = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks)] = sequence.blocks
            sequence.num_cached += 1
        slots = tables[np.arange(len(sequences)), positions // size] * size + positions % size
        token_ids = torch.tensor([sequence.token_ids[-1] for sequence in sequences], device=self.device)
        positions_t, tables_t, slots_t = (torch.from_numpy(array).to(self.device) for array in (positions, tables, slots))
        return self.model.logits(self.model(token_ids, DecodeContext(self.cache, positions_t, tables_t, slots_t)))
