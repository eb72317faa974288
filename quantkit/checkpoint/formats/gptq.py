"""GPTQ as AutoGPTQ and GPTQModel write it: int4 or int8 packed along the inputs in natural order,
zero points along the outputs.

    X.qweight int32 [K / P, N]   X.qzeros int32 [G, N / P]   X.scales float16 [G, N]   X.g_idx int32 [K], the group of each input

P values to a word, 8 of int4 and 4 of int8. A code is unsigned: w[k, n] = (q - z) * s, with z and s
of group g_idx[k]. checkpoint_format "gptq", the first, stores a zero point minus one; "gptq_v2"
stores it as it is. With desc_act the groups are those of GPTQ's own order of
inputs: such a weight has no groups of neighbours, and is decoded to float32 as it is read.
"""

from dataclasses import replace

import regex
import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    HEAD,
    Format,
    Grids,
    Ignored,
    Json,
    Parts,
    Shape,
    Specs,
    Tensors,
    Unquantized,
    group_axis,
    require_multiple,
    stored_part,
    stored_scale,
    unquantized_linears,
)
from quantkit.checkpoint.formats.declared import Declared, DeclaredFormat
from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, Weight
from quantkit.grids.int_groups import IntGrid, IntWeight
from quantkit.quant.packing import pack_words, unpack_words

_METHOD, _FIRST, _SECOND = "gptq", "gptq", "gptq_v2"
_BITS = (4, 8)
_BY_GROUP = (".qzeros", ".scales")


class Gptq(Format):
    """checkpoint_format: "gptq" or "gptq_v2". desc_act: whether groups are in GPTQ's own order of
    inputs."""

    name = "gptq"
    outer = ("head",)
    scale_dtype = torch.float16
    marker = ".qweight"
    marker_dtype = torch.int32
    own_suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, checkpoint_format: str, *, desc_act: bool = False) -> None:
        self.variant = f"{checkpoint_format} desc_act" if desc_act else checkpoint_format  # type: ignore[misc]
        self.checkpoint_format, self.desc_act = checkpoint_format, desc_act
        self.first = checkpoint_format == _FIRST

    def holds(self, grid: Grid) -> bool:
        return grid.is_integer and grid.activation_bits == 16 and not self.desc_act

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None
        (rows, columns), per_word = shape, 32 // grid.bits
        require_multiple(module, "outputs", rows, per_word)
        require_multiple(module, "input channels", columns, per_word)
        along = group_axis(module, columns, grid)
        found = (
            stored_part(".qweight", (torch.int32,), shape, ("K", per_word), ("N", 1)),
            stored_part(".qzeros", (torch.int32,), shape, along, ("N", per_word)),
            stored_part(".scales", (torch.float16, *FLOAT_DTYPES), shape, along, ("N", 1)),
            stored_part(".g_idx", (torch.int32, torch.int64), shape, ("K", 1), required=False),
        )
        if not self.desc_act:
            return found
        # In GPTQ's own order any input may be of any group: all of them are needed for a share of
        # the inputs.
        return tuple(
            replace(part, axes=(None, part.axes[1])) if part.suffix in _BY_GROUP else part
            for part in found
        )

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        words, rows = tensors[f"{module}.qweight"].shape
        bits = 4 if grid is None else grid.bits
        return (rows, words * (32 // bits)), grid

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        weight = IntWeight.of(weight)
        return {
            f"{module}.qweight": _pack(weight.codes, weight.bits).T.contiguous(),
            f"{module}.qzeros": _pack(
                _wrapped(weight.points.T, -int(self.first), weight.bits), weight.bits
            ),
            f"{module}.scales": stored_scale(module, weight.scale, self.scale_dtype).T.contiguous(),
            f"{module}.g_idx": (torch.arange(weight.shape[1]) // weight.group_size).int(),
        }

    def specs(self, module: str, shape: Shape, grid: Grid | None) -> list[TensorSpec]:
        return [
            TensorSpec(module + part.suffix, part.dtypes[0], part.shape)
            for part in self.parts(module, shape, grid)
        ]

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        scale, zeros = (
            tensors[f"{module}.scales"].float().T.contiguous(),
            tensors[f"{module}.qzeros"],
        )
        bits = 32 * zeros.shape[1] // scale.shape[0]
        codes = _unpack(tensors[f"{module}.qweight"].T, bits)
        zero_point = _wrapped(_unpack(zeros, bits), int(self.first), bits).T.contiguous()
        g_idx = tensors.get(f"{module}.g_idx")
        if g_idx is not None and not in_order(g_idx, scale.shape[1]):
            if not self.desc_act:
                message = (
                    f"{module}.g_idx is not in the order of the inputs, and the checkpoint "
                    "says desc_act false"
                )
                raise QuantkitError(
                    message, "set desc_act to true in quantization_config, if it was quantized so"
                )
            of = _checked_groups(module, g_idx, scale.shape[1])
            return (codes - zero_point[:, of].float()) * scale[:, of]
        return IntWeight(codes, scale, zero_point if bool(zero_point.any()) else None, bits)

    def detect(self, config: Json, side: Json) -> bool:
        block = _block(config, side)
        method = block.get("quant_method", _METHOD if _is_side(config, side) else None)
        said = block.get("checkpoint_format") or block.get("format") or _FIRST
        return method == _METHOD and (str(said), bool(block.get("desc_act"))) == (
            self.checkpoint_format,
            self.desc_act,
        )

    def grid(self, config: Json, side: Json) -> Grid | None:
        block = _block(config, side)
        bits, size, symmetric = block.get("bits"), block.get("group_size"), block.get("sym", True)
        if bits not in _BITS or type(size) is not int or type(symmetric) is not bool:
            message = f"bits {bits}, group_size {size}, sym {symmetric}"
            raise QuantkitError(
                f"the checkpoint is GPTQ with {message}", "quantkit reads GPTQ with 4 and 8 bits"
            )
        return IntGrid(bits=bits, group_size=size if size > 0 else None, symmetric=symmetric)

    def of_checkpoint(self, config: Json, side: Json) -> Format:
        """Where GPTQModel's `dynamic` gives some modules other bits, groups or orders: the format
        and grid of each."""
        block, ignored = _block(config, side), self.ignored(config, side)
        own = [
            (regex.compile(name.removeprefix("+:")), settings)
            for name, settings in _dynamic(block).items()
            if not name.startswith("-:") and isinstance(settings, dict) and settings
        ]
        if not own:
            return self

        def placed(module: str) -> DeclaredFormat | None:
            if (module == HEAD and not block.get("lm_head")) or (
                ignored is not None and ignored(module)
            ):
                return None
            settings: Json = next((one for pattern, one in own if pattern.match(module)), {})
            said = {"quantization_config": {**block, **settings, "dynamic": {}}}
            format = next(
                one
                for one in FORMATS
                if one.first == self.first
                and one.desc_act == bool(settings.get("desc_act", self.desc_act))
            )
            return DeclaredFormat(format, format.grid(said, {}))

        return Declared(self, placed, FORMATS)

    def ignored(self, config: Json, side: Json) -> Ignored:
        block = _block(config, side)
        patterns = [regex.compile(name[2:]) for name in _dynamic(block) if name.startswith("-:")]
        listed = block.get("modules_to_not_convert") or []
        if not patterns and not listed:
            return None
        # Engines leave the head alone unless lm_head is set, listed or not.
        unquantized = set() if block.get("lm_head") else {HEAD}
        return lambda module: (
            module in unquantized
            or any(one.match(module) for one in patterns)
            or any(entry in module for entry in listed)
        )

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        assert grid is not None
        linears = [
            module for module in unquantized_linears(unquantized, quantized) if module != HEAD
        ]
        return {
            "quant_method": _METHOD,
            "checkpoint_format": self.checkpoint_format,
            "bits": grid.bits,
            "group_size": grid.group_size or -1,
            "sym": grid.symmetric,
            "desc_act": self.desc_act,
            "lm_head": HEAD in quantized,
            "dynamic": {f"-:{regex.escape(module)}$": {} for module in linears},
        }


def in_order(g_idx: Tensor, count: int) -> bool:
    """Whether neighbours share a group: g_idx [K] rises by one every K / count inputs. All zeros
    mean that too, as AutoGPTQ writes."""
    size = max(len(g_idx) // count, 1)
    return not bool(g_idx.any()) or torch.equal(
        g_idx.long() - int(g_idx[0]), torch.arange(len(g_idx), device=g_idx.device) // size
    )


def _checked_groups(module: str, g_idx: Tensor, count: int) -> Tensor:
    """int64 [K]. Raises QuantkitError where there is no such group."""
    least, most = int(g_idx.min()), int(g_idx.max())
    if least < 0 or most >= count:
        message = (
            f"{module}.g_idx names group {least if least < 0 else most}, and there are {count}"
        )
        raise QuantkitError(message, "download the checkpoint again, or ask its publisher")
    return g_idx.long()


def _block(config: Json, side: Json) -> Json:
    """The description, from config.json where it has one, else from quantize_config.json."""
    block = config.get("quantization_config") or side.get("quantize_config.json") or {}
    return block if isinstance(block, dict) else {}


def _is_side(config: Json, side: Json) -> bool:
    """AutoGPTQ's own file names no method."""
    return not config.get("quantization_config") and "desc_act" in side.get(
        "quantize_config.json", {}
    )


def _dynamic(block: Json) -> JsonObject:
    found = block.get("dynamic")
    return found if isinstance(found, dict) else {}


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Signed int8 [..., n] -> int32 [..., n / P]: each plus half of the range, in natural order."""
    shifted = (codes.short() + 2 ** (bits - 1)).to(torch.uint8)
    return pack_words(shifted.contiguous()) if bits == 4 else _viewed(shifted, torch.int32)


def _unpack(words: Tensor, bits: int) -> Tensor:
    stored = unpack_words(words.contiguous()) if bits == 4 else _viewed(words, torch.uint8)
    return (stored.short() - 2 ** (bits - 1)).to(torch.int8)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes, row by row, as another dtype."""
    return tensor.reshape(-1).view(dtype).view(*tensor.shape[:-1], -1)


def _wrapped(codes: Tensor, plus: int, bits: int) -> Tensor:
    """codes + plus, within the range of signed `bits`; past its end it begins anew."""
    half = 2 ** (bits - 1)
    return ((codes.short() + plus + half) % (2 * half) - half).to(torch.int8)


FORMATS = tuple(
    Gptq(said, desc_act=desc_act) for desc_act in (False, True) for said in (_FIRST, _SECOND)
)
