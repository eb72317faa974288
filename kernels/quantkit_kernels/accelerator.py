"""What drives a device: torch.cuda, or torch.npu, which has the same streams, events and graphs."""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch

GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""What the class of a captured graph is called, by device type. Elsewhere nothing is captured."""


_MADE: WeakSet[Any] = WeakSet()
"""Graphs that are alive."""


def module(device: torch.device) -> ModuleType | None:
    """Streams, events and graphs of `device`; None for a CPU, which has none."""
    return torch.get_device_module(device) if device.type in GRAPHS else None


def capture(driver: ModuleType, graph: Any, **options: Any) -> AbstractContextManager[Any]:
    """`driver.graph(...)`. An NPU's graph remembers the operators that take lengths from the host,
    for `replay`."""
    if is_npu(graph):
        options["auto_dispatch_capture"] = True
    context: AbstractContextManager[Any] = driver.graph(graph, **options)
    return context


def replay(driver: ModuleType, graph: Any, lengths: list[int]) -> None:
    """Launch a captured graph. lengths: of the rows' sequences now. A CUDA graph finds them on the
    device; an NPU's waits at every attention until it has received the lengths, which overlaps with
    what is computed before."""
    if is_npu(graph):
        # what the graph received for its last replay must have been read
        driver.current_stream().synchronize()
    graph.replay()
    if is_npu(graph):
        graph.update(cpu_update_input=[{"actual_seq_kvlen": list(lengths)}])


def is_npu(graph: Any) -> bool:
    return type(graph).__name__ == GRAPHS["npu"]


def new_graph(driver: ModuleType) -> Any:
    """An empty graph, for `driver.graph(...)` to capture into."""
    name = next(name for name in GRAPHS.values() if hasattr(driver, name))
    graph = getattr(driver, name)()
    _MADE.add(graph)
    return graph


def let_go_of_graphs() -> None:
    """No graph of this process can be replayed any more. A communicator whose collectives graphs
    hold does not end before they do."""
    for graph in list(_MADE):
        graph.reset()
    _MADE.clear()
