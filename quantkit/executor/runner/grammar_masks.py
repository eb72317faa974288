"""Which tokens grammars let come, written while the step runs: a thread fills bits on the host, the
device takes them in one copy."""

import os
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.executor.scheduler.sequence import Sequence

_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))

Asked = list[tuple[Sequence, int]]
"""Sequences with a grammar, and the first of their rows among the masks."""


class Masks:
    """Of the steps of one engine. Nothing is started before the first request with a grammar
    comes."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._begun: Future[tuple[Asked, np.ndarray | None]] | None = None

    def begin(self, counts: Items[tuple[Sequence, int]]) -> None:
        """Write the masks of sequences, with how many rows each, beside what is computed now. What
        was begun before is dropped."""
        self._finished()
        guided = [
            (sequence, count)
            for sequence, count in counts
            if sequence.guide is not None and sequence.fault is None
        ]
        if guided:
            self._worker = self._worker or ThreadPoolExecutor(1, "quantkit-masks")
            self._begun = self._worker.submit(self._written, guided)

    def finished(
        self, device: torch.device, vocab: int
    ) -> tuple[dict[Sequence, int], Tensor | None]:
        """What was begun: the first row of each sequence, and whether each token may come, bool
        [rows, vocab]; None without grammars."""
        asked, bits = self._finished()
        if bits is None:
            return {}, None
        packed = torch.from_numpy(bits)
        if (
            device.type == "cuda"
            # half a megabyte of 32 rows: a copy of what is pageable waits for what was launched
            # before it
        ):
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=device.type == "cuda")
        allowed = (
            packed.unsqueeze(-1)
            .bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=device))
            .bitwise_and_(1)
        )
        return dict(asked), allowed.flatten(1)[:, :vocab].bool()

    def _finished(self) -> tuple[Asked, np.ndarray | None]:
        begun, self._begun = self._begun, None
        return ([], None) if begun is None else begun.result()

    def _written(self, guided: list[tuple[Sequence, int]]) -> tuple[Asked, np.ndarray | None]:
        asked: Asked = []
        rows = 0
        for sequence, count in guided:
            asked.append((sequence, rows))
            rows += count
        guides = [sequence.guide for sequence, _ in asked if sequence.guide is not None]
        self._executor = self._executor or guides[0].new_executor(_THREADS)
        bits = np.full((rows, max(guide.words for guide in guides)), -1, dtype=np.int32)
        for sequence, first in asked:
            assert sequence.guide is not None, sequence.index
            try:
                sequence.guide.write(self._executor, bits, first, sequence.drafts)
            except Exception as fault:  # this request's, which is ended for it
                sequence.fault = fault
        return asked, bits
