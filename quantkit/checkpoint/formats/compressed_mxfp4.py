"""compressed-tensors mxfp4-pack-quantized: E2M1 codes two to a byte along the inputs, the even one
in the low bits, a power of two per 32.

X.weight_packed uint8 [N, K / 2]   X.weight_scale uint8 [N, K / 32], the exponent plus 127

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
from quantkit.grids.mxfp4 import MX_GROUP, Mxfp4Grid, Mxfp4Weight
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
    variant = "mxfp4-pack-quantized"
    marker = ".weight_packed"
    own_suffixes = (".weight_packed", ".weight_scale")

    def holds(self, grid: Grid) -> bool:
        return grid == Mxfp4Grid()

    def grid(self, config: Json, side: Json) -> Grid | None:
        args = compressed.weight_args(config)
        if not is_fp4(args, MX_GROUP):
            raise compressed.unreadable(args, f"4-bit float in groups of {MX_GROUP}")
        return Mxfp4Grid()

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": MX_GROUP,
            "dynamic": False,
        }
        stored = {"scale_dtype": "torch.uint8"}  # a key that readers of MX know, and need
        return compressed.config_block(self.variant, weights | stored, None, quantized, unquantized)


FORMAT = CompressedMxfp4()


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
