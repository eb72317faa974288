"""AutoAWQ "gemm": int4 packed along the outputs in an interleaved order, with raw zero points
(AutoAWQ, packing_utils.py).

    X.qweight int32 [K, N / 8]     X.qzeros int32 [G, N / 8]     X.scales float16 [G, N]

A stored code is unsigned 0..15 and a zero point is stored as it is (no minus one): w[k, n] = (q -
z) * s. A symmetric weight is one with z = 8 everywhere.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    HEAD,
    Format,
    Grids,
    Ignored,
    IgnoreSpelling,
    Json,
    Parts,
    Shape,
    Specs,
    Tensors,
    Unquantized,
    group_axis,
    ignore_list,
    require_multiple,
    stored_part,
    stored_scale,
    unquantized_linears,
)
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.quant.packing import from_offset, pack_awq, to_offset, unpack_awq

# Engines take an entry as a substring of the module name, so "mlp.gate" would also skip
# mlp.gate_proj: "mlp.gate." does not.
_SPELLING = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.",
    tails=lambda tail: (tail, f"{tail}."),
    name=lambda module: module,
    matches=lambda entry, module: entry in module,
)


def _unquantized(quantized: Sequence[str], linears: Sequence[str]) -> list[str]:
    """modules_to_not_convert: parts outside the layers in which nothing is quantized, such as a
    vision tower, are one entry each, by their own name alone, for engines put them elsewhere in the
    model, and an ending such as attn.qkv may be part of what engines call linears that they join;
    of the others as `ignore_list` has it."""
    holders = {name[: dot.start()] for name in quantized for dot in re.finditer(r"\.", name)}
    towers: dict[str, None] = {}
    left = []
    for module in linears:
        whole = next(
            (
                above
                for dot in re.finditer(r"\.", module)
                if (above := module[: dot.start()]) not in holders
            ),
            "",
        )
        entry = f"{whole.rpartition('.')[2]}."
        outside = whole and not re.search(r"\.\d+(\.|$)", whole)
        if outside and (
            entry in towers or not any(_SPELLING.matches(entry, name) for name in quantized)
        ):
            towers[entry] = None
        else:
            left.append(module)
    return [*towers, *ignore_list(quantized, left, _SPELLING)]


class Awq(Format):
    name = "awq"
    variant = "gemm"
    outer = ("head",)
    scale_dtype = torch.float16
    marker = ".qweight"
    marker_dtype = torch.int32
    own_suffixes = (".qweight", ".qzeros", ".scales")

    def holds(self, grid: Grid) -> bool:
        return (grid.kind, grid.activation_bits) == ("int4", 16)

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None, module
        require_multiple(module, "outputs", shape[0], 8)
        along = group_axis(module, shape[1], grid)
        return (
            stored_part(".qweight", (torch.int32,), shape, ("K", 1), ("N", 8)),
            stored_part(".qzeros", (torch.int32,), shape, along, ("N", 8)),
            stored_part(".scales", (torch.float16, *FLOAT_DTYPES), shape, along, ("N", 1)),
        )

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        columns, words = tensors[f"{module}.qweight"].shape
        return (words * 8, columns), grid

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = IntWeight.of(weight)
        return {
            f"{module}.qweight": pack_awq(to_offset(weight.codes)),
            f"{module}.qzeros": pack_awq(to_offset(weight.points)),
            f"{module}.scales": stored_scale(module, weight.scale, self.scale_dtype).T.contiguous(),
        }

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        return IntWeight(
            codes=from_offset(unpack_awq(tensors[f"{module}.qweight"])),
            scale=tensors[f"{module}.scales"].float().T.contiguous(),
            zero_point=from_offset(unpack_awq(tensors[f"{module}.qzeros"])),
            bits=4,
        )

    def detect(self, config: Json, side: Json) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == "awq"

    def grid(self, config: Json, side: Json) -> Grid | None:
        block = config["quantization_config"]
        bits, size = (
            block.get("bits", block.get("w_bit")),
            block.get("group_size", block.get("q_group_size")),
        )
        version, zero_point = (
            str(block.get("version", "gemm")).lower(),
            block.get("zero_point", True),
        )
        if bits != 4 or type(size) is not int or version != "gemm" or type(zero_point) is not bool:
            said = f"bits {bits}, group_size {size}, version {version}, zero_point {zero_point}"
            raise QuantkitError(
                f"the checkpoint is AWQ with {said}",
                "quantkit reads AWQ gemm with 4 bits",
            )
        # Zero points are stored all the same: AutoRound says false, and they are all 8.
        return IntGrid(bits=4, group_size=size if size > 0 else None, symmetric=not zero_point)

    def ignored(self, config: Json, side: Json) -> Ignored:
        # An empty list declares nothing: engines then go by the tensors.
        entries = config["quantization_config"].get("modules_to_not_convert")
        return (
            (lambda module: any(_SPELLING.matches(entry, module) for entry in entries))
            if entries
            else None
        )

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        assert grid is not None
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": grid.group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": _unquantized(
                list(quantized), unquantized_linears(unquantized, quantized)
            )
            or None,
            **({HEAD: True} if HEAD in quantized else {}),
        }


FORMAT = Awq()
