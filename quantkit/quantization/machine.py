"""The speed of a machine, and of this one: measured in less than two seconds."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantkit.common.devices import find_device
from quantkit.quant.tensor_cores import sample_products

_SIZE = 1024
_MEASURED_S, _DISK_BYTES = 0.25, 16 * 2**20


@dataclass(frozen=True)
class Rate:
    """A machine's rates: operations a second in large matrix products of calibration, values a
    second of a rounding in float32, bytes a second to disk."""

    name: str
    flops: float
    values: float
    disk: float

    @property
    def assumption(self) -> str:
        return (
            f"{self.flops / 1e9:,.0f} GFLOP/s in large products, "
            f"{self.values / 1e9:,.1f} G values/s rounded, {self.disk / 1e9:.1f} GB/s disk"
        )


H200 = Rate("h200", 5e13, 2e11, 1.5e9)
"""benchmarks/r1_shape.py."""


def measure_rate(folder: Path, device: torch.device | None = None) -> Rate:
    """This machine's, by its best device or the given one. folder: where the output goes; a file is
    written there and removed, if that is possible."""
    device = find_device("auto") if device is None else device
    flops, values = _computing(device.type)
    return Rate(device.type, flops, values, _disk(folder))


@cache
def _computing(device: str) -> tuple[float, float]:
    """Operations and values a second. On a CPU one thread is measured, in its own time, for all:
    other jobs on this machine do not count, nor does waiting for each other; and in BF16 where
    calibration is."""
    threads = torch.get_num_threads()
    if device != "cpu":
        return _speeds(device, time.perf_counter)
    torch.set_num_threads(1)
    try:
        with sample_products():
            flops, values = _speeds(device, time.thread_time)
    finally:
        torch.set_num_threads(threads)
    return flops * threads, values * threads


def _speeds(device: str, clock: Callable[[], float]) -> tuple[float, float]:
    a = torch.randn(_SIZE, _SIZE, device=device)
    scale = a.abs().amax(1, keepdim=True) / 7
    return (
        2.0 * _SIZE**3 * _per_second(lambda: a @ a, clock),
        a.numel() * _per_second(lambda: (a / scale).round_().clamp_(-8, 7).mul_(scale), clock),
    )


def _per_second(compute: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    compute()[0, 0].item()  # which waits for the device
    start, begun, count = time.perf_counter(), clock(), 0
    while time.perf_counter() - start < _MEASURED_S or not count:
        compute()[0, 0].item()
        count += 1
    return count / max(clock() - begun, 1e-6)


@cache
def _disk(folder: Path) -> float:
    """Bytes a second written to the disk, the file's flush included."""
    where = folder if os.access(folder, os.W_OK) else None
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=where) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - start)
