"""Ascend ModelSlim (ascendV1): INT8 W8A8_DYNAMIC and INT4 W4A8_DYNAMIC, described in
quant_model_description.json.

    W8A8_DYNAMIC   X.weight int8 [N, K]       X.weight_scale float32 [N, 1]   X.weight_offset float32 [N, 1], zeros
    W4A8_DYNAMIC   X.weight int8 [N / 2, K]   the same, and X.scale_bias float32 [N, 1], for down_proj, o_proj and w2 [N, 16]

Int4 is symmetric per channel, two rows to a byte in two's complement, the even row in the low bits.
The kernel computes with codes + 8 and takes scale_bias = 8 * sum_k(code * scale) off again; layers
cut along K carry the sum of each of 16 slices. vllm-ascend registers weight_offset as a parameter,
so it must be there. config.json says nothing. What else ModelSlim writes is read by the type that
each tensor has in the description (modelslim_kinds.py). An int8 cache is described there, too; the
tensors with its steps are in models/cache_scales.py.

What ModelSlim writes in addition to its W8A8_DYNAMIC and per-channel W4A8_DYNAMIC: each linear
by its type in the description. Read only.

    W8A8, W8A8_MIX   X.weight int8 [N, K]   X.input_scale, X.input_offset [1]   X.deq_scale [N] = input_scale * weight_scale
                     X.quant_bias int32 [N]; X.weight_scale [N, 1] in its first form alone
    W8A16            X.weight int8 [N, K]   X.weight_scale, X.weight_offset [N, G]
    W4A16            X.weight int8 [N, K], a byte a code; in its second form two to a byte, [N, K / 2] per channel and [N / 2, K] in groups
    W4A4_FLATQUANT_DYNAMIC   as W4A16's first form, over transformed inputs (modelslim_folded.py)
    W4A8_DYNAMIC     in groups: X.weight_scale [N, 1] times X.weight_scale_second [N, G]; packed [N / 2, K] in the second form

w = (code - offset) * scale. The second form is the one whose description has a version. deq_scale
is float32, or, for models in FP16, int64 whose low 32 bits are those of the float. Static scales of
activations are not used: inputs are quantized by token, which loses less.
"""

import json
from typing import Literal

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    CODES,
    FLOAT_DTYPES,
    HEAD,
    SLIM_FILES,
    Along,
    Format,
    Grids,
    Ignored,
    Json,
    Parts,
    Shape,
    Specs,
    StoredPart,
    Tensors,
    Unquantized,
    along_groups,
    require_multiple,
    stored_part,
    stored_scale,
)
from quantkit.checkpoint.formats.declared import Declared, DeclaredFormat, Placed
from quantkit.checkpoint.formats.modelslim_folded import FLAT, FoldedInputs, rotated_online
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.grids.names import CacheCodes
from quantkit.quant.packing import (
    from_twos_complement,
    pack_pairs,
    to_twos_complement,
    unpack_pairs,
)

Packed = Literal["", "N", "K"]
"""Along which axis two codes share a byte."""
_OFFSETS = (*FLOAT_DTYPES, torch.int8, torch.int32, torch.int64)
_SCALES = (".weight_scale", ".weight_offset")
_ROWS: tuple[Along, ...] = (("N", 1), None)


SLICES = 16
"""The largest tensor-parallel size a row-parallel scale_bias is cut for."""


def bias_slices(module: str) -> int:
    """Columns of a linear's scale_bias."""
    return SLICES if module.endswith(("down_proj", "o_proj", ".w2")) else 1


class SlimLinear(Format):
    """bits of a code; packed; suffixes of its scales, and whether activations are quantized."""

    name = "modelslim"
    variant = "ascendV1"
    marker_dtype = torch.int8
    own_suffixes = (".weight_scale", ".weight_offset")

    def __init__(
        self,
        bits: int,
        activation_bits: int,
        packed: Packed = "",
        *,
        second: bool = False,
        static: bool = False,
    ) -> None:
        self.bits, self.packed, self.second, self.static = bits, packed, second, static
        self.activation_bits = activation_bits  # type: ignore[misc]
        if static:
            self.own_suffixes = (".deq_scale", ".input_scale")  # type: ignore[misc]

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        rows, columns = tensors[f"{module}.weight"].shape
        shape = (
            rows * (2 if self.packed == "N" else 1),
            columns * (2 if self.packed == "K" else 1),
        )
        scale = tensors.get(f"{module}.weight_scale{'_second' if self.second else ''}")
        steps = scale or tensors.get(f"{module}.deq_scale")
        if steps is not None and steps.shape == (1,) and rows > 1:
            raise QuantkitError(
                f"{module} has one scale for the whole matrix (mm_tensor of ModelSlim), which "
                "quantkit does not read",
                "quantize again with mm_tensor=False, a scale a row, as vllm-ascend needs it",
            )
        count = (
            scale.shape[1] if scale is not None and len(scale.shape) == 2 and scale.shape[1] else 1
        )
        require_multiple(module, "input channels", shape[1], count)
        return shape, IntGrid(
            self.bits,
            None if count == 1 else shape[1] // count,
            symmetric=self.activation_bits == 8,
        )

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None
        rows, columns = shape
        n, k = (2 if self.packed == axis else 1 for axis in "NK")
        codes = stored_part(".weight", (torch.int8,), shape, ("N", n), ("K", k))
        if self.static:
            return codes, *_static_parts(shape)
        along = along_groups(columns, columns // (grid.group_size or columns))
        own = None if self.second else along
        found = (
            codes,
            *(stored_part(suffix, _OFFSETS, shape, ("N", 1), own) for suffix in _SCALES),
        )
        if not self.second:
            return found
        seconds = (
            stored_part(f"{suffix}_second", _OFFSETS, shape, ("N", 1), along) for suffix in _SCALES
        )
        sums = (rows, bias_slices(module))
        return (*found, *seconds, StoredPart(".scale_bias", FLOAT_DTYPES, sums, False, _ROWS))

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        codes = self._codes(tensors[f"{module}.weight"])
        if self.static:
            scale = _float_of(tensors[f"{module}.deq_scale"]) / tensors[
                f"{module}.input_scale"
            ].float().reshape(())
            return IntWeight(codes, scale.reshape(-1, 1).contiguous(), None, 8)
        scale, offset = (
            tensors[f"{module}.weight_scale"].float(),
            tensors[f"{module}.weight_offset"],
        )
        if self.second:
            scale = scale * tensors[f"{module}.weight_scale_second"].float()
            if bool(offset.any()) or bool(tensors[f"{module}.weight_offset_second"].any()):
                raise QuantkitError(
                    f"{module} has offsets of two stages that are not zero",
                    "quantkit reads those that are symmetric",
                )
            return IntWeight(codes, scale, None, self.bits)
        points = offset.round()
        half = 2 ** (self.bits - 1)
        if not torch.equal(points, offset) or bool((points.abs() > half).any()):
            return (
                codes - offset.float().repeat_interleave(codes.shape[1] // offset.shape[1], 1)
            ) * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        zero_point = points.clamp(-half, half - 1).to(torch.int8)
        return IntWeight(
            codes,
            scale,
            zero_point if self.activation_bits == 16 or bool(points.any()) else None,
            self.bits,
        )

    def _codes(self, stored: Tensor) -> Tensor:
        if self.packed == "N":
            return _unpack_rows(stored)
        if self.packed == "K":
            return from_twos_complement(unpack_pairs(stored.view(torch.uint8)))
        return stored


def _unpack_rows(stored: Tensor) -> Tensor:
    return from_twos_complement(unpack_pairs(stored.view(torch.uint8).T)).T.contiguous()


def _static_parts(shape: Shape) -> Parts:
    return (
        stored_part(".deq_scale", (torch.float32, torch.int64), shape, ("N", 1)),
        stored_part(".quant_bias", (torch.int32,), shape, ("N", 1)),
        *(StoredPart(suffix, _OFFSETS, (1,)) for suffix in (".input_scale", ".input_offset")),
        *(stored_part(suffix, _OFFSETS, shape, *_ROWS, required=False) for suffix in _SCALES),
    )


def _float_of(deq_scale: Tensor) -> Tensor:
    return (
        deq_scale
        if deq_scale.dtype == torch.float32
        else deq_scale.to(torch.int32).view(torch.float32)
    )


_SIDE_FILE = "quant_model_description.json"
_INT8 = IntGrid(bits=8, group_size=None, symmetric=True)
_INT4 = IntGrid(bits=4, group_size=None, symmetric=True)
_TYPES: dict[str, Grid] = {"W8A8_DYNAMIC": _INT8, "W4A8_DYNAMIC": _INT4}
_FLATQUANT = "W4A4_FLATQUANT_DYNAMIC"
_READ = (*_TYPES, "W8A8", "W8A8_MIX", "W8A16", "W4A16", _FLATQUANT)
_SECOND = ".weight_scale_second"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TYPE_NAMES = {grid: name for name, grid in _TYPES.items()}
_KINDS: dict[str, Format] = {
    "W8A8_DYNAMIC": SlimLinear(8, 8),
    "W8A8": SlimLinear(8, 8, static=True),
    "W8A8_MIX": SlimLinear(8, 8, static=True),
    "W8A16": SlimLinear(8, 16),
    "W4A16": SlimLinear(4, 16),
    _FLATQUANT: SlimLinear(4, 16),
    "W4A8_DYNAMIC": SlimLinear(4, 8),
}
"""By type, with scales of one stage, in the first form where the second differs."""
_TWO_STAGES: dict[bool, Format] = {
    True: SlimLinear(4, 8, "N", second=True),
    False: SlimLinear(4, 8, second=True),
}
"""Of W4A8_DYNAMIC, by whether the description has a version."""
_PACKED_W4A16: dict[bool, Format] = {True: SlimLinear(4, 16, "N"), False: SlimLinear(4, 16, "K")}
"""In groups, or per channel."""
_CACHES = (
    ("fa_quant_type", "FAKQuant", ".fa_k.", "FAQuant"),
    ("kv_cache_type", "C8", ".kv_cache_", "C8"),
)
"""Of latents, and of keys and values: the key that says so and its value, a part of the names of
tensors, and their type."""


class ModelSlim(Format):
    name = "modelslim"
    variant = "ascendV1"
    marker_dtype = torch.int8
    own_suffixes = (".weight_scale", ".weight_offset", ".scale_bias")
    activation_bits = 8

    def holds(self, grid: Grid) -> bool:
        return grid in (_INT8, _INT4)

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        rows, columns = shape
        scales = (
            stored_part(".weight_scale", _FLOATS, shape, ("N", 1), None),
            stored_part(".weight_offset", _FLOATS, shape, ("N", 1), None),
        )
        if grid == _INT8:
            return (stored_part(".weight", (torch.int8,), shape, *CODES), *scales)
        slices = bias_slices(module)
        require_multiple(module, "outputs", rows, 2)
        require_multiple(module, "input channels", columns, slices)
        return (
            stored_part(".weight", (torch.int8,), shape, ("N", 2), ("K", 1)),
            *scales,
            stored_part(
                ".scale_bias", (torch.float32,), shape, ("N", 1), along_groups(columns, slices)
            ),
        )

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        rows, columns = tensors[f"{module}.weight"].shape
        # A W4A8 checkpoint has INT4 experts and INT8 attention; only INT4 has scale_bias.
        if f"{module}.scale_bias" in tensors:
            return (rows * 2, columns), _INT4
        return (rows, columns), _INT8

    def split_fault(self, module: str, grid: Grid, *, row_parallel: bool) -> str | None:
        if grid != _INT4 or row_parallel == (bias_slices(module) == SLICES):
            return None
        return (
            "the format's name says whether an int4 linear is cut along its inputs, and "
            "this name says otherwise"
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = IntWeight.of(weight)
        assert weight.zero_point is None, f"{module} is asymmetric"
        tensors = {
            f"{module}.weight": weight.codes,
            f"{module}.weight_scale": stored_scale(module, weight.scale, self.scale_dtype),
            f"{module}.weight_offset": torch.zeros_like(weight.scale),
        }
        if weight.bits == 4:
            tensors[f"{module}.weight"] = (
                pack_pairs(to_twos_complement(weight.codes.T)).T.contiguous().view(torch.int8)
            )
            sums = weight.codes.unflatten(1, (bias_slices(module), -1)).sum(
                dim=-1, dtype=torch.int32
            )
            tensors[f"{module}.scale_bias"] = 8 * sums * weight.scale
        return tensors

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        if bool(tensors[f"{module}.weight_offset"].any()):
            raise QuantkitError(
                f"{module}.weight_offset is not zero: the weight is asymmetric",
                "quantkit reads symmetric ones",
            )
        codes, bits = tensors[f"{module}.weight"], 8
        if f"{module}.scale_bias" in tensors:
            codes, bits = _unpack_rows(codes), 4
        return IntWeight(codes, tensors[f"{module}.weight_scale"].float(), None, bits)

    def cache_codes(self, side: Json) -> CacheCodes | None:
        described = _described(side)
        return "int8" if any(described.get(key) == said for key, said, _, _ in _CACHES) else None

    def detect(self, config: Json, side: Json) -> bool:
        return any(name in side for name in SLIM_FILES)

    def of_checkpoint(self, config: Json, side: Json) -> Format:
        """Itself for what it writes; else each linear by its own type."""
        described = _described(side)
        types = {said for said in described.values() if isinstance(said, str)} - {"FLOAT"}
        if (
            "version" in described
            and not rotated_online(described)
            and types.isdisjoint(_KINDS.keys() - _TYPES.keys())
            and not any(name.endswith(_SECOND) for name in described)
        ):
            return self
        return Declared(
            self,
            _placed(described),
            (self, *_KINDS.values(), *_TWO_STAGES.values(), *_PACKED_W4A16.values()),
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        said = _described(side).get("model_quant_type")
        if said not in _TYPES:
            raise QuantkitError(
                f"{_SIDE_FILE} says model_quant_type {said}", f"quantkit reads {', '.join(_READ)}"
            )
        return _TYPES[said]

    def ignored(self, config: Json, side: Json) -> Ignored:
        described = _described(side)
        # What is not described is not quantized; but vllm-ascend asks for the head's type, of one
        # that is tied to the embedding too.
        return lambda module: (
            described.get(f"{module}.weight", None if module == HEAD else "FLOAT") == "FLOAT"
        )

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        return {}

    def extra_files(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, bytes]:
        assert grid in _TYPE_NAMES, grid
        description: JsonObject = {
            "model_quant_type": _TYPE_NAMES[grid],
            "version": "1.0.0",
            "group_size": 0,
        }
        description |= {"metadata": {}, "optional": {}}
        for module, own_grid in quantized.items():
            assert own_grid in _TYPE_NAMES, f"{module}: {own_grid}"
            suffixes = self.own_suffixes if own_grid == _INT4 else self.own_suffixes[:2]
            description |= {
                module + suffix: _TYPE_NAMES[own_grid] for suffix in (".weight", *suffixes)
            }
        description |= {spec.name: "FLOAT" for spec in unquantized}
        for key, said, part, of_tensors in _CACHES:
            steps = [spec.name for spec in unquantized if part in spec.name]
            description |= {key: said, **dict.fromkeys(steps, of_tensors)} if steps else {}
        # vllm-ascend asks for the head's type, of one that is tied to the embedding too.
        description |= {f"{HEAD}.weight": "FLOAT"} if HEAD not in quantized else {}
        return {_SIDE_FILE: json.dumps(description, indent=2).encode() + b"\n"}


def _described(side: Json) -> Json:
    found: Json = next(side[name] for name in SLIM_FILES if name in side)
    return found


def _placed(described: Json) -> Placed:
    new, online = "version" in described, rotated_online(described)

    def placed(module: str) -> DeclaredFormat | None:
        kind = described.get(f"{module}.weight")
        if kind in (None, "FLOAT"):
            return None
        second = f"{module}{_SECOND}" in described
        format = _KINDS.get(str(kind))
        if kind == "W4A16" and new:
            format = _PACKED_W4A16[bool(described.get("group_size"))]
        elif kind == "W4A8_DYNAMIC" and (second or new):
            format = _TWO_STAGES[new] if second else FORMAT
        elif second and kind != "W8A8_DYNAMIC":
            format = None
        if format is None:
            raise QuantkitError(
                f"{_SIDE_FILE} says that {module} is {kind}", f"quantkit reads {', '.join(_READ)}"
            )
        sides = FLAT if kind == _FLATQUANT else online.get(module)
        return DeclaredFormat(format if sides is None else FoldedInputs(format, sides), None)

    return placed


FORMAT = ModelSlim()
