"""Linear operators: y = x @ W.T for a prepared weight.

`prepare` (or `prepare_int4`, `prepare_int8`, `prepare_fp4`, `prepare_dense`) picks a backend and lays the weight out for it, once.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import check_compute_dtype, require
from quantkit_kernels.weights import Dense, Fp4, Int4, Int8, Weight, check_weight, kind, shape


class Linear(ABC):
    """One prepared weight. Call it with x[..., K] of `dtype`; it returns [..., N] of the same dtype.

    Int8 weights quantize each row of x to int8 inside the call (see `quantize_rows`). `nbytes` counts every byte the layout holds.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device, backend: str) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.device = device
        self.backend = backend

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(f"x: {list(x.shape)} {x.dtype}, expected [..., {self.in_features}] {self.dtype}")
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """x[M, K] -> [M, N], M at least 1, x in `dtype`."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors kept between calls."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.held())


def prepare(
    weight: Weight, *, backend: str = "auto", dtype: torch.dtype = torch.bfloat16, device: str | torch.device | None = None
) -> Linear:
    """Lay `weight` out for a backend.

    backend: a name from `BACKENDS`, or "auto" for the best one usable on the device. dtype: of activations and outputs (float32, bfloat16
    or float16). device: where the prepared weight lives; the weight's own by default. The weight's tensors are never modified.
    Raises ValueError for tensors that do not fit each other, and for a backend that is not usable, with the reason.
    """
    check_weight(weight)
    check_compute_dtype(dtype)
    target = weight[0].device if device is None else torch.device(device)
    name = backends.choose(f"linear_{kind(weight)}", backend, target, dtype, (shape(weight),))
    linear: Linear = backends.module(name).linear(weight, dtype, target)
    assert linear.backend == name, (linear.backend, name)
    return linear


def prepare_int4(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Linear:
    """W4A16. codes int8 [N, K] signed; scale float32 [N, K/g]; zero_point int8 [N, K/g] or None. See `Int4` and `prepare`."""
    return prepare(Int4(codes, scale, zero_point), backend=backend, dtype=dtype, device=device)


def prepare_int8(
    codes: Tensor, scale: Tensor, *, backend: str = "auto", dtype: torch.dtype = torch.bfloat16, device: str | torch.device | None = None
) -> Linear:
    """W8A8. codes int8 [N, K]; scale float32 [N, 1]. See `Int8` and `prepare`."""
    return prepare(Int8(codes, scale), backend=backend, dtype=dtype, device=device)


def prepare_fp4(
    codes: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Linear:
    """FP4 W4A16. codes uint8 [N, K]; scale float8_e4m3fn [N, K/16]; global_scale float32 scalar. See `Fp4` and `prepare`."""
    return prepare(Fp4(codes, scale, global_scale), backend=backend, dtype=dtype, device=device)


def prepare_dense(
    weight: Tensor, *, backend: str = "auto", dtype: torch.dtype = torch.bfloat16, device: str | torch.device | None = None
) -> Linear:
    """An unquantized linear. weight float [N, K]. See `prepare`."""
    require(weight.dim() == 2, f"weight: shape {list(weight.shape)}, expected [N, K]")
    return prepare(Dense(weight), backend=backend, dtype=dtype, device=device)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row, as W8A8 operators do it: scale = max|x| / 127 (1 for a row of zeros), codes = round-half-even(x / scale).

    x float [M, K] -> codes int8 [M, K], scale float32 [M, 1]. The arithmetic is float32.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(wide / scale).clamp_(-127, 127).to(torch.int8), scale
