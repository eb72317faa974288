"""How long an operator takes: the time of a call, and the bandwidth it should be held against."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPLAYS = 15
_CPU_SECONDS = 0.15
_CACHE_BYTES = {"cuda": 60 << 20, "cpu": 32 << 20}


def copies_beyond_cache(nbytes: int, device: torch.device) -> int:
    """How many copies of a weight to rotate among so that none is still cached when its turn comes."""
    return max(1, -(-3 * _CACHE_BYTES.get(device.type, 0) // max(nbytes, 1)))


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of one of `calls`, run in turn. On CUDA they are captured into one graph and replayed, so launches cost what they
    cost in a decode step; on the CPU the clock is the wall's and the best round counts."""
    if device.type == "cuda":
        return _graph_seconds(calls)
    for call in calls[:2]:
        call()
    best, spent = float("inf"), 0.0
    while spent < _CPU_SECONDS:
        start = time.perf_counter()
        for call in calls:
            call()
        elapsed = time.perf_counter() - start
        best, spent = min(best, elapsed), spent + elapsed
    return best / len(calls)


def _graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Enough calls that the replay runs well past its own launch.
    rounds = -(-20 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times) / (rounds * len(calls))


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory far larger than any cache: the ceiling of operators that stream weights."""
    words = torch.ones((4 << 30 if device.type == "cuda" else 256 << 20) // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            words.sum()
            stop.record()
            stop.synchronize()
            best = min(best, start.elapsed_time(stop) / 1e3)
        else:
            began = time.perf_counter()
            words.sum()
            best = min(best, time.perf_counter() - began)
    return words.numel() * 4 / best
