"""The decode step as a graph: captured once per size, then replayed, so that a token costs one
launch and not thousands.

A graph reads and writes the memory it was captured with. So a step here is a function of static
buffers: token ids, positions, slots and block tables lie in one tensor that a single small copy
fills, and the results lie where the step left them. Rows are padded to a power of two, block tables
likewise, so that few graphs serve every batch; each is captured when it is first needed. Without a
capture the same step is computed eagerly, which is how it is tested where there are no graphs.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from quantkit_kernels import accelerator, likeliest
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.runner.attention_context import DecodeContext
from quantkit.executor.runner.decode_batch import DecodeRows, DevicePositions, StepResult
from quantkit.executor.sampling.params import Batch, sample
from quantkit.executor.weights.prefetch import stop_prefetching

MIN_TABLE_WIDTH = 16
"""Blocks of the narrowest table: contexts below 1024 tokens share their graphs."""


class Forward(Protocol):
    """What a decode step computes: a model, or an MTP layer, which reads hidden states too."""

    def __call__(self, *inputs: Any) -> Tensor:
        """Inputs as `DecodeBuffers.inputs` has them, the context, and where not all rows are
        wanted, which -> hidden [B, H]."""

    def logits(self, hidden: Tensor) -> Tensor: ...


class TokenModel(Forward, Protocol):
    """A model from token ids on, which is told the rows whose hidden states are wanted, too. width:
    values of a token that it returns."""

    embedding: Tensor

    @property
    def width(self) -> int: ...


Step = Callable[[], StepResult]
Computed = TypeVar("Computed")


class Capture(Protocol):
    """Makes a step cheaper to repeat: what it returns has the same effect on the same memory, with
    what the list of lengths then holds."""

    def __call__(
        self, step: Callable[[], Computed], lengths: list[int], /
    ) -> Callable[[], Computed]: ...


def compute(
    model: Forward, inputs: tuple[Tensor, ...], context: DecodeContext, kept: Tensor | None = None
) -> StepResult:
    """One decode step on any buffers; greedy sampling is part of it. inputs: token_ids [B], for an
    MTP layer also hidden [B, H]. kept int64 [K]: the rows whose results are wanted, all by
    default."""
    hidden = model(*inputs, context) if kept is None else model(*inputs, context, kept)
    logits = model.logits(hidden)
    return StepResult(hidden, logits, likeliest(logits))


class DecodeBuffers:
    """Inputs of `rows` rows with tables of `width` blocks, side by side in one tensor. Rows that
    are not filled belong to block 0.

    hidden [B, H]: where the model reads hidden states too, something of their width and dtype.
    kept: rows whose results are wanted, 0 for all.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        device: torch.device,
        hidden: Tensor | None = None,
        *,
        kept: int = 0,
    ) -> None:
        self._host = np.zeros(rows * 4 + -(-rows * width // 2) + kept, dtype=np.int64)
        self._device = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.slots, self.states = (
            self._device[: 4 * rows].view(4, rows).unbind()
        )
        self.tables = self._device[4 * rows :].view(torch.int32)[: rows * width].view(rows, width)
        self.kept = self._device[-kept:] if kept else None
        self._rows, self._width = rows, width
        self.lengths = [1] * rows
        """Of the rows, on the host: the same list always, filled anew."""
        self.inputs = (
            (self.token_ids,)
            if hidden is None
            else (self.token_ids, hidden.new_zeros(rows, hidden.shape[1]))
        )
        """What the model reads before the context."""

    def fill(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        places: DevicePositions | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """inputs: those of `self.inputs` that the device holds already, in place of what `rows`
        says; places: as well. kept int64 [K]: the rows whose results are wanted; of more than that
        the first row's are made.

        The host may write the next values as soon as this returns: CUDA copies them from pageable
        memory before it returns, and waits for nothing that was launched before.
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
        known = [*zip(self.inputs, inputs), *zip((self.positions, self.slots), places or ())]
        if self.kept is not None and kept is not None:
            known.append((self.kept, kept))
        _copy_all(known)

    def context(self, cache: PagedCache) -> DecodeContext:
        return DecodeContext(
            cache, self.positions, self.tables, self.slots, self.lengths, self.states
        )


class EagerSteps:
    """Decode steps launched operator by operator. failure: why they are not captured."""

    def __init__(self, model: Forward, cache: PagedCache, failure: str) -> None:
        self.model, self.cache, self.failure = model, cache, failure

    def has(self, rows: int, width: int) -> bool:
        """As `DecodeSteps.has`."""
        return False

    def kept(self, rows: int, width: int) -> int | None:
        """As `DecodeSteps.kept`."""
        return None

    def run(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        places: DevicePositions | None = None,
        kept: Tensor | None = None,
    ) -> StepResult:
        """As `DecodeSteps.run`."""
        given = inputs or (torch.from_numpy(rows.token_ids).to(self.cache.device),)
        return compute(self.model, given, rows.context(self.cache, places), kept)


class DecodeSteps:
    """Captured decode steps of a model or an MTP layer over a cache, one per size. The next run of
    a size overwrites its results."""

    def __init__(self, model: Forward, cache: PagedCache, capture: Capture) -> None:
        self.model, self.cache, self._capture = model, cache, capture
        self._steps: dict[tuple[int, int, int], tuple[DecodeBuffers, Step]] = {}
        """By rows, blocks of their tables, and rows whose results are wanted, 0 for all."""
        self.failure = ""
        """Why steps are computed eagerly from now on, where a capture failed."""

    def run(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        places: DevicePositions | None = None,
        kept: Tensor | None = None,
    ) -> StepResult:
        """The pass. inputs, places, kept: what the device holds already, as `DecodeBuffers.fill`
        takes it. The result is of the rows kept."""
        _, step = self.filled(rows, *inputs, places=places, kept=kept)
        result, count = step(), len(rows.token_ids if kept is None else kept)
        return StepResult(*(part[:count] for part in result))

    def has(self, rows: int, width: int) -> bool:
        """Whether a step for so many rows, with tables of `width` blocks, was there before: on
        every rank alike, also where one of them could not capture it. Of one whose results are all
        wanted."""
        return (*_size(rows, width), 0) in self._steps

    def kept(self, rows: int, width: int) -> int | None:
        """How many results are wanted of a step for so many rows that was there before, 0 for all;
        of several the fewest, None where none was."""
        found = [size[2] for size in self._steps if size[:2] == _size(rows, width)]
        return min(found, key=lambda kept: kept or rows, default=None)

    def filled(
        self,
        rows: DecodeRows,
        *inputs: Tensor,
        places: DevicePositions | None = None,
        kept: Tensor | None = None,
    ) -> tuple[DecodeBuffers, Step]:
        """The step for so many rows with tables so wide, ready to be computed."""
        size = (*_size(*rows.tables.shape), 0 if kept is None else power_of_two(len(kept)))
        if size not in self._steps:
            buffers = DecodeBuffers(*size[:2], self.cache.device, *inputs[1:], kept=size[2])
            # What the warm-up of a capture computes is written to the cache: it must be this pass,
            # not a made-up one.
            buffers.fill(rows, *inputs, places=places, kept=kept)
            self._steps[size] = (buffers, self._captured(buffers))
        buffers, step = self._steps[size]
        buffers.fill(rows, *inputs, places=places, kept=kept)
        return buffers, step

    def _captured(self, buffers: DecodeBuffers) -> Step:
        def step() -> StepResult:
            return compute(self.model, buffers.inputs, buffers.context(self.cache), buffers.kept)

        if self.failure:
            return step
        try:
            return self._capture(step, buffers.lengths)
        except RuntimeError as fault:
            told = f"the decode step could not be captured: {_reason(fault)}"
        if stop_prefetching():
            try:
                captured = self._capture(step, buffers.lengths)
            except RuntimeError as fault:
                told += f"; without prefetching weights: {_reason(fault)}"
            else:
                warnings.warn(
                    f"{told}; it could be without prefetching weights, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return captured
        self.failure = told
        warnings.warn(
            f"{told}; it is launched operator by operator, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return step


class DeviceCapture:
    """Captures graphs of a device (CUDA's, or an NPU's) that share one memory pool: each may write
    over what another keeps there, but for what it returned. All are captured on one stream, for a
    pool's memory that was freed serves its own stream alone."""

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
            # compiles, sizes workspaces and sets up libraries: none of which may happen in a
            # capture
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
    """What ended a capture; `fault` may only say that it had ended."""
    first: BaseException = fault
    while first.__context__ is not None:
        first = first.__context__
    return str(first).partition("\n")[0]


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair, from its beginning on, the second: the integers in one
    launch."""
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
    """Rows of a captured step, and how wide its tables are."""
    return power_of_two(rows), max(power_of_two(width), MIN_TABLE_WIDTH)


def power_of_two(count: int) -> int:
    """The smallest power of two that is no less than count."""
    return 1 << (count - 1).bit_length()


class _Buffers:
    """Of `rows` rows; rows that are not filled are greedy over whatever lies there."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.logits = torch.zeros(rows, vocab, device=device)
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)
        floats, integers = (
            torch.ones(3, rows, device=device),
            torch.ones(2, rows, dtype=torch.int64, device=device),
        )
        self.batch = Batch(*floats, *integers)
        self.filled: Batch | None = None
        """Whose values `batch` has."""

    def fill(self, logits: Tensor, batch: Batch, places: Tensor) -> None:
        count = len(places)
        self.logits[:count].copy_(logits)
        self.places[:count].copy_(places)
        if batch is not self.filled:
            for own, given in zip(self.batch, batch):
                own[:count].copy_(given)
            self.filled = batch


class SamplingGraph:
    """As `sampling.sample`. capture: None where draws are launched one by one."""

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._sizes: dict[tuple[int, int], tuple[_Buffers, Callable[[], Tensor]]] = {}

    def __call__(self, logits: Tensor, batch: Batch, places: Tensor) -> Tensor:
        if self._capture is None:
            return sample(logits, batch, places)
        size = (power_of_two(len(logits)), logits.shape[1])
        if size not in self._sizes:
            buffers = _Buffers(*size, logits.device)
            buffers.fill(logits, batch, places)
            try:
                self._sizes[size] = (
                    buffers,
                    self._capture(
                        lambda: sample(buffers.logits, buffers.batch, buffers.places), []
                    ),
                )
            except RuntimeError as fault:
                self._capture = None
                told = str(fault).partition("\n")[0]
                warnings.warn(
                    f"drawing tokens could not be captured: {told}; it is launched one by one",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return sample(logits, batch, places)
        buffers, step = self._sizes[size]
        buffers.fill(logits, batch, places)
        # The next draw of this size writes to the same place.
        return step()[: len(logits)].clone()
