"""compressed-tensors int-quantized, W8A8: int8 per output channel, activations quantized per token when they come.

    X.weight int8 [N, K]   X.weight_scale float32 [N, 1]

vLLM, SGLang, vllm-ascend and omni-infer load it. The scale is float32, omni-infer's own; the others copy it into their dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.base import CODES, FLOAT_DTYPES, Format, StoredPart, stored_scale
from quantkit.checkpoint.header import TensorSpec
from quantkit.quant.weights import IntWeight, Weight
from quantkit.schemes import Grid, IntGrid

GRID = IntGrid(bits=8, group_size=None, symmetric=True)


class CompressedInt8(Format):
    name = "compressed-tensors"
    variant = "int-quantized"
    scale_dtype = torch.float32
    marker = ".weight"
    marker_dtype = torch.int8
    own_suffixes = (".weight_scale",)
    activation_bits = 8

    def holds(self, grid: Grid) -> bool:
        return grid == GRID

    def parts(self, module: str, shape: tuple[int, int], grid: Grid | None) -> tuple[StoredPart, ...]:
        return (
            StoredPart(".weight", (torch.int8,), shape, axes=CODES),
            StoredPart(".weight_scale", (torch.float32, *FLOAT_DTYPES), (shape[0], 1), axes=(("N", 1), None)),
        )

    def stored(self, module: str, tensors: Mapping[str, TensorSpec], grid: Grid | None) -> tuple[tuple[int, int], Grid | None]:
        rows, columns = tensors[f"{module}.weight"].shape
        return (rows, columns), grid

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        assert isinstance(weight, IntWeight), type(weight)
        return {f"{module}.weight": weight.codes, f"{module}.weight_scale": stored_scale(module, weight.scale, self.scale_dtype)}

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        return IntWeight(tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float(), None, bits=8)

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        return compressed.detect(config, self.variant)

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        args = compressed.weight_args(config)
        said = tuple(args.get(key) for key in ("num_bits", "type", "strategy", "symmetric"))
        if said != (8, "int", "channel", True):
            raise compressed.unreadable(args, "8-bit symmetric int by channel")
        return GRID

    def ignored(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Callable[[str], bool] | None:
        return compressed.ignored(config)

    def config_block(self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        return compressed.config_block(self.variant, weights, activations, quantized, plain)


FORMAT = CompressedInt8()
