"""AutoRound's own description (quant_method auto-round): other formats' tensors under a block of
its own. Read only.

packing_format says whose tensors they are: auto_round:auto_gptq (GPTQ's first),
auto_round:gptqmodel (its second), auto_round:auto_awq, auto_round:fp8_static (a scale per channel
[N], or one), auto_round:llm_compressor (compressed-tensors' MXFP4, NVFP4, MXFP8, int8).
block_name_to_quantize names the blocks that are quantized; extra_config gives modules, by name or
regular expression, other bits, groups or zero points, and 16 bits to those that are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import regex

from quantkit.checkpoint.formats import (
    awq,
    compressed_fp4,
    compressed_int8,
    compressed_mxfp4,
    fp8,
    gptq,
)
from quantkit.checkpoint.formats.base import HEAD, Format, Json
from quantkit.checkpoint.formats.declared import DeclaredFormat, Description, Placed
from quantkit.common.errors import QuantkitError
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.mx import MX_GROUP
from quantkit.grids.mxfp4 import Mxfp4Grid
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Grid

_PACKED: dict[str, Format] = {
    "auto_gptq": gptq.FORMATS[0],
    "gptqmodel": gptq.FORMATS[1],
    "auto_awq": awq.FORMAT,
}
_FP8_CHANNEL, _FP8_TENSOR = fp8.ModelOptFp8(fp8.CHANNEL), fp8.ModelOptFp8(fp8.TENSOR)
_MXFP8 = fp8.CompressedMxfp8(16)
_FLOATS: dict[tuple[Any, ...], DeclaredFormat] = {
    ("mx_fp", 4, MX_GROUP): DeclaredFormat(compressed_mxfp4.FORMAT, Mxfp4Grid()),
    ("nv_fp", 4, FP4_GROUP): DeclaredFormat(compressed_fp4.FORMAT, Nvfp4Grid()),
    ("mx_fp", 8, MX_GROUP): DeclaredFormat(_MXFP8, Mxfp8Grid()),
    ("int", 8, -1): DeclaredFormat(compressed_int8.FORMAT, compressed_int8.GRID),
    ("fp", 8, -1): DeclaredFormat(_FP8_CHANNEL, None),
    ("fp", 8, 0): DeclaredFormat(_FP8_TENSOR, None),
}
"""data_type, bits and group_size where tensors are compressed-tensors', or FP8."""
_KEYS = ("bits", "group_size", "sym", "data_type")


class AutoRound(Description):
    name = "auto-round"
    variant = "packing_format"
    members = (*_PACKED.values(), *(one.format for one in _FLOATS.values()))

    def detect(self, config: Json, side: Json) -> bool:
        return str((config.get("quantization_config") or {}).get("quant_method")).replace(
            "_", "-"
        ) in ("auto-round", "intel/auto-round")

    def placed(self, config: Json, side: Json) -> Placed:
        block = config["quantization_config"]
        packing, usual = (
            str(block.get("packing_format") or "auto_round:auto_gptq"),
            {key: block.get(key) for key in _KEYS},
        )
        extra = block.get("extra_config") or {}
        if not isinstance(extra, dict) or not all(isinstance(own, dict) for own in extra.values()):
            raise QuantkitError(
                "extra_config of quantization_config is no object of objects",
                "download config.json again",
            )
        patterns = [
            (regex.compile(name), own)
            for name, own in extra.items()
            if set(name) & set("*^$|[(\\+")
        ]
        in_blocks = _blocks(block.get("block_name_to_quantize", block.get("to_quant_block_names")))
        _placement("quantization_config", packing, usual)

        def placed(module: str) -> DeclaredFormat | None:
            own = extra.get(module)
            if own is None:
                own = next((one for pattern, one in patterns if pattern.match(module)), None)
            if own is None and not in_blocks(module):
                return None
            said = {
                key: value
                for key, value in (own or {}).items()
                if key in _KEYS and value is not None
            }
            return _placement(module, packing, {**usual, **said})

        return placed


def _blocks(said: Any) -> Callable[[str], bool]:
    """Whether a module is in a block that is quantized: all but the head where none is named."""
    named = said.split(",") if isinstance(said, str) else said if isinstance(said, Sequence) else []
    flat = [str(one) for entry in named for one in (entry if isinstance(entry, list) else [entry])]
    prefixes = tuple(entry.strip() for entry in flat if entry.strip())
    return (
        (lambda module: module.startswith(prefixes))
        if prefixes
        else (lambda module: module.rpartition(".")[2] != HEAD)
    )


def _placement(where: str, packing: str, said: Json) -> DeclaredFormat | None:
    """None for 16 bits. Raises QuantkitError for what is not read."""
    bits, size, symmetric = said["bits"], said["group_size"], said["sym"]
    if type(bits) is int and bits >= 16:
        return None
    format = _PACKED.get(packing.rpartition(":")[2])
    sizes = type(size) is int and (size > 0 or size == -1)
    if format is not None and sizes and bits in ((4,) if format is awq.FORMAT else (4, 8)):
        return DeclaredFormat(
            format,
            IntGrid(
                bits,
                size if size > 0 else None,
                symmetric=symmetric is not False and format is not awq.FORMAT,
            ),
        )
    found = (
        None
        if format is not None
        else _FLOATS.get((str(said["data_type"]).removesuffix("8"), bits, size))
    )
    if found is None:
        message = (
            f"{where} is AutoRound's {packing} with "
            f"{', '.join(f'{key} {value}' for key, value in said.items())}"
        )
        remedy = (
            "quantkit reads int of 4 and 8 bits in GPTQ's and AWQ's packing, FP8, and MXFP4, "
            "NVFP4, MXFP8 and int8 of llm_compressor"
        )
        raise QuantkitError(
            message, f"{remedy}; export it anew, as llm_compressor's or with 4 or 8 bits"
        )
    return found


FORMAT = AutoRound()
