"""FP8 with a scale per tensor, channel, block or group of inputs, as compressed-tensors, ModelOpt
and vLLM's fp8 have it. Written in compressed-tensors, per channel and block, and MXFP8 there and in
ModelOpt; the others are read only.

    X.weight float8_e4m3fn [N, K]   X.weight_scale, a multiplier: a float, or of a power of two the exponent, uint8 or float8_e8m0fnu
    X.input_scale (static activations) is accepted and not used

MXFP8's inputs are rounded as they come where they are described so (W8A8).

Of each container there is a format for every layout of scales, for a scale's shape alone does not
identify its block. DeepSeek's own FP8 has another name for its scale (fp8_block.py).
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed, modelopt
from quantkit.checkpoint.formats.base import (
    CODES,
    FLOAT_DTYPES,
    Along,
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
from quantkit.checkpoint.formats.nvfp4 import are_floats
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, Weight
from quantkit.grids.fp8_block import FP8_BLOCK, FP8_CHANNEL, Fp8BlockGrid, Fp8BlockWeight
from quantkit.grids.mx import MX_GROUP, decode_e8m0
from quantkit.grids.mxfp8 import Mxfp8Grid, Mxfp8Weight


class Fp8Layout(NamedTuple):
    """What a scale is for: a block of `rows` outputs and `columns` inputs, 0 for all of them."""

    rows: int
    columns: int


TENSOR, CHANNEL = Fp8Layout(0, 0), Fp8Layout(1, 0)
BLOCK, MX = Fp8Layout(FP8_BLOCK, FP8_BLOCK), Fp8Layout(1, MX_GROUP)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_GRIDS: dict[Fp8Layout, Grid] = {CHANNEL: FP8_CHANNEL, BLOCK: Fp8BlockGrid(), MX: Mxfp8Grid()}


class Fp8(Format):
    """What the containers share. layout: of the scales."""

    marker_dtype = torch.float8_e4m3fn
    own_suffixes = (".weight_scale",)
    is_source = True
    flat_channels: ClassVar[bool] = False
    """Whether scales per channel are stored as [N], not [N, 1]."""

    def __init__(self, layout: Fp8Layout) -> None:
        self.layout = layout

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        tall, wide = self._block(shape)
        if self.layout == MX:
            require_multiple(module, "input channels", shape[1], MX_GROUP)
        axes: tuple[Along, ...] = (
            ("N", tall) if self.layout.rows else None,
            ("K", wide) if self.layout.columns else None,
        )
        dtypes = _EXPONENTS if self.layout == MX else (torch.float32, *FLOAT_DTYPES, *_EXPONENTS)
        flat = self.layout == CHANNEL and self.flat_channels
        scale = stored_part(".weight_scale", dtypes, shape, *(axes[:1] if flat else axes))
        return (
            stored_part(".weight", (torch.float8_e4m3fn,), shape, *CODES),
            StoredPart(".weight_scale", dtypes, (1,)) if self.layout == TENSOR else scale,
            StoredPart(".input_scale", FLOAT_DTYPES, (1,), required=False),
        )

    def _block(self, shape: tuple[int, ...]) -> Shape:
        return self.layout.rows or shape[0], self.layout.columns or shape[1]

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        if self.layout == MX:
            mx = Mxfp8Weight.of(weight)
            return {f"{module}.weight": mx.codes, f"{module}.weight_scale": mx.exponent}
        weight = Fp8BlockWeight.of(weight)
        scale = (
            weight.scale[:, 0] if self.layout == CHANNEL and self.flat_channels else weight.scale
        )
        return {
            f"{module}.weight": weight.codes,
            f"{module}.weight_scale": scale.reshape(1) if self.layout == TENSOR else scale,
        }

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        if self.layout == MX:
            return Mxfp8Weight(codes, scale.view(torch.uint8))
        values = decode_e8m0(scale) if scale.dtype in _EXPONENTS else scale.float()
        return Fp8BlockWeight(
            codes, values if values.dim() == 2 else values.reshape(-1, 1), self._block(codes.shape)
        )

    def detect(self, config: Json, side: Json) -> bool:
        return self.declared(config, side) == self.layout

    def grid(self, config: Json, side: Json) -> Grid | None:
        return _GRIDS.get(self.layout)

    @abstractmethod
    def declared(self, config: Json, side: Json) -> Fp8Layout | None:
        """The layout that a checkpoint of this container declares; None where it declares none of
        these, or is of another."""

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role in ("linear", "kv_b")


class CompressedFp8(Fp8):
    name = "compressed-tensors"
    variant = "float-quantized"
    outer = ("head",)
    variants: ClassVar[tuple[str, ...]] = ("float-quantized", "naive-quantized")
    """What the config says: the second where activations stay in 16 bits."""

    def holds(self, grid: Grid) -> bool:
        return grid == _GRIDS.get(self.layout)

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        shared = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = shared | {"strategy": "channel", "dynamic": False}
        activations = shared | {"strategy": "token", "dynamic": True}
        if self.layout == BLOCK:
            weights |= {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
            activations |= {"strategy": "group", "group_size": FP8_BLOCK}
        return compressed.config_block(self.variant, weights, activations, quantized, unquantized)

    def declared(self, config: Json, side: Json) -> Fp8Layout | None:
        if not any(compressed.detect(config, variant) for variant in self.variants):
            return None
        if not config["quantization_config"].get("config_groups"):
            return None
        args = compressed.weight_args(config)
        if args.get("num_bits") != 8 or args.get("type") != "float":
            return None
        if args.get("strategy") == "block":
            return BLOCK if args.get("block_structure") == [FP8_BLOCK, FP8_BLOCK] else None
        if args.get("strategy") == "group":
            return MX if args.get("group_size") == MX_GROUP else None
        return {"tensor": TENSOR, "channel": CHANNEL}.get(str(args.get("strategy")))

    def ignored(self, config: Json, side: Json) -> Ignored:
        return compressed.ignored(config)


class CompressedMxfp8(CompressedFp8):
    """activation_bits: 8 where input_activations are described as MXFP8, too."""

    variant = "mxfp8-quantized"
    variants = ("mxfp8-quantized",)

    def __init__(self, activation_bits: int = 8) -> None:
        super().__init__(MX)
        self.activation_bits = activation_bits  # type: ignore[misc]

    def detect(self, config: Json, side: Json) -> bool:
        found = super().detect(config, side)
        return found and compressed.reads(config, _is_mxfp8) == (self.activation_bits == 8)

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        return compressed.mx_config_block(
            self.variant, 8, self.activation_bits, quantized, unquantized
        )


def _is_mxfp8(args: Any) -> bool:
    return are_floats(args, 8, MX_GROUP)


class ModelOptFp8(Fp8):
    name = "modelopt"
    variant = "FP8"
    flat_channels = True

    def declared(self, config: Json, side: Json) -> Fp8Layout | None:
        if not modelopt.is_modelopt(config, side):
            return None
        layouts = {"FP8": TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "MXFP8": MX}
        return layouts.get(str(modelopt.described(config, side).get("quant_algo")))

    def ignored(self, config: Json, side: Json) -> Ignored:
        return modelopt.FORMAT.ignored(config, side)


class ModelOptMxfp8(ModelOptFp8):
    """activation_bits: 8 where a config group describes inputs, too; quant_algo alone says nothing
    of them here, as engines without units for MXFP8 read it."""

    variant = "MXFP8"
    outer = ("head",)

    def __init__(self, activation_bits: int = 8) -> None:
        super().__init__(MX)
        self.activation_bits = activation_bits  # type: ignore[misc]

    def holds(self, grid: Grid) -> bool:
        return grid == Mxfp8Grid()

    def detect(self, config: Json, side: Json) -> bool:
        return super().detect(config, side) and self._rounds(config, side)

    def _rounds(self, config: Json, side: Json) -> bool:
        groups = (modelopt.described(config, side).get("config_groups") or {}).values()
        said = [one.get("input_activations") for one in groups if isinstance(one, dict)]
        return any(map(_is_mxfp8, said)) == (self.activation_bits == 8)

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        dynamic = True if self.activation_bits == 8 else None
        return modelopt.block("MXFP8", 8, MX_GROUP, quantized, unquantized, dynamic=dynamic)

    def extra_files(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, bytes]:
        return modelopt.side_file("MXFP8", MX_GROUP, quantized, unquantized)


class UnwrappedFp8(Fp8):
    """quant_method fp8 without blocks: what vLLM and its first tools write, a scale per tensor."""

    name = "fp8"
    variant = "e4m3"

    def declared(self, config: Json, side: Json) -> Fp8Layout | None:
        block = config.get("quantization_config") or {}
        return (
            TENSOR
            if block.get("quant_method") == "fp8" and block.get("weight_block_size") is None
            else None
        )


COMPRESSED_CHANNEL, COMPRESSED_BLOCK = CompressedFp8(CHANNEL), CompressedFp8(BLOCK)
COMPRESSED_MX, MODELOPT_MX_WEIGHTS = CompressedMxfp8(), ModelOptMxfp8(16)
FORMATS: tuple[Fp8, ...] = (
    CompressedFp8(TENSOR),
    COMPRESSED_CHANNEL,
    COMPRESSED_BLOCK,
    COMPRESSED_MX,
    CompressedMxfp8(16),
    *(ModelOptFp8(layout) for layout in (TENSOR, CHANNEL)),
    ModelOptMxfp8(),
    MODELOPT_MX_WEIGHTS,
    UnwrappedFp8(TENSOR),
)
