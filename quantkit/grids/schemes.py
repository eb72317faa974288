"""A quantization scheme is a value: the weight grid, the activation bits, the methods that fit one
to the other.

A new scheme on known grids is one entry in SCHEMES, its name in names.py and, if its defaults
differ, one recipe.
"""

from dataclasses import dataclass

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.grids.base import Grid
from quantkit.grids.fp8_block import FP8_CHANNEL, Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.names import CacheCodes, Method
from quantkit.grids.nvfp4 import Nvfp4Grid


@dataclass(frozen=True)
class Scheme:
    """One way to quantize a model.

    `weight` is the grid of the weights; where `outside` is set, `weight` is that of routed experts
    only, and those of MTP layers, like every other linear, are on `outside`.
    `methods` are applied in order before or while rounding; none means round to nearest, which
    needs no calibration.
    `formats` are the on-disk formats some engine loads it from, the default first.
    `cache`: the dtype of the KV cache, under scales that calibration finds and the checkpoint
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
            Nvfp4Grid(),
            16,
            ("awq", "gptq", "drift", "descent"),
            ("modelopt", "compressed-tensors"),
            "NVFP4 weights, 16-bit activations",
        ),
        Scheme(
            "nvfp4-w4a4",
            Nvfp4Grid(activation_bits=4),
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
            "mxfp4-w4a4",
            Mxfp4Grid(activation_bits=4),
            4,
            ("awq", "gptq", "drift", "descent"),
            ("compressed-tensors",),
            "MXFP4 weights, MXFP4 activations",
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
        Scheme(
            "w8a16",
            IntGrid(bits=8, group_size=128, symmetric=True),
            16,
            ("awq", "gptq", "drift", "descent"),
            ("compressed-tensors", "gptq"),
            "int8 in groups of 128, 16-bit activations",
        ),
        Scheme(
            "fp8-w8a8",
            FP8_CHANNEL,
            8,
            ("gptq", "drift", "descent"),
            ("compressed-tensors",),
            "FP8 weights per channel, FP8 activations per token",
        ),
        Scheme(
            "fp8-block-w8a8",
            Fp8BlockGrid(),
            8,
            ("gptq", "drift", "descent"),
            ("compressed-tensors", "fp8-block"),
            "FP8 weights in blocks of 128 x 128, FP8 activations per token and 128 channels",
        ),
        Scheme(
            "mxfp8-w8a8",
            Mxfp8Grid(),
            8,
            ("gptq", "drift", "descent"),
            ("compressed-tensors", "modelopt", "fp8-block"),
            "MXFP8 weights, MXFP8 activations",
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
