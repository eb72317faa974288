"""What drives a device: torch.cuda, or torch.npu, which has the same streams, events and graphs."""

from types import ModuleType
from typing import Any

import torch

GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""What the class of a captured graph is called, by device type. Elsewhere nothing is captured."""


def module(device: torch.device) -> ModuleType | None:
    """Streams, events and graphs of `device`; None for a CPU, which has none."""
    return torch.get_device_module(device) if device.type in GRAPHS else None


def new_graph(driver: ModuleType) -> Any:
    """An empty graph, for `driver.graph(...)` to capture into."""
    name = next(name for name in GRAPHS.values() if hasattr(driver, name))
    return getattr(driver, name)()
