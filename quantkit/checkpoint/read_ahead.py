"""Stored tensors that a device will be given next, read into memory of the host by a thread while
the device computes.

Advice to the system brings a file into its cache; the copy from there alone was a ninth of the time
of a layer of R1's shapes on a GPU.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from quantkit.checkpoint.header import TensorInfo

CAPACITY = 2**30
"""Bytes that may wait: a batch of experts."""


class ReadAhead:
    """Holds the bytes of tensors that were begun until they are taken."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._held: dict[TensorInfo, Future[Tensor]] = {}

    def begin(self, info: TensorInfo, read: Callable[[], Tensor]) -> None:
        """Have `read` give the bytes of a tensor on the thread, if there is room. What it raises is
        raised by whoever takes them."""
        if info in self._held or info.nbytes + sum(one.nbytes for one in self._held) > CAPACITY:
            return
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._held[info] = self._pool.submit(read)

    def take(self, info: TensorInfo) -> Tensor | None:
        """The bytes of a tensor that was begun, once; None of any other."""
        held = self._held.pop(info, None)
        return None if held is None else held.result()
