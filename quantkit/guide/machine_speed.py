"""How fast this machine quantizes: its float32 products and its disk, measured for half a second,
in the terms of quantization.cost."""

import os
import tempfile
import time
from pathlib import Path

import torch

from quantkit.common.devices import find_device
from quantkit.quantization.cost import Rate

_SIZE = 1024
_PRODUCTS_S, _DISK_BYTES = 0.25, 64 * 2**20
EFFICIENCY = 0.45
"""Of what large products alone reach, in a whole run (docs/quantize.md, Time)."""


def measure_pace(folder: Path) -> Rate:
    """folder: where the output goes; a file is written there and removed."""
    device = find_device("auto")
    return Rate(device.type, EFFICIENCY * _products(device), False, _disk(folder))


def _products(device: torch.device) -> float:
    """float32 operations a second in products of _SIZE squared."""
    a = torch.randn(_SIZE, _SIZE, device=device)
    _wait(a @ a)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < _PRODUCTS_S:
        _wait(a @ a)
        count += 1
    return 2.0 * _SIZE**3 * count / elapsed


def _wait(result: torch.Tensor) -> None:
    result[0, 0].item()


def _disk(folder: Path) -> float:
    """Bytes a second written to the disk, the file's flush included."""
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - start)
