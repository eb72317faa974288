"""The formats, by the name the command line uses and by what a checkpoint says of itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.formats import (
    auto_round,
    awq,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    compressed_mixed,
    compressed_mxfp4,
    dense,
    fp8,
    fp8_block,
    gptq,
    modelopt,
    modelopt_mixed,
    modelslim,
)
from quantkit.checkpoint.formats.base import Format
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.grids.schemes import Scheme

FORMATS: tuple[Format, ...] = (
    dense.FORMAT,
    fp8_block.WITH_FP4,
    fp8_block.WITH_FP4_32,
    fp8_block.FORMAT,
    fp8_block.MX,
    awq.FORMAT,
    *gptq.FORMATS,
    compressed_int4.FORMAT,
    compressed_int4.W4A8,
    compressed_fp4.FORMAT,
    compressed_fp4.W4A4,
    compressed_int8.FORMAT,
    *compressed_int8.OTHERS,
    compressed_int4.INT8_WORDS,
    compressed_mxfp4.FORMAT,
    compressed_mxfp4.W4A4,
    compressed_mixed.FORMAT,
    *fp8.FORMATS,
    modelopt.FORMAT,
    modelopt.W4A4,
    modelopt_mixed.FORMAT,
    modelslim.FORMAT,
    compressed_mxfp4.PUBLISHED,
    auto_round.FORMAT,
)


def find_format(name: str, scheme: Scheme) -> Format:
    """The format called `name` on the command line that holds the scheme's weights."""
    named = [format for format in FORMATS if format.name == name]
    if not named:
        raise UsageError(
            f"format {name!r} is not known",
            f"choose one of {', '.join(dict.fromkeys(format.name for format in FORMATS))}",
        )
    holders = [format for format in named if format.holds(scheme.weight)]
    bits = scheme.activation_bits
    for format in sorted(holders, key=lambda one: one.activation_bits_of(scheme.weight) != bits):
        return format
    raise QuantkitError(
        f"format {name} cannot hold {scheme.name}", f"use --format {' or '.join(scheme.formats)}"
    )


def detect_format(path: Path, config: Mapping[str, Any], side: Mapping[str, Any]) -> Format:
    """The one format that config.json, and the files of SIDE_FILES next to it, declare."""
    found = [format for format in FORMATS if format.detect(config, side)]
    if len(found) == 1:
        return found[0].of_checkpoint(config, side)
    if found:
        said = " and ".join(sorted({format.name for format in found}))
        raise QuantkitError(
            f"{path} says two things of its quantization: {said}",
            "keep the files of one format only",
        )
    block = config.get("quantization_config") or {}
    method = " ".join(
        str(block[key]) for key in ("quant_method", "quant_algo", "format") if key in block
    ) or ", ".join(side)
    readable = ", ".join(dict.fromkeys(f"{format.name} ({format.variant})" for format in FORMATS))
    remedy = f"give the model that it was made from; of quantized ones quantkit reads {readable}"
    raise QuantkitError(
        f"{path} is quantized in a way that quantkit does not read: {method}", remedy
    )
