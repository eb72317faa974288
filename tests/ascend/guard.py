"""Operands between pages that may not be touched: a kernel that reads or writes outside them ends,
and it is said."""

import contextlib
import ctypes
import faulthandler
import mmap
import os

import torch
from torch import Tensor

NO_RESERVE = 0x4000


class OutsideOperands(AssertionError):
    """A kernel touched memory that was not given to it, or broke a rule that ends its process."""


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_IN_PLACE = 1 << 30
"""Bytes from which an operand is used where it lies: tests of large offsets make it sparse."""


@contextlib.contextmanager
def guarded(tensor):
    """The address of a copy of a tensor that ends at a page which may not be touched; one lies
    before it too. What a child process writes there is the tensor's when the context ends."""
    assert tensor.is_contiguous(), "kernels read runs"
    size = tensor.numel() * tensor.element_size()
    if size >= _IN_PLACE:
        yield tensor.data_ptr()
        return
    page = mmap.PAGESIZE
    whole = -(-size // page) * page
    start = _LIBC.mmap(
        None,
        whole + 2 * page,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | mmap.MAP_ANONYMOUS,
        -1,
        0,
    )
    assert start not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    try:
        for guard in (start, start + page + whole):
            assert _LIBC.mprotect(guard, page, 0) == 0, os.strerror(ctypes.get_errno())
        ctypes.memset(start + page, 0xFF, whole)  # NaN in every float, before the operand
        at = start + page + whole - size
        ctypes.memmove(at, tensor.data_ptr(), size)
        yield at
        if ctypes.string_at(start + page, whole - size).strip(b"\xff"):
            raise OutsideOperands("written before the operand")
        ctypes.memmove(tensor.data_ptr(), at, size)
    finally:
        _LIBC.munmap(start, whole + 2 * page)


def run_guarded(kernel, operands):
    """kernel(operands), tensors given as addresses, in a process of its own; OutsideOperands says
    that it ended badly.

    What it writes to the tensors is theirs afterwards.
    """
    with contextlib.ExitStack() as stack:
        placed = [
            stack.enter_context(guarded(one)) if isinstance(one, Tensor) else one
            for one in operands
        ]
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # the parent says it
            kernel(placed)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OutsideOperands(
                f"the kernel touched memory outside its operands, or broke a rule: signal {-code}"
            )


def sparse(count, one):
    """Room for `count` of a tensor's first entry, zeros that cost no memory until they are
    written."""
    size = count * one[0].numel()
    memory = mmap.mmap(
        -1, size * one.element_size(), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NO_RESERVE
    )
    return torch.frombuffer(memory, dtype=one.dtype, count=size).view(count, *one.shape[1:])
