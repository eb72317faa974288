"""A quantization scheme is a value: the weight grid, the activation grid, the method that fits one
to the other.

A new scheme on known grids is one entry in SCHEMES and, if its defaults differ, one recipe.
"""

from dataclasses import dataclass
from typing import Literal

from quantkit.common.errors import QuantkitError, UsageError


@dataclass(frozen=True)
class IntGrid:
    """Integers of `bits` bits. One scale per `group_size` input channels of a row, or per row where
    it is None.

    activation_bits: 8 of int4 in groups whose linears round what they read to int8, a step a token.
    Of every other grid of integers the format says that.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    activation_bits: int = 16

    @property
    def storage_bits(self) -> int:
        return self.bits


@dataclass(frozen=True)
class Fp4Grid:
    """E2M1 values, an e4m3 scale per 16 input channels, one FP32 scale per tensor (NVFP4).

    activation_bits: 4 where what the linears read is rounded to NVFP4 too, under a scale per tensor
    that is stored with the weight.
    """

    group_size: int = 16
    activation_bits: int = 16

    @property
    def storage_bits(self) -> int:
        return 4


@dataclass(frozen=True)
class Mxfp4Grid:
    """E2M1 values, a power of two per 32 input channels (OCP MX)."""

    group_size: int = 32

    @property
    def storage_bits(self) -> int:
        return 4


@dataclass(frozen=True)
class Fp8BlockGrid:
    """e4m3 values, an FP32 scale per 128 x 128 (DeepSeek's). Nothing is rounded to it: such linears
    stay as the source has them."""

    group_size: None = None

    @property
    def storage_bits(self) -> int:
        return 8


Grid = IntGrid | Fp4Grid | Mxfp4Grid | Fp8BlockGrid


def grid_label(grid: Grid | None) -> str:
    """A word for a grid, None standing for a linear that is not rounded."""
    match grid:
        case None:
            return "16-bit"
        case IntGrid(bits, size, symmetric, read):
            parts = (
                f"int{bits}",
                *([f"g{size}"] if size else []),
                *([] if symmetric else ["zero-points"]),
                *(["a8"] if read == 8 else []),
            )
            return "-".join(parts)
        case Fp4Grid(activation_bits=bits):
            return "nvfp4" if bits == 16 else f"nvfp4-w4a{bits}"
        case Mxfp4Grid():
            return "mxfp4"
        case Fp8BlockGrid():
            return "fp8"


CacheCodes = Literal["int8"]
Method = Literal["awq", "gptq", "smooth", "drift", "descent", "steps"]


@dataclass(frozen=True)
class Scheme:
    """One way to quantize a model.

    `weight` is the grid of the weights; where `outside` is another, `weight` is that of routed
    experts only, and those of MTP layers, like every other linear, are on `outside`.
    `methods` are applied in order before or while rounding; none means round to nearest, which
    needs no calibration.
    `formats` are the on-disk formats some engine loads it from, the default first.
    `cache`: codes that engines keep tokens in, by steps that calibration finds and the checkpoint
    holds; None: 16 bits.
    """

    name: str
    weight: Grid
    activation_bits: int
    methods: tuple[Method, ...]
    formats: tuple[str, ...]
    summary: str
    outside: Grid | None = None
    cache: CacheCodes | None = None

    def grid(self, *, expert: bool, mtp: bool) -> Grid:
        """The grid of a linear. expert: it belongs to a routed expert; mtp: to a
        multi-token-prediction layer."""
        return self.weight if self.outside is None or (expert and not mtp) else self.outside


_W4 = IntGrid(bits=4, group_size=128, symmetric=False)
_W8 = IntGrid(bits=8, group_size=None, symmetric=True)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "awq-w4a16",
            _W4,
            16,
            ("awq", "gptq", "drift", "descent"),
            ("awq", "compressed-tensors"),
            "int4 in groups of 128, activation-aware, compensated",
        ),
        Scheme(
            "rtn-w4a16",
            _W4,
            16,
            (),
            ("awq", "compressed-tensors"),
            "int4 in groups of 128, rounded to nearest, no calibration",
        ),
        Scheme(
            "fp4-w4a16",
            Fp4Grid(),
            16,
            ("awq", "gptq", "drift", "descent"),
            ("modelopt", "compressed-tensors"),
            "NVFP4 weights, 16-bit activations",
        ),
        Scheme(
            "nvfp4-w4a4",
            Fp4Grid(activation_bits=4),
            4,
            ("awq", "gptq", "drift", "descent"),
            ("compressed-tensors", "modelopt"),
            "NVFP4 weights, NVFP4 activations",
        ),
        Scheme(
            "mxfp4-w4a16",
            Mxfp4Grid(),
            16,
            ("awq", "gptq"),
            ("compressed-tensors",),
            "MXFP4 weights, 16-bit activations",
        ),
        Scheme(
            "int8-a8w8c16",
            _W8,
            8,
            ("smooth", "awq", "gptq", "drift", "descent"),
            ("compressed-tensors", "modelslim"),
            "int8 weights per channel, int8 activations per token, BF16 cache",
        ),
        Scheme(
            "int8-a8w8c8",
            _W8,
            8,
            ("smooth", "awq", "gptq"),
            ("modelslim",),
            "int8 weights per channel, int8 activations per token, int8 cache by calibrated steps",
            cache="int8",
        ),
        Scheme(
            "int4-w4a8",
            IntGrid(bits=4, group_size=None, symmetric=True),
            8,
            ("smooth", "gptq"),
            ("modelslim",),
            "int4 routed experts and int8 linears, both per channel, int8 activations per token, "
            "BF16 cache",
            outside=_W8,
        ),
        Scheme(
            "int4-w4a8-groups",
            IntGrid(bits=4, group_size=128, symmetric=True, activation_bits=8),
            8,
            ("awq", "gptq", "drift", "descent"),
            ("compressed-tensors",),
            "int4 in groups of 128 without zero points, int8 activations per token",
        ),
    )
}


def find_scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise UsageError(f"scheme {name!r} is not known", f"choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def check_pair(scheme: Scheme, format_name: str) -> None:
    """Refuse a scheme x format pair that no engine loads."""
    if format_name not in scheme.formats:
        raise QuantkitError(
            f"no engine loads {scheme.name} in format {format_name}",
            f"use --format {' or '.join(scheme.formats)}",
        )
