"""MXFP4 as gpt-oss is published: E2M1 codes two to a byte along the inputs, the even one in the low
bits, a power of two per 32. Read only.

X.blocks uint8 [N, K / 2]   X.scales uint8 [N, K / 32], the exponent plus 127

On the disk the experts of a layer are stacked, with blocks [E, N, K / 32, 16]; published_stacks.py
takes them apart. All but experts is plain.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import Format, StoredPart, require_multiple
from quantkit.checkpoint.formats.compressed_mxfp4 import GROUP_EXPONENTS
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS
from quantkit.checkpoint.header import TensorSpec
from quantkit.grids.base import Grid, Weight
from quantkit.grids.mxfp4 import MX_GROUP, Mxfp4Grid, Mxfp4Weight
from quantkit.quant.packing import pack_pairs, unpack_pairs


class Mxfp4(Format):
    name = "mxfp4"
    variant = "blocks"
    scale_dtype = torch.uint8
    marker = ".blocks"
    marker_dtype = torch.uint8
    own_suffixes = (".blocks", ".scales")
    is_source = True

    def holds(self, grid: Grid) -> bool:
        return False

    def parts(
        self, module: str, shape: tuple[int, int], grid: Grid | None
    ) -> tuple[StoredPart, ...]:
        rows, columns = shape
        require_multiple(module, "input channels", columns, MX_GROUP)
        return (
            StoredPart(".blocks", (torch.uint8,), (rows, columns // 2), axes=CODE_PAIRS),
            StoredPart(
                ".scales",
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
        return {f"{module}.blocks": pack_pairs(weight.codes), f"{module}.scales": weight.exponent}

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        return Mxfp4Weight(
            unpack_pairs(tensors[f"{module}.blocks"]), tensors[f"{module}.scales"].view(torch.uint8)
        )

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == self.name

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        return Mxfp4Grid()

    def ignored(
        self, config: Mapping[str, Any], side: Mapping[str, Any]
    ) -> Callable[[str], bool] | None:
        """Names or patterns of modules, or of what they are part of."""
        listed = config["quantization_config"].get("modules_to_not_convert") or []
        entries = [entry for entry in listed if isinstance(entry, str)]
        return lambda module: any(
            fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*") for entry in entries
        )

    def config_block(
        self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]
    ) -> dict[str, Any]:
        raise AssertionError(f"{self.name} {self.variant} is read, and never written")

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role == "linear"


FORMAT = Mxfp4()
