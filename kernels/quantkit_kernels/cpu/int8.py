"""Int8 linears by the project's own C++ (int8.cpp), which reads blocks for VNNI, or rows; torch's
operators where those are faster for many tokens, over the same copy of the weight: with AMX, and
without VNNI.

Without a C++ compiler torch's operators do everything.
"""

import ctypes
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.blocks import blocked_matmul
from quantkit_kernels.cpu.build import level, library, why_no_library
from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.weights import Int8, shape

# The most rows that the C++ was timed with next to AMX, and was faster for.
_VNNI_ROWS = 32
_SMALL_PRODUCT = 1 << 22
"""Multiplications of a whole product that the C++ makes in less time than a call of oneDNN takes to
begin: 57 us for 1 x 384 x 256, which takes 15 by the C++ (AVX-512 and VNNI, one thread); on a
processor with AMX 77 and 15."""
# Rows from which expanded float32 blocks beat the C++ (4096 x 4096, AVX2, one core, ms: M=16
# 13/7.3, M=64 31/29, M=128 58/59), and without it `_weight_int8pack_mm` (M=16 12/14, M=64 59/34).
_EXPANDED_ROWS = 128
_INT8PACK_ROWS = 16
_ZERO_POINT = 128  # of the activations' unsigned codes
_BLOCKS = (64, 48, 32, 16)  # rows of the weight


def linear(weight: Int8, dtype: torch.dtype) -> Linear:
    """For this processor. One with VNNI and no AMX multiplies any number of rows faster by the C++
    than by oneDNN (3072 x 1024, one thread,
    us: M=1 121/205, M=8 186/276, M=64 815/946, M=256 3160/3700)."""
    if not qlinear_is_exact():
        return Int8Linear(weight, dtype)
    return (
        VnniInt8Linear(weight, dtype)
        if has_blocks() and not torch.cpu._is_amx_tile_supported()
        else OneDnnInt8Linear(weight, dtype)
    )


class VnniInt8Linear(Linear):
    """Blocks of 16 to 64 rows, of the number that leaves the last block fewest empty ones; a K that
    is no multiple of 4 is made up with zeros."""

    def __init__(self, weight: Int8, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.block = min(_BLOCKS, key=lambda rows: -n % rows)
        self.blocks = in_blocks(weight.codes, self.block)
        self.scale = weight.scale.reshape(-1).clone()
        self.sums = weight.codes.sum(dim=1, dtype=torch.int32)
        self._multiply = library("int8").qk_int8_blocks

    def held(self) -> list[Tensor]:
        return [self.blocks, self.scale, self.sums]

    def addresses(self) -> tuple[int, int, int]:
        """Of what int8.cpp and int8_experts.cpp read."""
        return self.blocks.data_ptr(), self.scale.data_ptr(), self.sums.data_ptr()

    def rows(self, x: Tensor) -> Tensor:
        return _multiply(
            self._multiply, self.addresses(), x, (self.out_features, self.in_features, self.block)
        )


class OneDnnInt8Linear(Linear):
    """`onednn.qlinear_pointwise`: u8 activations around a zero point, integer sums; for few rows
    the C++ over what oneDNN has packed."""

    def __init__(self, weight: Int8, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.packed = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self.scale = weight.scale.reshape(-1).clone()
        self.zero_point = torch.zeros(n, dtype=torch.int64)
        self.sums = weight.codes.sum(dim=1, dtype=torch.int32)
        self._library = _compiled()
        # Blocks are for AVX-512. A processor may have VNNI for AVX2 alone, where oneDNN saturates
        # nothing either.
        self._block = block_rows(self.packed, weight.codes) if has_blocks() else None

    def held(self) -> list[Tensor]:
        return [self.packed, self.scale, self.zero_point, self.sums]

    @property
    def nbytes(self) -> int:
        # The packed weight is opaque to torch: one byte per code.
        return (
            self.in_features * self.out_features
            + self.scale.numel() * 4
            + self.zero_point.numel() * 8
            + self.sums.numel() * 4
        )

    def rows(self, x: Tensor) -> Tensor:
        if self._library is None:
            codes, row_scale = _quantize(x)
        elif self._block is not None and (
            x.shape[0] <= vnni_rows()
            or x.shape[0] * self.in_features * self.out_features <= _SMALL_PRODUCT
        ):
            weight = (
                torch.ops.mkldnn.data_ptr(self.packed),
                self.scale.data_ptr(),
                self.sums.data_ptr(),
            )
            return _multiply(
                self._library.qk_int8_blocks,
                weight,
                x,
                (self.out_features, self.in_features, self._block),
            )
        else:
            codes, row_scale = _quantize_compiled(self._library, x)
        return (
            _qlinear(codes, self.packed, self.scale, self.zero_point).mul_(row_scale).to(self.dtype)
        )


class Int8Linear(Linear):
    """Without VNNI: int8 codes as they are, multiplied by the C++ for few rows and in float32
    blocks for more."""

    def __init__(self, weight: Int8, dtype: torch.dtype) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, torch.device("cpu"), "cpu")
        self.codes = weight.codes.clone()
        self.scale = weight.scale.T.contiguous()
        self._ones = torch.ones(n, dtype=torch.bfloat16)
        # _weight_int8pack_mm reads past the rows of a K that is no multiple of 16, and rounds the
        # sums to bf16.
        self._packed_rows = _INT8PACK_ROWS if dtype == torch.bfloat16 and k % 16 == 0 else 0
        self._library = _compiled()

    def held(self) -> list[Tensor]:
        return [self.codes, self.scale, self._ones]

    def rows(self, x: Tensor) -> Tensor:
        if self._library is not None and x.shape[0] < _EXPANDED_ROWS:
            return _multiply(
                self._library.qk_int8_rows,
                (self.codes.data_ptr(), self.scale.data_ptr()),
                x,
                (self.out_features, self.in_features),
            )
        codes, row_scale = quantize_rows(x)
        if x.shape[0] < self._packed_rows:
            y = torch.ops.aten._weight_int8pack_mm(
                codes.to(torch.bfloat16), self.codes, self._ones
            ).float()
        else:
            y = blocked_matmul(
                codes.float(), self.out_features, lambda start, stop: self.codes[start:stop].float()
            )
        return y.mul_(self.scale).mul_(row_scale).to(self.dtype)


def _compiled() -> ctypes.CDLL | None:
    return library("int8") if why_no_library("int8") is None else None


def has_blocks() -> bool:
    """Whether this processor reads them, by AVX-512 and VNNI, and the C++ can be had."""
    return level() == "VNNI" and _compiled() is not None


def in_blocks(codes: Tensor, rows: int) -> Tensor:
    """int8 [N, K] -> [N/rows, K/4, rows, 4], zeros where N and K are no multiples."""
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % 4, 0, -n % rows))
    return padded.view(-1, rows, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()


def vnni_rows() -> int:
    """Up to how many rows the C++ is faster than oneDNN, which has AMX: more threads multiply
    faster, but wait for the same memory.

    4096 x 4096 on 16 cores, C++ / oneDNN, microseconds: with one thread M=4 1138/1238, M=6
    1330/1221; with four M=8 368/407, M=12 421/414; with 16 M=1 131/314, M=16 163/199, M=32 226/240.
    """
    return min(_VNNI_ROWS, 2 * (torch.get_num_threads() + 1))


def block_rows(packed: Tensor, codes: Tensor) -> int | None:
    """How many rows are a block of codes [N, K] as oneDNN has packed them, if it has in the blocks
    that int8.cpp reads. It chooses by its version, the shape and the number of threads, and pads
    the last block: so its bytes are looked at."""
    n, k = codes.shape
    nbytes = torch.ops.mkldnn._nbytes(packed)
    found = torch.frombuffer(
        (ctypes.c_int8 * nbytes).from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=torch.int8
    )
    for rows in _BLOCKS:
        blocks = -(-n // rows)
        if k % 4 == 0 and blocks * rows * k <= nbytes:
            fours = found[: blocks * rows * k].view(torch.int32).view(blocks, k // 4, rows)
            if torch.equal(
                fours.transpose(1, 2).reshape(-1).view(torch.int8).view(-1, k)[:n], codes
            ):
                return rows
    return None


@functools.cache
def qlinear_is_exact() -> bool:
    """Whether oneDNN sums u8 x s8 products without saturating: it adds pairs in 16 bits on
    processors without VNNI."""
    codes = torch.full((16, 64), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    y = _qlinear(
        torch.full((1, 64), 255, dtype=torch.uint8),
        packed,
        torch.ones(16),
        torch.zeros(16, dtype=torch.int64),
    )
    return bool((y == 127 * 127 * 64).all())


def _qlinear(x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, _ZERO_POINT, packed, scale, zero_point, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` with unsigned codes, in few of torch's operations: with one row each costs as
    much as some 100 KB of the weight."""
    row_scale = torch.linalg.vector_norm(
        x, ord=math.inf, dim=-1, keepdim=True, dtype=torch.float32
    ).div_(127)
    row_scale.masked_fill_(row_scale == 0, 1)
    return torch.div(x, row_scale).round_().add_(_ZERO_POINT).to(torch.uint8), row_scale


def _quantize_compiled(loaded: ctypes.CDLL, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in one."""
    x = _readable(x)
    codes, row_scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], 1)
    sizes = (*x.shape, x.dtype == torch.bfloat16, torch.get_num_threads())
    loaded.qk_int8_quantize(x.data_ptr(), codes.data_ptr(), row_scale.data_ptr(), *sizes)
    return codes, row_scale


def _multiply(
    function: Callable[..., None], weight: tuple[int, ...], x: Tensor, sizes: tuple[int, ...]
) -> Tensor:
    """x[M, K] through int8.cpp, quantized and multiplied in one call. `weight` are its tensors'
    addresses, `sizes` N, K and more."""
    inside = _readable(x)
    y = torch.empty(x.shape[0], sizes[0], dtype=inside.dtype)
    function(
        *weight,
        inside.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        *sizes,
        inside.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y.half() if x.dtype == torch.float16 else y


def _readable(x: Tensor) -> Tensor:
    """x in a dtype that int8.cpp reads, bfloat16 or float32."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()
