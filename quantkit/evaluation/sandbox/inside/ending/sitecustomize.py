"""Imported by the interpreter of a program before its first line: sets the stacks of threads, and
writes down an exception that ends the program after its traceback. A printed traceback and
sys.exit(1) are no such end."""

import _thread
import os
import sys
from types import TracebackType

UNCAUGHT = b"\x00uncaught\x00"


def _write_down(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, traceback)
    if os.getpid() != _program:  # a process that it started
        return
    try:
        text = f"{kind.__name__}: {error}"[:1000]
    except BaseException:
        text = kind.__name__
    os.write(2, UNCAUGHT + text.encode(errors="replace"))


_program = os.getpid() if os.environ.pop("QUANTKIT_PROGRAM", "") else 0
if _program:
    _thread.stack_size(8 << 20)  # the usual one; the main thread's would use up the addresses
    sys.excepthook = _write_down
