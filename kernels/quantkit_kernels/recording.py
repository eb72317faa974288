"""A step of operators, recorded once and repeated on the same memory without the Python between them.

Operators of few tokens are short: on a model of 135 million weights Python takes longer between
them than they take. A recording keeps what a step called, C++ with its addresses and sizes and
torch's operators with their tensors, and every tensor that these made. Whoever repeats it has
written the next inputs to the tensors that the step was recorded with, and finds the results where
they were. What a step did in Python alone is not repeated: a step that reads a number on the host
cannot be recorded, but for `whole` parts of it, which are called again as they are.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FROM_HOST = ("tolist", "numpy", "__array__", "tensor", "as_tensor", "from_numpy", "frombuffer")
"""Functions of torch and its tensors that read the host and dispatch no operator that shows it."""
_FROM_NUMBERS = {"aten::lift_fresh", "aten::lift_fresh_copy"}
"""Operators on tensors that were made of Python's numbers."""
_EMPTY = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_COPIES = {"aten::_to_copy", "aten::clone"}
Call = Callable[[], object]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A function of C++ by ctypes, with addresses, sizes and, last, a number."""

    function: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.arguments)


class _Active(threading.local):
    recording: "Recording | None" = None


_ACTIVE = _Active()


class Recording:
    """refused: why the step cannot be repeated; empty where it can. nbytes: of the tensors it
    keeps."""

    def __init__(self) -> None:
        self.refused = ""
        self.nbytes = 0
        self.calls: list[Call] = []
        self._kept: list[object] = []

    def repeat(self) -> None:
        """Valid where `refused` is empty, with as many threads as when it was recorded."""
        for call in self.calls:
            call()

    def add(self, call: Call, *kept: object) -> None:
        self.calls.append(call)
        self._kept.extend(kept)

    def keep(self, made: Iterable[Tensor]) -> None:
        """Results that the step may give to C++ by their addresses."""
        for one in made:
            self._kept.append(one)
            self.nbytes += one.nbytes if one.layout == torch.strided else 0

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason


def record(step: Callable[[], Result]) -> tuple[Result, Recording]:
    """Computes the step, in this thread, and records it."""
    assert _ACTIVE.recording is None, "a recording inside a recording"
    recording = _ACTIVE.recording = Recording()
    try:
        with _HostReads(recording), _Operators(recording):
            return step(), recording
    finally:
        _ACTIVE.recording = None


def recorded(function: Callable[..., None]) -> Callable[..., None]:
    """A function of C++, that a recording notes when it is called."""

    def call(*arguments: Any) -> None:
        function(*arguments)
        recording = _ACTIVE.recording
        if recording is not None:
            recording.add(CompiledCall(function, arguments))

    return call


def whole(function: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """A function of tensors which a recording calls again as it is: it may read them on the
    host."""

    @functools.wraps(function)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Tensor:
        recording, _ACTIVE.recording = _ACTIVE.recording, None
        try:
            out = function(*arguments, **named)
        finally:
            _ACTIVE.recording = recording
        if recording is not None:
            recording.keep((out,))
            recording.add(lambda: out.copy_(function(*arguments, **named)), arguments, named)
        return out

    return run


class _HostReads(TorchFunctionMode):
    """Refuses what reads tensors on the host, or makes them there, past the dispatcher."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FROM_HOST and _ACTIVE.recording is not None:
            self._recording.refuse(f"{name} reads or makes a tensor on the host")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Notes torch's operators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by Dynamo, whose import took the first request a second."""
        return False

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if _ACTIVE.recording is None:
            return func(*args, **named)
        if func._can_decompose():  # inference mode leaves these whole
            with self:
                return func.decompose(*args, **named)
        out = func(*args, **named)
        recording, name = self._recording, func._schema.name
        made = out if isinstance(out, tuple | list) else (out,)
        if name in _FROM_NUMBERS or _depends_on_values(func, args):
            recording.refuse(f"{name} depends on values")
        elif not all(isinstance(one, Tensor) for one in made):
            recording.refuse(f"{name} gives the host a value")
        elif func._schema.is_mutable:
            recording.add(functools.partial(func, *args, **named))
        elif not _is_view(made, args):
            recording.keep(made)
            if name not in _EMPTY:
                recording.add(_again(func, args, named, out))
        return out


def _is_view(made: Iterable[Tensor], args: tuple[Any, ...]) -> bool:
    """Of an operator's first argument, whose memory is kept."""
    of = args[0] if args else None
    return isinstance(of, Tensor) and all(
        one.layout == of.layout == torch.strided
        and one.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
        for one in made
    )


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether what it returns is not made of tensors alone, or has a shape that their values
    decide."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.nondeterministic_seeded in tags:
        return True
    if func._schema.name == "aten::index":  # by a mask alone
        return any(one is not None and one.dtype == torch.bool for one in args[1])
    return torch.Tag.dynamic_output_shape in tags


def _again(func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Call:
    """The operator again, into what it returned."""
    if func._schema.name in _COPIES:
        return functools.partial(out.copy_, args[0])
    if isinstance(out, Tensor):
        return lambda: out.copy_(func(*args, **named))

    def call() -> None:
        for one, found in zip(out, func(*args, **named)):
            one.copy_(found)

    return call
