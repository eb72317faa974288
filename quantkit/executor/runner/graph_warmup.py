"""Graphs captured before the first request, so that nobody waits for a capture that can be
foreseen.

A size of a step is captured when it first comes, and that takes as long as some tens of steps:
whoever comes first as one of 2, 4, 8, ... users would wait for it, and so would everybody who is
being answered. A server captures ahead what it will need in any case, for a bounded
time and with memory to spare: decode steps of every number of rows at the shortest tables, prompts
of one user, then decode steps of longer contexts, and prompts that come together.
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

MOST_S = 6.0
"""No capture begins later."""
_TOGETHER = (3, 15)
"""Prompts of a pass, at most: with fewer it is the same pass, and with more mostly too long to be
captured."""
LEAST_FREE = 4 << 30
"""Bytes of the device's memory below which none begins. Graphs share most of their memory, which
the largest size determines: of Qwen3-8B with 64 users 0.8 GB."""


@torch.inference_mode()
def warm_up_graphs(runner: Runner, parallel: Parallel, rows: int, tokens: int) -> int:
    """Capture steps of up to `rows` rows and `tokens` tokens of context; how many passes that was.

    All ranks at the same time, before any request: what is in the cache is overwritten. Nothing is
    done where steps are not captured, where ranks have requests of their own, or on an NPU, where
    it was never tried.
    """
    if runner.why_eager or runner.experts.size > 1 or runner.device.type == "npu":
        return 0
    began, done = time.perf_counter(), 0
    for compute in _passes(runner, rows, tokens):
        fits = time.perf_counter() - began < MOST_S and free_bytes(runner.device) > LEAST_FREE
        if not parallel.minimum(int(fits)):  # all ranks stop together
            break
        compute()
        done += 1
    if runner.device.type != "cpu":
        torch.get_device_module(runner.device).synchronize(runner.device)
    return done


def _passes(runner: Runner, rows: int, tokens: int) -> Iterator[Callable[[], object]]:
    """What is captured, in the order of its use."""
    size = runner.cache.block_size
    room = (runner.cache.num_blocks - 1) * size
    widest = power_of_two(-(-min(tokens, room) // size))
    powers = [1 << power for power in range(power_of_two(rows).bit_length())]
    for count in powers:
        yield partial(capture_decode, runner, count, MIN_TABLE_WIDTH)
    longest = min(runner.prefill_runner.most_tokens, tokens, room)
    if runner.prefill_runner.captures:
        for length in captured_sizes(longest):
            yield partial(_prompts, runner, length, 1)
    width = 2 * MIN_TABLE_WIDTH
    while width <= widest:
        for count in powers:
            yield partial(capture_decode, runner, count, width)
        width *= 2
    if runner.prefill_runner.captures:
        for count in _TOGETHER if rows > 1 else ():
            for length in captured_sizes(longest):
                yield partial(_prompts, runner, length, count)


def capture_decode(runner: Runner, rows: int, width: int) -> None:
    """A step of rows that each write the first token of a block and see nothing else, with tables
    of `width` blocks."""
    zeros = np.zeros(rows, dtype=np.int64)
    tables = np.zeros((rows, width), dtype=np.int32)
    tables[:, 0] = 1
    runner.steps.run(DecodeRows(zeros, zeros, zeros + runner.cache.block_size, tables, zeros))


def _prompts(runner: Runner, length: int, count: int) -> None:
    """Of `count` users, `length` tokens in all. They share blocks, for nobody reads what is
    written."""
    blocks = list(range(1, -(-length // runner.cache.block_size) + 1))
    ends = [length * number // count for number in range(count + 1)]
    runner.prefill_runner.capture(
        None, [PrefillChunk([0] * (end - start), 0, blocks) for start, end in pairwise(ends)]
    )
