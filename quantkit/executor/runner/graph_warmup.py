"""Graph warm-up: capture before the first request what will be needed anyway.

A step size is captured when it first comes, which takes as long as some tens of steps: the first
request that makes a batch of 2, 4, 8, ... would wait for it, and so would all running requests. A
server captures ahead, for a bounded time and with memory to spare: decode steps of every number of
rows with the shortest tables, prefills of one request, then decode steps with longer contexts, and
prefills of several requests.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from quantkit.common.devices import free_bytes
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import MIN_TABLE_WIDTH, power_of_two
from quantkit.executor.runner.prefill_graphs import PrefillChunk, captured_sizes
from quantkit.executor.runner.runner import Runner

MAX_SECONDS = 6.0
"""No capture begins later."""
_PROMPTS_PER_PASS = (3, 15)
"""At most so many: fewer make the same pass, and more are mostly too long to be captured."""
MIN_FREE_BYTES = 4 << 30
"""Device memory below which no capture begins. Graphs share most of their memory, which the largest
size determines: 0.8 GB for Qwen3-8B with 64 concurrent requests."""


@torch.inference_mode()
def warm_up_graphs(runner: Runner, parallel: Parallel, rows: int, tokens: int) -> int:
    """Capture steps of up to `rows` rows and `tokens` tokens of context. Returns the number of
    passes.

    All ranks call it at the same time, before any request: it overwrites the cache. Does nothing
    where steps are not captured, with data-parallel ranks, or on an NPU, where it is untested.
    """
    if runner.why_eager or runner.experts.size > 1 or runner.device.type == "npu":
        return 0
    start_time, done = time.perf_counter(), 0
    for compute in _passes(runner, rows, tokens):
        fits = (
            time.perf_counter() - start_time < MAX_SECONDS
            and free_bytes(runner.device) > MIN_FREE_BYTES
        )
        if not parallel.minimum(int(fits)):  # all ranks stop together
            break
        compute()
        done += 1
    if runner.device.type != "cpu":
        torch.get_device_module(runner.device).synchronize(runner.device)
    return done


def _passes(runner: Runner, rows: int, tokens: int) -> Iterator[Callable[[], object]]:
    """What to capture, most urgent first."""
    size = runner.cache.block_size
    room = (runner.cache.num_blocks - 1) * size
    widest = power_of_two(-(-min(tokens, room) // size))
    powers = [1 << power for power in range(power_of_two(rows).bit_length())]
    for count in powers:
        yield partial(capture_decode, runner, count, MIN_TABLE_WIDTH)
    longest = min(runner.prefill_runner.max_tokens, tokens, room)
    if runner.prefill_runner.can_capture:
        for length in captured_sizes(longest):
            yield partial(_prefill, runner, length, 1)
    width = 2 * MIN_TABLE_WIDTH
    while width <= widest:
        for count in powers:
            yield partial(capture_decode, runner, count, width)
        width *= 2
    if runner.prefill_runner.can_capture:
        for count in _PROMPTS_PER_PASS if rows > 1 else ():
            for length in captured_sizes(longest):
                yield partial(_prefill, runner, length, count)


def capture_decode(runner: Runner, rows: int, width: int) -> None:
    """A decode step of rows that each write the first token of block 1 and see nothing else, with
    tables of `width` blocks."""
    zeros = np.zeros(rows, dtype=np.int64)
    tables = np.zeros((rows, width), dtype=np.int32)
    tables[:, 0] = 1
    runner.steps.run(DecodeRows(zeros, zeros, zeros + runner.cache.block_size, tables, zeros))


def _prefill(runner: Runner, length: int, count: int) -> None:
    """Prefill `count` prompts of `length` tokens in all. They share blocks, as the result is not
    used."""
    blocks = list(range(1, -(-length // runner.cache.block_size) + 1))
    ends = [length * number // count for number in range(count + 1)]
    runner.prefill_runner.capture(
        None, [PrefillChunk([0] * (end - start), 0, blocks) for start, end in pairwise(ends)]
    )
