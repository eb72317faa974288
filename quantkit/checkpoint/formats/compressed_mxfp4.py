"""compressed-tensors mxfp4-pack-quantized: E2M1 codes two to a byte along the inputs, the even one
in the low bits, a power of two per 32.

X.weight_packed uint8 [N, K / 2]   X.weight_scale uint8 [N, K / 32], the exponent plus 127
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import Along, Format, StoredPart, require_multiple
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import Grid, Weight
from quantkit.grids.mxfp4 import MX_GROUP, Mxfp4Grid, Mxfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs

GROUP_EXPONENTS: tuple[Along, ...] = (("N", 1), ("K", MX_GROUP))


class CompressedMxfp4(Format):
    name = "compressed-tensors"
    variant = "mxfp4-pack-quantized"
    scale_dtype = torch.uint8
    marker = ".weight_packed"
    marker_dtype = torch.uint8
    own_suffixes = (".weight_packed", ".weight_scale")

    def holds(self, grid: Grid) -> bool:
        return grid == Mxfp4Grid()

    def parts(
        self, module: str, shape: tuple[int, int], grid: Grid | None
    ) -> tuple[StoredPart, ...]:
        rows, columns = shape
        require_multiple(module, "input channels", columns, MX_GROUP)
        return (
            StoredPart(".weight_packed", (torch.uint8,), (rows, columns // 2), axes=CODE_PAIRS),
            StoredPart(
                ".weight_scale",
                (torch.uint8, torch.float8_e8m0fnu),
                (rows, columns // MX_GROUP),
                axes=GROUP_EXPONENTS,
            ),
        )

    def stored(
        self, module: str, tensors: Mapping[str, TensorSpec], grid: Grid | None
    ) -> tuple[tuple[int, int], Grid | None]:
        rows, pairs = tensors[module + self.marker].shape
        return (rows, pairs * 2), grid

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = Mxfp4Weight.of(weight)
        return {
            f"{module}.weight_packed": pack_pairs(weight.codes),
            f"{module}.weight_scale": weight.exponent,
        }

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        return Mxfp4Weight(
            unpack_pairs(tensors[f"{module}.weight_packed"]),
            tensors[f"{module}.weight_scale"].view(torch.uint8),
        )

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        return compressed.detect(config, self.variant)

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        args = compressed.weight_args(config)
        if (
            args.get("num_bits") != 4
            or args.get("type") != "float"
            or args.get("group_size") != MX_GROUP
        ):
            raise compressed.unreadable(args, f"4-bit float in groups of {MX_GROUP}")
        return Mxfp4Grid()

    def ignored(
        self, config: Mapping[str, Any], side: Mapping[str, Any]
    ) -> Callable[[str], bool] | None:
        return compressed.ignored(config)

    def config_block(
        self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]
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
        return compressed.config_block(self.variant, weights | stored, None, quantized, plain)


FORMAT = CompressedMxfp4()
