"""Recordings whose C++ is called by C++ (repeat.cpp), all that follows one another at once."""

import ctypes
import platform
import struct
from functools import partial
from itertools import groupby

import torch

from quantkit_kernels.cpu.build import once
from quantkit_kernels.recording import Call, CompiledCall, Recording

_NUMBERS = 20
"""Of a call, as repeat.cpp has them."""


def join(recording: Recording) -> None:
    """Where this processor's convention of calls is known and a compiler is there; else calls stay
    Python's."""
    loaded = once("repeat")
    if loaded is None or platform.machine() not in ("x86_64", "aarch64"):
        return
    joined: list[Call] = []
    for compiled, calls in groupby(recording.calls, lambda one: isinstance(one, CompiledCall)):
        if not compiled:
            joined += calls
            continue
        table = torch.tensor([_row(one) for one in calls if isinstance(one, CompiledCall)])
        recording.keep((table,))
        joined.append(partial(loaded.qk_repeat, table.data_ptr(), len(table)))
    recording.calls = joined


def _row(call: CompiledCall) -> list[int]:
    address = ctypes.cast(call.function, ctypes.c_void_p).value
    assert address is not None, call.function
    numbers, fraction = list(call.arguments), 0
    if call.function.argtypes[-1] is ctypes.c_float:
        (fraction,) = struct.unpack("I", struct.pack("f", numbers.pop()))
    numbers = [int(one or 0) for one in numbers]
    assert len(numbers) <= _NUMBERS, call
    return [address, *numbers, *[0] * (_NUMBERS - len(numbers)), fraction]
