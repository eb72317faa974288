"""How long an operator takes: the time of a call, and the bandwidth it should be held against."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from quantkit_kernels import accelerator

_REPLAYS = 15
_RUN_SECONDS = 2e-3
_CPU_SECONDS = 0.15
_CACHE_BYTES = {"cuda": 60 << 20, "npu": 192 << 20}
"""The last cache before memory: an H200's L2, a 910B's L2."""


def copies_beyond_cache(nbytes: int, device: torch.device) -> int:
    """How many copies of a weight to rotate among so that none is still cached when its turn
    comes."""
    cache = _cpu_cache_bytes() if device.type == "cpu" else _CACHE_BYTES.get(device.type, 0)
    return max(1, -(-3 * cache // max(nbytes, 1)))


def _cpu_cache_bytes() -> int:
    """The L3 as Linux reports it, of which a machine may have 300 MiB; 32 MiB where it does not."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of one of `calls`, run in turn.

    On an accelerator they are captured into one graph and replayed, so that launches cost what they
    cost in a decode step; calls that cannot be captured are launched one by one, with a warning. On
    the CPU the clock is the wall's and the best round counts.
    """
    return seconds_in_turns([calls], device)[0]


def seconds_in_turns(
    sides: Sequence[Sequence[Callable[[], object]]], device: torch.device
) -> list[float]:
    """`seconds_per_call` of several to be compared, which take turns, a round of each at a time: a
    card that has grown warm is slower by up to 5 %, and so is slower for all of them."""
    driver = accelerator.module(device)
    if driver is not None:
        rounds = [_captured(calls, driver) for calls in sides]
        turns = [[_elapsed(run, driver) for run, _ in rounds] for _ in range(_REPLAYS)]
        return [
            statistics.median(times) / count
            for times, (_, count) in zip(zip(*turns, strict=True), rounds, strict=True)
        ]
    for calls in sides:
        for call in calls[:2]:
            call()
    best, spent = [float("inf")] * len(sides), 0.0
    while spent < _CPU_SECONDS * len(sides):
        for side, calls in enumerate(sides):
            start = time.perf_counter()
            for call in calls:
                call()
            elapsed = time.perf_counter() - start
            best[side], spent = min(best[side], elapsed / len(calls)), spent + elapsed
    return best


def _captured(
    calls: Sequence[Callable[[], object]], driver: ModuleType
) -> tuple[Callable[[], object], int]:
    """What runs all of `calls` once or several times, and how many calls that is."""

    def once() -> None:
        for call in calls:
            call()

    def run() -> None:
        for _ in range(rounds):
            once()

    stream = driver.Stream()
    stream.wait_stream(driver.current_stream())
    with driver.stream(stream):
        once()
        rounds = _rounds(len(calls), _elapsed(once, driver))
    driver.synchronize()
    graph = accelerator.new_graph(driver)
    repeated: Callable[[], object] = graph.replay
    try:
        with driver.graph(graph, stream=stream):
            run()
    except RuntimeError as fault:
        driver.synchronize()
        warnings.warn(
            f"timed launch by launch, not captured: {str(fault).partition(chr(10))[0]}",
            RuntimeWarning,
            stacklevel=4,
        )
        repeated = run
    return repeated, rounds * len(calls)


def _rounds(calls: int, seconds: float) -> int:
    """How often all of so many calls, which take `seconds`, are in one run: it lasts well past its
    own launch, and has about 20 at most."""
    return max(1, min(-(-20 // calls), math.ceil(_RUN_SECONDS / max(seconds, 1e-6))))


def _elapsed(run: Callable[[], object], driver: ModuleType) -> float:
    """Seconds between two events of the device, one before `run` and one after."""
    start, stop = driver.Event(enable_timing=True), driver.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory far larger than any cache: the ceiling of operators that
    stream weights."""
    driver = accelerator.module(device)
    words = torch.ones(
        (256 << 20 if driver is None else 4 << 30) // 4, dtype=torch.float32, device=device
    )
    if driver is not None:
        best = min(_elapsed(words.sum, driver) for _ in range(5))
    else:
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            words.sum()
            best = min(best, time.perf_counter() - began)
    return words.numel() * 4 / best
