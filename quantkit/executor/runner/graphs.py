"""Captured decode steps: a CUDA (or NPU) graph per size is captured once and replayed, so that a
token costs one launch instead of thousands.

A graph reads and writes the memory it was captured with. So a step is a function of static buffers:
token ids, positions, slots and block tables lie in one tensor that a single small copy fills, and
the results stay where the step left them. Rows and block tables are padded to powers of two, so
that few graphs serve every batch; each is captured when it is first needed. Without graphs the same
step runs eagerly, which is how it is tested on a CPU.

On a CPU, where Python between operators would take as long as they do (few rows, and one rank),
decode steps are recorded and repeated (`quantkit_kernels.recording`): a step is recorded when its
size comes for the second time, and repeated from the third on. Rows are not padded, for a row of
padding costs as much as one that counts; tables are, so that a sequence meets few widths.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from quantkit_kernels import accelerator, likeliest
from quantkit_kernels.cpu.repeat import join
from quantkit_kernels.recording import Recording, record
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import DecodeContext
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult
from quantkit.executor.sampling.params import Batch, sample
from quantkit.executor.weights.prefetch import stop_prefetching
from quantkit.models.ngram_table import NgramRows

MIN_TABLE_WIDTH = 16
"""Blocks of the narrowest table: contexts below 1024 tokens share their graphs."""


class Forward(Protocol):
    """What a decode step computes: a model, or an MTP layer, which also reads hidden states."""

    def __call__(self, *inputs: Any) -> Tensor:
        """Inputs as `DecodeBuffers.inputs`, the context, and optionally the rows that are wanted
        -> hidden [B, H]."""

    def logits(self, hidden: Tensor) -> Tensor: ...


class TokenModel(Forward, Protocol):
    """A model from token ids on. width: values of a token that it returns; ngram_rows: what it
    reads of tables."""

    embedding: Tensor

    @property
    def width(self) -> int: ...

    @property
    def ngram_rows(self) -> tuple[NgramRows, ...]: ...


Step = Callable[[], StepResult]
Computed = TypeVar("Computed")


class Capture(Protocol):
    """Captures a step: what it returns repeats the step on the same memory, with the sequence
    lengths that the list then holds."""

    def __call__(
        self, step: Callable[[], Computed], lengths: list[int], /
    ) -> Callable[[], Computed]: ...


def compute(
    model: Forward,
    inputs: tuple[Tensor, ...],
    context: DecodeContext,
    result_rows: Tensor | None = None,
) -> StepResult:
    """One decode step. inputs: token_ids [B], for an MTP layer also hidden [B, H].
    result_rows int64 [K]: the rows whose results are needed, all by default."""
    hidden = (
        model(*inputs, context) if result_rows is None else model(*inputs, context, result_rows)
    )
    logits = model.logits(hidden)
    return StepResult(hidden, logits, likeliest(logits))


class DecodeBuffers:
    """Static inputs of `rows` rows with tables of `width` blocks, in one tensor. Rows that are not
    filled belong to block 0.

    hidden [B, H]: for a model that also reads hidden states, any of their width and dtype.
    num_results: number of rows whose results are needed, 0 for all. ngram_rows: what the model
    reads of tables, which the host reads when it fills the rows.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        device: torch.device,
        hidden: Tensor | None = None,
        *,
        num_results: int = 0,
        ngram_rows: tuple[NgramRows, ...] = (),
    ) -> None:
        self._host = np.zeros(rows * 4 + -(-rows * width // 2) + num_results, dtype=np.int64)
        self._device = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.slots, self.states = (
            self._device[: 4 * rows].view(4, rows).unbind()
        )
        self.tables = self._device[4 * rows :].view(torch.int32)[: rows * width].view(rows, width)
        self.result_rows = self._device[-num_results:] if num_results else None
        self._rows, self._width = rows, width
        self.lengths = [1] * rows
        """Tokens that each row sees, on the host: always the same list, filled anew."""
        self.inputs: tuple[Tensor, ...] = (self.token_ids,)
        if hidden is not None:
            self.inputs += (hidden.new_zeros(rows, hidden.shape[1]),)
        self._ngrams = {
            one: torch.zeros(rows, one.width, dtype=one.dtype, device=device) for one in ngram_rows
        }

    def fill(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        positions: DevicePositions | None = None,
        result_rows: Tensor | None = None,
    ) -> None:
        """inputs, positions: values that are already on the device, in place of those of `rows`.
        result_rows int64 [K]: the rows whose results are needed; the buffer's further places have
        row 0.

        The host may write the next values as soon as this returns: CUDA copies from pageable memory
        before it returns, and waits for nothing that was launched before.
        """
        self._host.fill(0)
        columns = self._host[: 4 * self._rows].reshape(4, self._rows)
        for column, values in zip(
            columns, (rows.token_ids, rows.positions, rows.slots, rows.states)
        ):
            column[: len(values)] = values
        tables = (
            self._host[4 * self._rows :]
            .view(np.int32)[: self._rows * self._width]
            .reshape(self._rows, self._width)
        )
        tables[: rows.tables.shape[0], : rows.tables.shape[1]] = rows.tables
        self._device.copy_(torch.from_numpy(self._host), non_blocking=self._device.is_cuda)
        self.lengths[:] = (columns[1] + 1).tolist()
        pairs = [*zip(self.inputs, inputs), *zip((self.positions, self.slots), positions or ())]
        pairs += [(held, one(rows.recent(one.size))) for one, held in self._ngrams.items()]
        if self.result_rows is not None and result_rows is not None:
            pairs.append((self.result_rows, result_rows))
        _copy_all(pairs)

    def context(self, cache: PagedCache) -> DecodeContext:
        return DecodeContext(
            cache,
            self.positions,
            self.tables,
            self.slots,
            self.lengths,
            self.states,
            self._ngrams.__getitem__,
        )


class DecodeSteps:
    """Decode steps of a model or an MTP layer over a cache, captured for each size; the next run of
    a size overwrites its results. capture: None to launch them eagerly; why_eager: the reason.
    ngram_rows: as of `DecodeBuffers`."""

    def __init__(
        self,
        model: Forward,
        cache: PagedCache,
        capture: Capture | None,
        why_eager: str = "",
        ngram_rows: tuple[NgramRows, ...] = (),
    ) -> None:
        self.model, self.cache, self._capture = model, cache, capture
        self._ngram_rows = ngram_rows
        self._steps: dict[tuple[int, int, int], tuple[DecodeBuffers, Step]] = {}
        """By rows, blocks of their tables, and number of results, 0 for all."""
        self.failure = why_eager
        """Why steps run eagerly, empty where they are captured; also set by a failed capture."""

    def run(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        positions: DevicePositions | None = None,
        result_rows: Tensor | None = None,
    ) -> StepResult:
        """Results of all rows, or of `result_rows`. inputs, positions, result_rows: as of
        `DecodeBuffers.fill`."""
        if self._capture is None:
            given = inputs or (torch.from_numpy(rows.token_ids).to(self.cache.device),)
            return compute(self.model, given, rows.context(self.cache, positions), result_rows)
        _, step = self.prepare(rows, *inputs, positions=positions, result_rows=result_rows)
        result, count = step(), len(rows.token_ids if result_rows is None else result_rows)
        return StepResult(*(part[:count] for part in result))

    def has(self, rows: int, width: int) -> bool:
        """Whether a step of this size with all results was prepared before: the same on every rank,
        even where one of them could not capture it."""
        return (*_size(rows, width), 0) in self._steps

    def num_results(self, rows: int, width: int) -> int | None:
        """Number of results of the step of this size that was prepared before, 0 for all; of
        several the fewest, None without any."""
        found = [size[2] for size in self._steps if size[:2] == _size(rows, width)]
        return min(found, key=lambda count: count or rows, default=None)

    def prepare(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        positions: DevicePositions | None = None,
        result_rows: Tensor | None = None,
    ) -> tuple[DecodeBuffers, Step]:
        """The step of this size with its buffers filled, captured if it is new."""
        size = (
            *_size(*rows.tables.shape),
            0 if result_rows is None else power_of_two(len(result_rows)),
        )
        if size not in self._steps:
            buffers = DecodeBuffers(
                *size[:2],
                self.cache.device,
                *inputs[1:],
                num_results=size[2],
                ngram_rows=self._ngram_rows,
            )
            # The warm-up of a capture writes to the cache, so it must compute this pass.
            buffers.fill(rows, *inputs, positions=positions, result_rows=result_rows)
            self._steps[size] = (buffers, self._captured(buffers))
        buffers, step = self._steps[size]
        buffers.fill(rows, *inputs, positions=positions, result_rows=result_rows)
        return buffers, step

    def _captured(self, buffers: DecodeBuffers) -> Step:
        def step() -> StepResult:
            return compute(
                self.model, buffers.inputs, buffers.context(self.cache), buffers.result_rows
            )

        if self.failure or self._capture is None:
            return step
        try:
            return self._capture(step, buffers.lengths)
        except RuntimeError as fault:
            failure = f"the decode step could not be captured: {_reason(fault)}"
        if stop_prefetching():
            try:
                captured = self._capture(step, buffers.lengths)
            except RuntimeError as fault:
                failure += f"; without prefetching weights: {_reason(fault)}"
            else:
                warnings.warn(
                    f"{failure}; it could be without prefetching weights, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return captured
        self.failure = failure
        warnings.warn(
            f"{failure}; it is launched operator by operator, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return step


class _SamplingBuffers:
    """Static inputs of `rows` rows; rows that are not filled are sampled without effect."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.logits = torch.zeros(rows, vocab, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        floats = torch.ones(3, rows, device=device)
        self.batch = Batch(*floats, *torch.ones(2, rows, dtype=torch.int64, device=device))
        self._filled: Batch | None = None
        """Whose values `batch` has."""

    def fill(self, logits: Tensor, batch: Batch, positions: Tensor) -> None:
        count = len(positions)
        self.logits[:count].copy_(logits)
        self.positions[:count].copy_(positions)
        if batch is not self._filled:
            for own, given in zip(self.batch, batch):
                own[:count].copy_(given)
            self._filled = batch

    def sample(self) -> Tensor:
        return sample(self.logits, self.batch, self.positions)


class SamplingGraph:
    """`sampling.params.sample` as a graph per number of rows, in place of about forty launches.
    capture: None to launch them."""

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._sizes: dict[tuple[int, int], tuple[_SamplingBuffers, Callable[[], Tensor]]] = {}

    def __call__(self, logits: Tensor, batch: Batch, positions: Tensor) -> Tensor:
        if self._capture is None:
            return sample(logits, batch, positions)
        size = (power_of_two(len(logits)), logits.shape[1])
        if size not in self._sizes:
            buffers = _SamplingBuffers(*size, logits.device)
            buffers.fill(logits, batch, positions)
            try:
                self._sizes[size] = (buffers, self._capture(buffers.sample, []))
            except RuntimeError as fault:
                self._capture = None
                warnings.warn(
                    f"sampling could not be captured: {_reason(fault)}; it is "
                    "launched operator by operator",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return sample(logits, batch, positions)
        buffers, step = self._sizes[size]
        buffers.fill(logits, batch, positions)
        # The next call of this size writes to the same place.
        return step()[: len(logits)].clone()


class DeviceCapture:
    """Captures graphs of a CUDA device or an NPU that share one memory pool: each may overwrite
    what another keeps there, except for what it returned. All are captured on one stream, because
    freed memory of a pool is only reused on its own stream."""

    def __init__(self, device: torch.device) -> None:
        driver = accelerator.module(device)
        assert driver is not None, device
        self._driver = driver
        self._pool, self._stream = driver.graph_pool_handle(), driver.Stream()

    def __call__(
        self, step: Callable[[], Computed], lengths: list[int], /
    ) -> Callable[[], Computed]:
        driver, stream = self._driver, self._stream
        current = driver.current_stream()
        stream.wait_stream(current)
        with driver.stream(stream):
            # Compiles, sizes workspaces and sets up libraries, none of which may happen in a
            # capture.
            step()
        current.wait_stream(stream)
        graph = accelerator.new_graph(driver)
        with accelerator.capture(
            driver, graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            result = step()

        def replay() -> Computed:
            accelerator.replay(driver, graph, lengths)
            return result

        return replay


def why_eager(device: torch.device) -> str:
    """Why decode steps on this device are not captured; empty where they are."""
    return (
        ""
        if device.type in accelerator.GRAPHS
        else f"graphs are captured on CUDA and NPUs, not on {device.type}"
    )


def _reason(fault: RuntimeError) -> str:
    """The first exception of a failed capture; `fault` may only say that the capture ended."""
    first: BaseException = fault
    while first.__context__ is not None:
        first = first.__context__
    return str(first).partition("\n")[0]


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the start of the first; all int64 ones in one launch."""
    integers: list[tuple[Tensor, Tensor]] = []
    for buffer, given in pairs:
        part = buffer[: len(given)]
        if part.is_cuda and part.dtype == given.dtype == torch.int64:
            integers.append((part, given))
        else:
            part.copy_(given)
    if integers:
        torch._foreach_copy_([part for part, _ in integers], [given for _, given in integers])


def _size(rows: int, width: int) -> tuple[int, int]:
    """Rows and table width of the captured step that holds them."""
    return power_of_two(rows), max(power_of_two(width), MIN_TABLE_WIDTH)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not less than count."""
    return 1 << (count - 1).bit_length()


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
