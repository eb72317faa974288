"""Linear operators: y = x @ W.T for a prepared weight.

`prepare` (or `prepare_int4`, `prepare_int8`, `prepare_fp4`, `prepare_dense`) picks a backend and
lays the weight out for it, once.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import (
    FLOAT_DTYPES,
    check_compute_dtype,
    check_tensor,
    require,
)
from quantkit_kernels.functional import mx_rounded, rms_norm, silu_and_mul
from quantkit_kernels.weights import (
    FP4_GROUP_SIZE,
    MX_GROUP_SIZE,
    Dense,
    Fp4,
    Int4,
    Int4Int8,
    Int8,
    MxInputs,
    Weight,
    check_weight,
    kind,
    shape,
)

BIASED_ROWS = 8
"""From so many on a GPU's library adds the bias of a product by 16-bit weights itself: on an H200
that took 0 to 4 us from 16 to 4096 rows of gpt-oss-20b's q, k, v and o, and adding it after the
product 3 at 16 and 31 to 53 at 4096."""


class Linear(ABC):
    """One prepared weight. Call it with x[..., K] of `dtype`; it returns [..., N] of the same
    dtype.

    Int8 and Int4Int8 weights quantize each row of x to int8 inside the call (see `quantize_rows`),
    FP4 weights with an input_divisor round x to NVFP4 (see `round_to_nvfp4`), and `MxInputs` to
    MXFP4 or MXFP8 (see `round_to_mx`). `nbytes` counts every byte the layout holds.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.device = device
        self.backend = backend

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(
                f"x: {list(x.shape)} {x.dtype}, expected [..., {self.in_features}] {self.dtype}"
            )
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def biased(self, x: Tensor, bias: Tensor) -> Tensor:
        """The linear of x [M, K] plus bias [N], all of `dtype`. Sums may be rounded before the bias
        is added."""
        return self(x) + bias

    def fused(
        self,
        x: Tensor,
        gain: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + the linear of x, in one launch where `fuses` says so. x [M, K], with a gain [K]
        its RMSNorm is read; or [M, 2K], silu_and_mul(x) is read. residual [M, N] or None. All but
        the gain are of `dtype`. Raises ValueError for shapes that do not fit."""
        k = self.in_features
        narrow = gain is not None or x.shape[-1] == k
        check_tensor("x", x, (None, k if narrow else 2 * k), (self.dtype,))
        if gain is not None:
            check_tensor("gain", gain, (k,), FLOAT_DTYPES)
        if residual is not None:
            check_tensor("residual", residual, (len(x), self.out_features), (self.dtype,))
        if self.fuses(len(x)):
            return self.in_one_launch(x, gain, eps, residual)
        if gain is not None:
            x = rms_norm(x, gain, eps)
        y = self(x if narrow else silu_and_mul(x))
        return y if residual is None else residual + y

    def fuses(self, rows: int) -> bool:
        """Whether `fused` of so many rows is one launch."""
        return False

    def in_one_launch(
        self, x: Tensor, gain: Tensor | None, eps: float, residual: Tensor | None
    ) -> Tensor:
        """`fused`, where `fuses` says so."""
        raise NotImplementedError

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
    weight: Weight,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Linear:
    """Lay `weight` out for a backend.

    backend: a name from `BACKENDS`, or "auto" for the best one usable on the device. dtype: of
    activations and outputs (float32, bfloat16 or float16). device: where the prepared weight lives;
    the weight's own by default. The weight's tensors are never modified. Raises ValueError for
    tensors that do not fit each other, and for a backend that is not usable, with the reason.
    """
    check_weight(weight)
    check_compute_dtype(dtype)
    target = weight[0].device if device is None else torch.device(device)
    name = backends.choose(f"linear_{kind(weight)}", backend, target, dtype, (shape(weight),))
    linear = laid_out(name, weight, dtype, target)
    assert linear.backend == name, (linear.backend, name)
    return linear


def laid_out(backend: str, weight: Weight, dtype: torch.dtype, device: torch.device) -> Linear:
    """`prepare` for a backend that was chosen. ValueError where it has no product of inputs rounded
    to 4-bit floats or MXFP8 and they are to be."""
    make = backends.module(backend).linear
    if isinstance(weight, Int4Int8):
        return Int8InputsLinear(make(Int4(*weight), dtype, device))
    if not rounds_inputs(weight):
        linear: Linear = make(weight, dtype, device)
        return linear
    refused = why_no_rounded_inputs(backend, device)
    require(refused is None, f"backend: {backend} cannot round inputs of {kind(weight)}: {refused}")
    if isinstance(weight, MxInputs):
        plain = Fp4(*weight) if isinstance(weight, Fp4) else Dense(*weight)
        return MxInputsLinear(make(plain, dtype, device), weight.input_bits)
    assert isinstance(weight, Fp4), kind(weight)
    assert weight.input_divisor is not None
    # Rounded inputs are exact in 16 bits as long as they are not divided; the weight's global scale
    # takes that over.
    undivided = Fp4(weight.codes, weight.scale, weight.global_scale / weight.input_divisor)
    return RoundedInputsLinear(make(undivided, dtype, device), weight.input_divisor.to(device))


def rounds_inputs(weight: Weight) -> bool:
    """Whether the linear is a product by weights alone over inputs that are rounded before it."""
    return isinstance(weight, Int4Int8 | MxInputs) or (
        isinstance(weight, Fp4) and weight.input_divisor is not None
    )


def why_no_rounded_inputs(backend: str, device: torch.device) -> str | None:
    """None where linears of this backend, or of the best one of a device ("auto"), run on inputs
    rounded to NVFP4, MXFP4 or MXFP8; else the reason."""
    if device.type == "npu" or backend in ("torch_npu", "ascend"):
        return "an NPU has no FP4 and no e4m3 to round with"
    return (
        "its own is to NVFP4, under a divisor found anew at every call"
        if backend == "scaled_mm"
        else None
    )


class _OverRoundedInputs(Linear):
    """x rounded, then the product of any backend by the weight alone."""

    def __init__(self, product: Linear) -> None:
        super().__init__(
            product.in_features,
            product.out_features,
            product.dtype,
            product.device,
            product.backend,
        )
        self.product = product

    def held(self) -> list[Tensor]:
        return self.product.held()


class Int8InputsLinear(_OverRoundedInputs):
    """W4A8 in groups: x rounded to int8, then the product of any backend by an int4 weight.
    Products of int8 by int4 are not used."""

    def rows(self, x: Tensor) -> Tensor:
        codes, scale = quantize_rows(x)
        # Codes over 128 are exact in 16 bits, and products no larger than those of inputs whose
        # largest is 1.
        return (self.product.rows((codes.float() / 128).to(self.dtype)).float() * (scale * 128)).to(
            self.dtype
        )


class MxInputsLinear(_OverRoundedInputs):
    """MXFP4 W4A4 and MXFP8 W8A8: x rounded to `bits`, then the product. Where a card has units for
    such numbers they are not used."""

    def __init__(self, product: Linear, bits: int) -> None:
        super().__init__(product)
        self.bits = bits

    def rows(self, x: Tensor) -> Tensor:
        return self.product.rows(mx_rounded(x, self.bits))


class RoundedInputsLinear(_OverRoundedInputs):
    """W4A4: x rounded to NVFP4, then the product of any backend by an FP4 weight. Where a card has
    FP4 units they are not used."""

    def __init__(self, product: Linear, divisor: Tensor) -> None:
        super().__init__(product)
        self.divisor = divisor

    def held(self) -> list[Tensor]:
        return [*self.product.held(), self.divisor]

    def rows(self, x: Tensor) -> Tensor:
        levels, scales = round_to_nvfp4(x, self.divisor)
        return self.product.rows(levels.mul_(scales.unsqueeze(-1)).flatten(-2).to(self.dtype))


def prepare_int4(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Linear:
    """W4A16. codes int8 [N, K] signed; scale float32 [N, K/g]; zero_point int8 [N, K/g] or None.
    See `Int4` and `prepare`."""
    return prepare(Int4(codes, scale, zero_point), backend=backend, dtype=dtype, device=device)


def prepare_int8(
    codes: Tensor,
    scale: Tensor,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
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
    """FP4 W4A16. codes uint8 [N, K]; scale float8_e4m3fn [N, K/16]; global_scale float32 scalar.
    See `Fp4` and `prepare`."""
    return prepare(Fp4(codes, scale, global_scale), backend=backend, dtype=dtype, device=device)


def prepare_dense(
    weight: Tensor,
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
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


E2M1_MAX, E4M3_MAX = 6.0, 448.0
_SCALE_OF_ZEROS = 0.125


def round_to_nvfp4(x: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of W4A4 linears as compressed-tensors rounds them: x ~ level * scale / divisor,
    nearest, halves to the even code.

    x float [..., K]; divisor float32, 2688 / the largest magnitude expected (what is larger
    saturates), [] or with as many dimensions as x. Returns levels float32 [..., K/16, 16], of
    E2M1's values, and scales float32 [..., K/16], of e4m3's: largest of the group / 6 * divisor,
    0.125 where that is zero. The arithmetic is float32, as in engines' kernels; compressed-tensors
    divides by 6 in x's dtype.
    """
    groups = x.float().unflatten(-1, (-1, FP4_GROUP_SIZE))
    scales = (
        (groups.abs().amax(dim=-1) / E2M1_MAX * divisor)
        .clamp_(max=E4M3_MAX)
        .to(torch.float8_e4m3fn)
        .float()
    )
    scales = torch.where(scales == 0, _SCALE_OF_ZEROS, scales)
    return _round_e2m1(groups / (scales / divisor).unsqueeze(-1)), scales


def _round_e2m1(levels: Tensor) -> Tensor:
    """Nearest values of E2M1, in place; beyond 6 they saturate."""
    levels.clamp_(-E2M1_MAX, E2M1_MAX)
    # Spacing of E2M1: 1/2 up to 2, 1 up to 4, 2 up to 6. Rounding to even in it is rounding to the
    # even code.
    sizes = levels.abs()
    spacing = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return levels.div_(spacing).round_().mul_(spacing)


_MX_EXPONENTS = {4: 3, 8: 9}
"""Exponent, as frexp gives it, of the largest value of E2M1 (6) and of E4M3 (448)."""
_MX_FULL = 0.875
"""Mantissa, as frexp gives it, from which on a group's scale is the next power of two: 448's."""


def round_to_mx(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Inputs of MXFP4 (bits 4) and MXFP8 (8) linears as compressed-tensors rounds them: x ~ level *
    scale, nearest, halves to the even code.

    x float [..., K]. Returns levels float32 [..., K/32, 32], of E2M1's or E4M3's values, and scales
    float32 [..., K/32]: the power of two that puts the largest of the group from 3.5 to 7, where E2M1
    saturates at 6, or from 224 to 448. The arithmetic is float32. Engines' kernels for MXFP4 keep
    the largest below 6 instead.
    """
    groups = x.float().unflatten(-1, (-1, MX_GROUP_SIZE))
    mantissa, exponent = groups.abs().amax(dim=-1).frexp()
    power = exponent - _MX_EXPONENTS[bits] + (mantissa >= _MX_FULL)
    # A power of two by its bits: exact on every device.
    scales = (power.clamp_(-126, 127) + 127).to(torch.int32).bitwise_left_shift_(23)
    scales = scales.view(torch.float32)
    levels = groups / scales.unsqueeze(-1)
    return (_round_e2m1(levels) if bits == 4 else levels.to(torch.float8_e4m3fn).float()), scales
