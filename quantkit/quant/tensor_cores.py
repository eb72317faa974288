"""Products of float32 matrices at reduced precision: on a GPU's tensor cores, operands rounded to
TF32, which has float32's range and 11 bits, sums in float32; on a CPU that multiplies BF16 faster,
in BF16, sums in float32.

The results are estimates from a sample of tokens anyway, or are served in 16 bits. In BF16 on a
CPU, too: the paths of calibration tokens, the sums in a Hessian, the cost of errors in the residual
stream, corrections for drift (`sample_products`, `sample_linear`), and large products of errors in
GPTQ and descent. Other arithmetic of GPTQ and descent uses TF32 on a GPU and float32 on a CPU
(`tensor_core_products`). Routers, scale verification and the paths of held-out tokens, which are
compared, use full float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from quantkit_kernels.cpu.gram import GramOperand, has_gram
from torch import Tensor
from torch.nn import functional as F

LARGE = 2**26
"""Multiplications in a product from which a CPU rounds operands to BF16: below, rounding them costs
what it saves."""
_PANEL = 512
"""Rows of a square that are copied at a time."""


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """Context manager; no effect on a CPU. May be nested."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def sample_products() -> Iterator[None]:
    """Context manager: as `tensor_core_products`, and operands rounded to BF16 on a CPU that
    multiplies them faster. Both operands of x^T x are rounded alike, so it stays positive
    semidefinite. May be nested."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if _has_bf16():
        matmul.fp32_precision = "bf16"
    try:
        with tensor_core_products():
            yield
    finally:
        matmul.fp32_precision = before


@sample_products()
def sample_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [..., K] @ w [N, K]^T of calibration tokens."""
    if _rounds_itself(x, w.shape[0]):
        return F.linear(x.bfloat16(), w.bfloat16()).float()
    return F.linear(x, w)


def leading_sample_linear(x: Tensor, w: Tensor, count: int) -> Tensor:
    """x [T, K] @ w [N, K]^T, whose first `count` rows are calibration tokens and the others held
    out: `sample_linear`, then the caller's precision. On a GPU all have that."""
    if x.device.type != "cpu" or not count:
        return F.linear(x, w)
    first = sample_linear(x[:count], w)
    return first if count == len(x) else torch.cat((first, F.linear(x[count:], w)))


@sample_products()
def add_sample_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] plus a [T, M]^T @ b [T, N] of calibration tokens, in place."""
    if _rounds_itself(a.t(), b.shape[1]):
        out += a.bfloat16().t() @ b.bfloat16()
    else:
        out.addmm_(a.t(), b)


@sample_products()
def add_gram_(out: Tensor, x: Tensor, panels: Iterable[slice]) -> None:
    """out [K, K] plus x^T x of calibration tokens x [T, K], in place: in these panels of rows, at
    least up to the diagonal."""
    if _has_faster_gram(x):
        operand = GramOperand(x)
        for rows in panels:
            operand.add_to(out, rows)
        return
    for rows in panels:
        out[rows, : rows.stop].addmm_(x[:, rows].t(), x[:, : rows.stop])


@sample_products()
def gram(x: Tensor) -> Tensor:
    """x^T x [K, K] of calibration tokens x [T, K]."""
    if not _has_faster_gram(x):
        return x.t() @ x
    out = x.new_zeros(x.shape[1], x.shape[1])
    GramOperand(x).add_to(out, slice(0, len(out)))
    return mirror_(out)


def mirror_(square: Tensor) -> Tensor:
    """The upper triangle of [..., K, K] made that of the lower one, in place: sums of x x^T are
    symmetric but for their last bits."""
    for start in range(0, square.shape[-1], _PANEL):
        own, after = slice(start, start + _PANEL), slice(start + _PANEL, None)
        block = square[..., own, own].tril_()
        block += block.tril(-1).mT
        square[..., own, after] = square[..., after, own].mT
    return square


def error_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N], where b are rounding errors or derived from them, to 8 bits or
    more."""
    return (a.bfloat16() @ b.bfloat16()).float() if _uses_bf16(a, b) else a @ b


def add_error_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c [..., M, N] plus the product of a [..., M, K] and b [..., K, N], as `error_product`; a may
    lack leading dimensions."""
    return c + error_product(a, b) if _uses_bf16(a, b) else add_product(c, a, b)


def add_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c [..., M, N] + a @ b, in one operation; a may lack leading dimensions."""
    if c.dim() == 2:
        return torch.addmm(c, a, b)
    if c.dim() == 3:
        return torch.baddbmm(c, a.expand(len(c), -1, -1), b)
    return c + a @ b


def add_error_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [..., M, N] plus the product of a [..., M, K] and b [..., K, N], in place; a may lack
    leading dimensions. As `error_product`."""
    if _uses_bf16(a, b):
        out += error_product(a, b)
    elif out.dim() == 2:
        out.addmm_(a, b)
    else:
        out.baddbmm_(a.expand(len(out), -1, -1), b)


def _uses_bf16(a: Tensor, b: Tensor) -> bool:
    return (
        a.device.type == "cpu" and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE and _has_bf16()
    )


def _rounds_itself(a: Tensor, columns: int) -> bool:
    """Whether operands of a product a [..., M, K] @ b [K, N] are best rounded to BF16 before it:
    oneDNN rounds those of a float32 product for AMX alone, and takes twice as long without. The
    result is then rounded, too."""
    large = a.numel() * columns >= LARGE
    return a.device.type == "cpu" and large and _has_bf16() and not _has("amx_bf16")


def _has_faster_gram(x: Tensor) -> bool:
    """Whether x^T x is best summed by the project's C++, whose sums are not rounded."""
    return _rounds_itself(x.t(), x.shape[1]) and has_gram()


def _has_bf16() -> bool:
    """Whether this CPU has BF16 multiplication."""
    return _has("avx512_bf16") or _has("amx_bf16")


@cache
def _has(instructions: str) -> bool:
    known = (
        torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    )  # missing in older versions of PyTorch
    return bool(known.get(instructions))
