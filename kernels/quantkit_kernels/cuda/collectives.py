"""Collectives of small tensors over the GPUs of one host, by memory that the ranks open to each
other (exchange.cu).

Every rank makes a `Peers` at the same time and then the same calls in the same order, eagerly or in
a captured graph. The ranks' processes meet through `exchange`, so nothing here knows of a process
group.
"""

import ctypes
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import ExchangeNorm
from quantkit_kernels.cuda.build import library, why_no_library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of
from quantkit_kernels.pairs import UnsummedPairs

MAX_SUM_BYTES = 1 << 21
"""146 tokens of 7168 values. At 128 tokens on four H200 a sum takes 19 us, NCCL's 31; a longer one
needs larger inboxes."""

MAX_BYTES = 1 << 21
"""Of one rank's part in a call: 32 tokens' logits over 129280 tokens on 4 ranks."""

MAX_GATHERS = 8
"""Calls that gather one tensor, as many rows at a time as a call takes: 256 tokens' logits on 4
ranks, 128 on 2. On two H200 64 tokens' take 31 us in four calls, NCCL's gather 71."""

MAX_RANKS = 8
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_SIDE_BY_SIDE, _OWN_PART = 3, 4
_WORD = 16
_EIGHT = 8
"""Values of 16 bits in a word."""

MAX_NORM_WIDTH = 1 << 16
"""Columns of a row that a cluster of eight blocks norms."""

MAX_TOKENS_OF_PAIRS = 16

Exchange = Callable[[Any], list[Any]]
"""One JSON value of each rank, in the order of ranks; every rank calls it."""


class Peers:
    """This rank's inbox (4 * size MiB, kept until the process ends) and the others' as this process
    sees them.

    RuntimeError, on every rank alike, where one of them cannot take part: its text says which and
    why.
    """

    def __init__(self, rank: int, size: int, device: torch.device, exchange: Exchange) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._agree(exchange, lambda: unusable(size, device))
        hosts = set(exchange(_host()))
        if len(hosts) > 1:
            raise RuntimeError(f"the ranks are on {len(hosts)} hosts")
        with torch.cuda.device(device):
            self._state = torch.zeros(2, dtype=torch.int32, device=device)
            self._agree(exchange, self._make_own)
            handles = [bytes.fromhex(handle) for handle in exchange(self._handle.hex())]
            self._agree(exchange, lambda: self._open_others(handles))

    def adds(self, x: Tensor) -> bool:
        """Whether `all_reduce` takes x."""
        return self._moves(x) and x.nbytes <= MAX_SUM_BYTES and x.nbytes % _WORD == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in float32 in the order of ranks and rounded once: the same
        bits on every rank."""
        return self._exchange(
            x, torch.empty_like(x, memory_format=torch.contiguous_format), _DTYPES[x.dtype], 1
        )

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `add_rms_norm` takes x and the norm's gain."""
        alike = x.dim() == 2 and x.dtype == weight.dtype and x.dtype in DTYPES
        return alike and self.adds(x) and x.shape[1] % _EIGHT == 0 and x.shape[1] <= MAX_NORM_WIDTH

    def norms_pairs(self, pairs: UnsummedPairs, weight: Tensor) -> bool:
        """Whether `add_rms_norm` adds up pairs too. With more tokens a launch of its own is as
        fast: it has more blocks."""
        few = 0 < pairs.tokens <= MAX_TOKENS_OF_PAIRS and pairs.weighed.device == self.device
        width = pairs.weighed.shape[1]
        return (
            few
            and pairs.dtype == weight.dtype
            and pairs.dtype in DTYPES
            and width % _EIGHT == 0
            and width <= MAX_NORM_WIDTH
        )

    def add_rms_norm(
        self, x: Tensor | UnsummedPairs, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`quantkit_kernels.add_rms_norm` of `all_reduce(x)`, in one launch. x, residual [T, H];
        weight [H]."""
        residual, weight = residual.contiguous(), weight.contiguous()
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        (rows, width), pointers = (
            residual.shape,
            (one.data_ptr() for one in (residual, weight, normed, total)),
        )
        given: tuple[int | None, int | None]
        if isinstance(x, Tensor):
            x = x.contiguous()
            given, counters, top_k = (x.data_ptr(), None), None, 0
        else:
            given, counters, top_k = (
                (None, x.weighed.data_ptr()),
                x.counters,
                len(x.weighed) // rows,
            )
        cleared = (None, 0) if counters is None else (counters.data_ptr(), counters.numel())
        params = ExchangeNorm(
            *given, *pointers, *cleared, rows, width, top_k, self.rank, MAX_BYTES // _WORD, eps
        )
        ours = (self.size, self._inboxes, self._state.data_ptr(), stream_of(residual.device))
        checked(library().qk_exchange_norm(ctypes.byref(params), DTYPES[residual.dtype], *ours))
        return normed, total

    def scatters(self, x: Tensor) -> bool:
        """Whether `scatter_sum` takes x."""
        return (
            self._moves(x)
            and x.nbytes <= MAX_BYTES * self.size
            and x.nbytes % (_WORD * self.size) == 0
        )

    def scatter_sum(self, x: Tensor) -> Tensor:
        """x [size * T, n] of each rank -> this rank's [T, n] of the sum, added in float32 in the
        order of ranks and rounded once."""
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return self._exchange(x, out, _OWN_PART + _DTYPES[x.dtype], 1)

    def gathers(self, x: Tensor) -> bool:
        """Whether `all_gather` takes x."""
        row = x.shape[-1] * x.element_size()
        return (
            self._moves(x)
            and row % _WORD == 0
            and row <= MAX_BYTES
            and x.nbytes <= MAX_GATHERS * (MAX_BYTES // row) * row
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., size * n], ranks in order."""
        rows, row = x.reshape(-1, x.shape[-1]), x.shape[-1] * x.element_size()
        out = x.new_empty(len(rows), self.size * x.shape[-1])
        most = MAX_BYTES // row
        for own, gathered in zip(rows.split(most), out.split(most)):
            self._exchange(own, gathered, _SIDE_BY_SIDE, row // _WORD)
        return out.view(*x.shape[:-1], -1)

    def _moves(self, x: Tensor) -> bool:
        return x.device == self.device and x.dtype in _DTYPES and x.numel() > 0

    def _exchange(self, x: Tensor, out: Tensor, kind: int, row_words: int) -> Tensor:
        x = x.contiguous()
        words = x.nbytes // _WORD // (self.size if kind >= _OWN_PART else 1)
        checked(
            library().qk_peer_exchange(
                *(x.data_ptr(), out.data_ptr(), self._inboxes, self._state.data_ptr()),
                *(
                    kind,
                    self.size,
                    self.rank,
                    words,
                    row_words,
                    MAX_BYTES // _WORD,
                    stream_of(x.device),
                ),
            )
        )
        return out

    def _make_own(self) -> str | None:
        pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        fault = _fault(
            library().qk_inbox_make(2 * self.size * MAX_BYTES, ctypes.byref(pointer), handle)
        )
        self._own, self._handle = pointer.value, handle.raw
        return fault and f"no memory for the other GPUs to write to: {fault}"

    def _open_others(self, handles: list[bytes]) -> str | None:
        pointers = [self._own] * self.size
        for rank, handle in enumerate(handles):
            if rank == self.rank:
                continue
            pointer = ctypes.c_void_p()
            fault = _fault(library().qk_inbox_open(handle, ctypes.byref(pointer)))
            if fault or pointer.value is None:
                return f"the memory of rank {rank} cannot be opened: {fault}"
            pointers[rank] = pointer.value
        self._inboxes = (ctypes.c_void_p * self.size)(*pointers)
        return None

    def _agree(self, exchange: Exchange, attempt: Callable[[], str | None]) -> None:
        """All ranks continue, or none does. attempt: returns why it failed."""
        try:
            failure = attempt()
        except (RuntimeError, OSError) as fault:  # the library could not be built or loaded
            failure = str(fault)[:500]
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(failure)) if text]
        if failures:
            raise RuntimeError(failures[0])


def unusable(size: int, device: torch.device) -> str | None:
    """Why this process cannot take part, None where nothing speaks against it."""
    if device.type != "cuda":
        return f"runs on CUDA, not on {device.type}"
    if not 2 <= size <= MAX_RANKS:
        return f"for 2 to {MAX_RANKS} ranks, not {size}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"written for compute capability 9.0 (Hopper), this device has {major}.{minor}"
    return why_no_library(f"{major}{minor}")


def _fault(error: int) -> str | None:
    return library().qk_error_text(error).decode() if error else None


def _host() -> str:
    """Identifies a machine; two of one name differ in their boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname() + file.read().strip()
    except OSError:
        return socket.gethostname()
