"""Products of float32 matrices where fewer bits will do: on a GPU's tensor cores, operands rounded
to TF32, which has float32's range and 11 bits, sums in float32; on a processor that multiplies BF16
twice as fast, in BF16, but only what errors make others change by.

What they are for is itself an estimate from a sample of tokens, or goes into 16 bits when the model
is served: the sums behind a Hessian, what an error costs in the residual stream, what GPTQ and
descent make up for, what rounded experts answer. Scales are proven, sources' answers computed and
paths compared without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

LARGE = 2**26
"""Multiplications of a product from which a processor rounds operands to BF16: below, rounding them
takes what it spares."""


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """While it lasts. Nothing changes on a processor. May be nested."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def error_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N], where b are rounding errors, or what became of them: what
    others are changed by, to 8 bits or more."""
    return (a.bfloat16() @ b.bfloat16()).float() if _bears_bf16(a, b) else a @ b


def add_error_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c [..., M, N] and the product of a [..., M, K] and b [..., K, N], as `error_product`; a may lack
    leading dimensions."""
    return c + error_product(a, b) if _bears_bf16(a, b) else add_product(c, a, b)


def add_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c [..., M, N] + a @ b, in one operation; a may lack leading dimensions."""
    if c.dim() == 2:
        return torch.addmm(c, a, b)
    if c.dim() == 3:
        return torch.baddbmm(c, a.expand(len(c), -1, -1), b)
    return c + a @ b


def add_error_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [..., M, N] and the product of a [..., M, K] and b [..., K, N], in place; a may lack
    leading dimensions. As `error_product`."""
    if _bears_bf16(a, b):
        out += error_product(a, b)
    elif out.dim() == 2:
        out.addmm_(a, b)
    else:
        out.baddbmm_(a.expand(len(out), -1, -1), b)


def _bears_bf16(a: Tensor, b: Tensor) -> bool:
    return (
        a.device.type == "cpu" and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE and _has_bf16()
    )


@cache
def _has_bf16() -> bool:
    """Whether this processor multiplies BF16 itself."""
    known = (
        torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    )  # older versions of PyTorch do not tell
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))
