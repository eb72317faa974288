"""compressed-tensors mxfp4-pack-quantized: E2M1 codes two to a byte along the inputs, the even one
in the low bits, a power of two per 32.

X.weight_packed uint8 [N, K / 2]   X.weight_scale uint8 [N, K / 32], the exponent plus 127

input_activations of such numbers (W4A4) are rounded as they come, and have no tensor.

MXFP4 as gpt-oss is published: E2M1 codes two to a byte along the inputs, the even one in the low
bits, a power of two per 32. Read only.

X.blocks uint8 [N, K / 2]   X.scales uint8 [N, K / 32], the exponent plus 127

On the disk the experts of a layer are stacked, with blocks [E, N, K / 32, 16]; published_stacks.py
takes them apart. All but experts is plain.
"""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import (
    Format,
    Grids,
    Ignored,
    Json,
    Parts,
    Shape,
    StoredPart,
    Tensors,
    Unquantized,
    require_multiple,
    stored_part,
)
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS, is_fp4
from quantkit.grids.base import Grid, Weight
from quantkit.grids.mx import MX_GROUP
from quantkit.grids.mxfp4 import Mxfp4Grid, Mxfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs


def exponents(suffix: str, shape: Shape) -> StoredPart:
    """An exponent of each group, as a byte or as a power of two."""
    dtypes = (torch.uint8, torch.float8_e8m0fnu)
    return stored_part(suffix, dtypes, shape, ("N", 1), ("K", MX_GROUP))


class Mxfp4Pairs(Format):
    """Codes and exponents, under `own_suffixes`."""

    scale_dtype = torch.uint8
    per_element = 2

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        codes, scales = self.own_suffixes
        require_multiple(module, "input channels", shape[1], MX_GROUP)
        codes_part = stored_part(codes, (torch.uint8,), shape, *CODE_PAIRS)
        return codes_part, exponents(scales, shape)

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Mxfp4Weight.of(weight)
        stored = pack_pairs(weight.codes), weight.exponent
        return {module + suffix: tensor for suffix, tensor in zip(self.own_suffixes, stored)}

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes, scales = (tensors[module + suffix] for suffix in self.own_suffixes)
        return Mxfp4Weight(unpack_pairs(codes), scales.view(torch.uint8))


class CompressedMxfp4(compressed.Compressed, Mxfp4Pairs):
    """activation_bits: 4 where input_activations are described as MXFP4, too."""

    variant = "mxfp4-pack-quantized"
    marker = ".weight_packed"
    own_suffixes = (".weight_packed", ".weight_scale")

    def __init__(self, activation_bits: int = 16) -> None:
        self.activation_bits = activation_bits  # type: ignore[misc]

    @property
    def own_grid(self) -> Mxfp4Grid:
        return Mxfp4Grid(activation_bits=self.activation_bits)

    def holds(self, grid: Grid) -> bool:
        return grid == self.own_grid

    def detect(self, config: Json, side: Json) -> bool:
        found = compressed.detect(config, self.variant)
        return found and compressed.reads(config, _is_mxfp4) == (self.activation_bits == 4)

    def grid(self, config: Json, side: Json) -> Grid | None:
        args = compressed.weight_args(config)
        if not _is_mxfp4(args):
            raise compressed.unreadable(args, f"4-bit float in groups of {MX_GROUP}")
        return self.own_grid

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        return compressed.mx_config_block(
            self.variant, 4, self.activation_bits, quantized, unquantized
        )


def _is_mxfp4(args: Any) -> bool:
    return is_fp4(args, MX_GROUP)


FORMAT = CompressedMxfp4()
W4A4 = CompressedMxfp4(4)


class Mxfp4(Mxfp4Pairs):
    name = "mxfp4"
    variant = "blocks"
    marker = ".blocks"
    own_suffixes = (".blocks", ".scales")
    is_source = True

    def detect(self, config: Json, side: Json) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == self.name

    def grid(self, config: Json, side: Json) -> Grid | None:
        return Mxfp4Grid()

    def ignored(self, config: Json, side: Json) -> Ignored:
        """Names or patterns of modules, or of what they are part of."""
        listed = config["quantization_config"].get("modules_to_not_convert") or []
        entries = [entry for entry in listed if isinstance(entry, str)]
        return lambda module: any(
            fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*") for entry in entries
        )


PUBLISHED = Mxfp4()
