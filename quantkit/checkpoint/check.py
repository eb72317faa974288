"""The tensors of a checkpoint against what its format says a quantized linear consists of, from
headers alone.

Every tensor must be a part of a quantized linear or a plain float tensor: a scale without its
weight, a weight without its scale, a wrong shape or dtype, a second format mixed in, each is one
QuantkitError naming the tensor. One mixture is published and
read: linears that the checkpoint declares unquantized may be left as DeepSeek's FP8 blocks, which
say of themselves what they are (NVIDIA's script for DeepSeek leaves the MTP layer as it was in the
source).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.checkpoint.formats.base import FLOAT_DTYPES, Format
from quantkit.checkpoint.header import TensorInfo, TensorSpec
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError
from quantkit.grids.schemes import Grid

CACHE_PARTS = re.compile(
    r".*\.(?:[qkv]_(?:scale|zero_point)|kv_cache_(?:scale|offset)|fa_[qkv]\.(?:scale|offset))"
)
"""Names of tensors with which engines quantize a cache: no part of a weight, and not used here.
fa_*: of latents, ModelSlim's FAKQuant."""
_IDS = (torch.int64, torch.int32)
"""Of tables of ids, as models that route by token have them."""
MASK = "t2d"
"""The model's tokens among which a head of EAGLE-3 guesses: bool [vocab]."""
_CODES = (
    ".weight",
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_zero_point",
    ".weight_shape",
    ".g_idx",
    ".weight_g_idx",
)
"""Tensors of whole numbers that are parts of a packed weight."""
_AGAIN = "download the checkpoint again, or ask its publisher"


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear stored quantized: its format, logical shape (N, K), grid, and the names of its
    tensors."""

    format: Format
    shape: tuple[int, int]
    grid: Grid | None
    tensors: tuple[str, ...]


def quantized_linears(
    path: Path,
    format: Format,
    left: Format,
    grid: Grid | None,
    ignored: Callable[[str], bool] | None,
    tensors: Mapping[str, TensorInfo],
) -> dict[str, QuantizedLinear]:
    """Every quantized linear by module name; modules that are `ignored`, declared unquantized, may
    be in the format `left`.

    Raises QuantkitError where tensors are missing, superfluous or malformed.
    """
    linears: dict[str, QuantizedLinear] = {}
    for tensor in tensors.values():
        module, own = format.quantized_module(tensor), format
        if module is None and ignored is not None:
            module, own = left.quantized_module(tensor), left
            if module is not None and not ignored(module):
                continue
        if module is None:
            continue
        if len(tensor.shape) != 2:
            raise QuantkitError(
                f"{tensor.name} in {path / tensor.shard} is quantized but has shape "
                f"{_shape(tensor.shape)}",
                _AGAIN,
            )
        linears[module] = quantized_linear(path, own, grid, tensors, module)
    accounted = {name for linear in linears.values() for name in linear.tensors}
    for tensor in tensors.values():
        if tensor.name not in accounted:
            _check_plain(path, format, tensor)
    return linears


def quantized_linear(
    path: Path, format: Format, grid: Grid | None, tensors: Mapping[str, TensorInfo], module: str
) -> QuantizedLinear:
    """The linear `module` that `format` finds quantized. Raises QuantkitError naming the first part
    that is missing or malformed."""
    shape, own_grid = format.stored(module, tensors, grid)
    names = []
    for part in format.parts(module, shape, own_grid):
        name = module + part.suffix
        tensor = tensors.get(name)
        if tensor is None:
            if part.required:
                told = (
                    f"{name} is missing from {path}, and {module} cannot be decoded without it "
                    "as config.json describes it"
                )
                raise QuantkitError(
                    f"{told} (its codes are in "
                    f"{tensors[format.main_tensor(module, tensors)].shard})",
                    _AGAIN,
                )
            continue
        one = part.shape in ((), (1,)) and tensor.shape in ((), (1,))  # as producers please
        if tensor.shape != part.shape and not one:
            raise QuantkitError(
                f"{name} in {path / tensor.shard} has shape {_shape(tensor.shape)}, expected "
                f"{_shape(part.shape)}",
                _AGAIN,
            )
        if tensor.dtype not in part.dtypes:
            raise QuantkitError(
                f"{name} in {path / tensor.shard} is {dtype_name(tensor.dtype)}, expected "
                f"{' or '.join(map(dtype_name, part.dtypes))}",
                _AGAIN,
            )
        names.append(name)
    return QuantizedLinear(format, shape, own_grid, tuple(names))


def _check_plain(path: Path, format: Format, tensor: TensorInfo) -> None:
    if tensor.name.endswith(format.own_suffixes):
        raise QuantkitError(
            f"{tensor.name} in {path / tensor.shard} belongs to no quantized weight", _AGAIN
        )
    if not is_plain(tensor):
        raise QuantkitError(
            f"{tensor.name} in {path / tensor.shard} is {dtype_name(tensor.dtype)}, which "
            f"{format.name} ({format.variant}) does not have",
            "formats are mixed, or config.json is not the one of these weights",
        )


def is_plain(tensor: TensorSpec) -> bool:
    """Whether a tensor may be part of no quantized linear, by its dtype: a float, a table of ids, a
    mask of them, what a cache is quantized with."""
    is_table = tensor.dtype in _IDS and not tensor.name.endswith(_CODES)
    is_mask = tensor.dtype == torch.bool and tensor.name == MASK
    return (
        tensor.dtype in FLOAT_DTYPES
        or is_table
        or is_mask
        or CACHE_PARTS.fullmatch(tensor.name) is not None
    )


def check_ignored(
    described: Path,
    format: Format,
    ignored: Callable[[str], bool] | None,
    linears: Mapping[str, QuantizedLinear],
) -> None:
    """Refuse a list of unquantized modules that names a quantized one: engines trust the list and
    would load rubbish.

    described: the file that holds the list. What the list leaves out, the model's table tells:
    `models.stored.check_listed`.
    """
    for module, linear in linears.items():
        if ignored is not None and linear.format is format and ignored(module):
            raise QuantkitError(
                f"{described} lists {module} as unquantized, but its tensors are quantized",
                "correct the list",
            )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
