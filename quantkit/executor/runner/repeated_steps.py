"""Decode steps on a CPU that are recorded and repeated (`quantkit_kernels.recording`), where Python
between operators would take as long as they do: few rows, and one rank.

A step is recorded when its size comes for the second time, and repeated from the third on. Rows are
not padded, for a row of padding costs as much as one that counts; tables are, so that a sequence
meets few widths.
"""

import torch
from quantkit_kernels.cpu.repeat import join
from quantkit_kernels.recording import Recording, record

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.decode_batch import DecodeRows, StepResult
from quantkit.executor.runner.graphs import DecodeBuffers, TokenModel, compute, power_of_two

MOST_ROWS = 16
"""Of more rows operators take several times as long as Python between them."""
MOST_BYTES = 64 << 20
"""Of what all recordings keep: every tensor of their steps."""

Size = tuple[int, int, int]
"""Rows, blocks of their tables, and threads."""


class RepeatedSteps:
    """Of a model over a cache."""

    def __init__(self, model: TokenModel, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self._seen: set[Size] = set()
        self._steps: dict[Size, tuple[DecodeBuffers, StepResult, Recording]] = {}
        self._most_rows = MOST_ROWS
        self.failure = ""
        """Why steps cannot be recorded; empty where they can."""

    def run(self, rows: DecodeRows) -> StepResult | None:
        """Results of all rows, valid until the next run of this size; None where the step is to be
        computed as any other."""
        count, width = rows.tables.shape
        size = (count, power_of_two(width), torch.get_num_threads())
        if size in self._steps:
            buffers, result, recording = self._steps[size]
            buffers.fill(rows)
            recording.repeat()
            return result
        if self.failure or count > self._most_rows or size not in self._seen:
            self._seen.add(size)
            return None
        buffers = DecodeBuffers(*size[:2], self.cache.device, ngram_rows=self.model.ngram_rows)
        buffers.fill(rows)

        def step() -> StepResult:
            context = buffers.context(self.cache)
            context.lengths = None  # a backend that needs them on the host must read them
            return compute(self.model, buffers.inputs, context)

        result, recording = record(step)
        self.failure = recording.refused
        if recording.nbytes > MOST_BYTES:
            self._most_rows = count - 1
        elif not self.failure:
            join(recording)
            self._steps[size] = (buffers, result, recording)
            while sum(one.nbytes for _, _, one in self._steps.values()) > MOST_BYTES:
                del self._steps[next(iter(self._steps))]  # the oldest
        return result
