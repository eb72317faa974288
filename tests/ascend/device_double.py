"""A double of torch.npu's streams and graphs, over CPU tensors.

A graph records the operators that the step calls, with the very tensors; a replay calls them again
and leaves results where the first ones lay, as a device does. So whatever a captured step may not
do shows: waiting for a value, depending on one, or making a tensor of host data. What an operator
took from the host stays as it was captured, but for the operators that torch_npu's own graphs let
be told anew: a replay waits at these until `update` was called.
"""

import contextlib
import sys
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import ClassVar

from quantkit_kernels.torch_npu import rules
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "nonzero", "lift_fresh"}
"""Operators that read a value, size a result by values, or bring a tensor from the host."""
TOLD = {"npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen")}
"""Operators that torch_npu 2.13's graphs tell anew, and what of: its own handlers, which
tests/ascend/schemas holds against this."""


CAPTURING = []
"""The graph that is being captured, if any."""


class Warm(TorchDispatchMode):
    """On a stream of its own operators are compiled, and sized their workspaces: what a capture may
    not do. Their names."""

    NAMES: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.NAMES.add(_name(operator))
        return operator(*args, **(kwargs or {}))


class Refuse(TorchFunctionMode):
    """Tensor.tolist reads a CPU tensor without an operator. Rules that read counts on a CPU alone
    may, and operators' own code."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def __torch_function__(self, function, types, args=(), kwargs=None):
        asks = sys._getframe(1).f_globals["__name__"]
        if function is Tensor.tolist and not self.record.inside and asks != rules.__name__:
            raise RuntimeError("tolist: operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class Record(TorchDispatchMode):
    def __init__(self, launches):
        super().__init__()
        self.launches, self.inside = launches, False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = _name(operator)
        if name in WAITS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        if name.startswith("npu_") and name not in Warm.NAMES:
            raise RuntimeError(f"{name}: called the first time while a stream is capturing")
        self.inside = True
        results = operator(*args, **(kwargs or {}))
        self.inside = False
        taken = {
            key: copy(value) if isinstance(value, list) else value
            for key, value in (kwargs or {}).items()
        }
        self.launches.append((operator, args, taken, results))
        return results


class NPUGraph:
    def __init__(self):
        self.launches = []
        self.auto_dispatch_capture = False
        self.waiting = False

    def replay(self):
        assert not self.waiting, "the last replay still waits for its lengths"
        assert self not in TOLD_ANEW, "the last replay may still have to read what it was told"
        self.waiting = self.auto_dispatch_capture and any(
            _name(operator) in TOLD for operator, *_ in self.launches
        )
        if not self.waiting:
            self._run()

    def update(self, cpu_update_input):
        assert self.auto_dispatch_capture, "the graph was not captured for updates"
        (told,) = (
            cpu_update_input  # one for all, as the executor's layers attend to the same lengths
        )
        for operator, _, kwargs, _ in self.launches:
            kwargs.update({key: told[key] for key in TOLD.get(_name(operator), ()) if key in told})
        self.told = told, deepcopy(told)
        TOLD_ANEW.append(self)
        if self.waiting:
            self.waiting = False
            self._run()

    def reset(self):
        self.launches.clear()

    def _run(self):
        for operator, args, kwargs, results in self.launches:
            for old, new in zip(tree_leaves(results), tree_leaves(operator(*args, **kwargs))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _name(operator):
    return str(operator._schema.name).partition("::")[2]


@contextlib.contextmanager
def graph(
    target,
    pool,
    stream,
    capture_error_mode,
    auto_dispatch_capture=False,
):
    assert capture_error_mode == "thread_local"
    target.auto_dispatch_capture = auto_dispatch_capture
    target.launches.clear()
    assert all(one.waited_for for one in WORKED), "captured while a stream still works"
    CAPTURING.append(target)
    WORKED.clear()
    try:
        with Record(target.launches) as record, Refuse(record):
            yield
        assert all(one.waited_for for one in WORKED), "a stream has work that nobody waits for"
    finally:
        CAPTURING.remove(target)


class Stream:
    """Work begins on one behind what it was told to wait for; and a capture may not end with work
    that nothing on the first stream waits for."""

    def __init__(self):
        self.waits = self.waited_for = False

    def wait_stream(self, other):
        self.waits = other.waited_for = True

    def synchronize(self):
        for graph in TOLD_ANEW:
            told, then = graph.told
            assert told == then, "what was told changed before it was read"
        TOLD_ANEW.clear()


TOLD_ANEW = []
"""Graphs whose lengths were told, and whose replay may still be to read them."""
WORKED = []
BEGUN = []
"""Streams that work is launched on now, in the place of the first."""


@contextlib.contextmanager
def on(stream):
    assert stream.waits, "its work begins before what it reads is there"
    stream.waits = stream.waited_for = False
    BEGUN.append(stream)
    try:
        with Warm():
            yield
        WORKED.append(stream)
    finally:
        BEGUN.remove(stream)


def driver():
    """What torch.npu is to the executor."""
    Warm.NAMES.clear()
    return SimpleNamespace(
        NPUGraph=NPUGraph,
        Stream=Stream,
        current_stream=Stream,
        graph=graph,
        graph_pool_handle=object,
        stream=on,
    )
