"""A double of torch.npu's streams and graphs, over CPU tensors.

A graph records the operators that the step calls, with the very tensors; a replay calls them again and leaves results where the first ones
lay, as a device does. So whatever a captured step may not do shows: waiting for a value, depending on one, or making a tensor of host data.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from quantkit_kernels.torch_npu import rules
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "nonzero", "lift_fresh"}
"""Operators that read a value, size a result by values, or bring a tensor from the host."""


class Refuse(TorchFunctionMode):
    """Tensor.tolist reads a CPU tensor without an operator. Rules that read counts on a CPU alone may, and operators' own code."""

    def __init__(self, record: "Record") -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = sys._getframe(1).f_globals["__name__"]
        if function is Tensor.tolist and not self.record.inside and asks != rules.__name__:
            raise RuntimeError("tolist: operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class Record(TorchDispatchMode):
    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self.launches, self.inside = launches, False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.partition("::")[2]
        if name in WAITS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.inside = True
        results = operator(*args, **(kwargs or {}))
        self.inside = False
        self.launches.append((operator, args, kwargs or {}, results))
        return results


class NPUGraph:
    def __init__(self) -> None:
        self.launches: list[Any] = []

    def replay(self) -> None:
        for operator, args, kwargs, results in self.launches:
            for old, new in zip(tree_leaves(results), tree_leaves(operator(*args, **kwargs))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def graph(target: NPUGraph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    with Record(target.launches) as record, Refuse(record):
        yield


class Stream:
    def wait_stream(self, other: object) -> None: ...


def driver() -> SimpleNamespace:
    """What torch.npu is to the executor."""
    return SimpleNamespace(
        NPUGraph=NPUGraph,
        Stream=Stream,
        current_stream=Stream,
        graph=graph,
        graph_pool_handle=object,
        stream=lambda stream: contextlib.nullcontext(),
    )
