"""Which format a checkpoint may be converted to, and which grid its weights keep."""

import torch

from quantkit.checkpoint.formats import FORMATS, compressed_int4, dense
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.checkpoint.formats.nvfp4 import Nvfp4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.grids.schemes import Grid, Mxfp4Grid, grid_label


def target_name(format: str | None, dtype: str | None) -> str:
    if (format is None) == (dtype is None):
        raise QuantkitError(
            "convert takes either a format or a dtype",
            "give --format F, or --dtype bf16 for plain weights",
        )
    return format if format is not None else dense.FORMAT.name


def find_target(checkpoint: Checkpoint, name: str, grid: Grid | None) -> Format:
    named = [format for format in FORMATS if format.name == name]
    if not named:
        raise UsageError(
            f"format {name!r} is not known",
            f"choose one of {', '.join(dict.fromkeys(format.name for format in FORMATS))}",
        )
    if name == dense.FORMAT.name:
        return named[0]
    source = checkpoint.format
    if grid is None:
        fault = f"{checkpoint.path} is {source.name}, and {name} holds rounded weights"
        raise QuantkitError(fault, "convert does not round: use quantkit quantize")
    if isinstance(source, Gptq) and source.desc_act:
        fault = (
            f"{checkpoint.path} is GPTQ with desc_act: its scales belong to scattered inputs, "
            f"and {name} has groups in order"
        )
        raise QuantkitError(fault, "--dtype bf16 makes it plain")
    bits = activation_bits(checkpoint)
    able = [format for format in FORMATS if _takes(format, grid)]
    for format in sorted(
        able,
        key=lambda one: (not one.holds(grid), one.activation_bits_of(grid) != bits, one is source),
    ):
        if format.name != name:
            continue
        if format is source:
            raise QuantkitError(
                f"{checkpoint.path} is already {name} {format.variant}",
                "there is nothing to convert",
            )
        exact = format is compressed_int4.FORMAT and source.scale_dtype == torch.float16
        return compressed_int4.FP16_SCALES if exact else format
    holders = ", ".join(dict.fromkeys(format.name for format in able))
    fault = f"{name} cannot hold the weights of {checkpoint.path} ({grid_label(grid)})"
    raise QuantkitError(
        fault, f"formats that can: {holders}" if holders else "--dtype bf16 makes it plain"
    )


def _takes(format: Format, grid: Grid) -> bool:
    """Whether it has a place for such weights: what holds them, and NVFP4 for the values of
    MXFP4."""
    return format.holds(grid) or (isinstance(grid, Mxfp4Grid) and isinstance(format, Nvfp4))


def common_grid(checkpoint: Checkpoint) -> Grid | None:
    grids = {
        linear.grid for linear in checkpoint.linears.values() if linear.format is checkpoint.format
    }
    if len(grids) > 1:
        fault = f"{checkpoint.path} has weights on {len(grids)} grids"
        raise QuantkitError(
            fault, "only checkpoints with one can be converted; --dtype bf16 makes it plain"
        )
    return next(iter(grids), None)


def activation_bits(checkpoint: Checkpoint) -> int:
    """Of what its quantized linears read: 8 or 4 where some round that, 16 elsewhere."""
    return min((checkpoint.activation_bits(module) for module in checkpoint.linears), default=16)


def plain_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What a decoded weight is stored in where no dtype was asked for: the model's own 16 bits."""
    said = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return torch.float16 if said == "float16" else torch.bfloat16
