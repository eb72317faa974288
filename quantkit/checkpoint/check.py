"""Validates a checkpoint's quantization config and tensors from headers alone.

Every tensor must be part of a quantized linear or an unquantized float tensor. A scale without its
weight, a weight without its scale, a wrong shape or dtype, or a tensor of a second format raises a
QuantkitError that names the tensor. One published exception is accepted: linears declared
unquantized may be stored as DeepSeek's FP8 blocks (NVIDIA's script for DeepSeek leaves the MTP
layer as it was in the source).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import torch

from quantkit.checkpoint.formats.base import FLOAT_DTYPES, NGRAM_TABLE, Format
from quantkit.checkpoint.header import TensorInfo, TensorSpec
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid

CACHE_SCALES = re.compile(
    r".*\.(?:[qkv]_(?:scale|zero_point)|kv_cache_(?:scale|offset)|fa_[qkv]\.(?:scale|offset))"
)
"""Scales of a quantized KV cache: not part of a weight, and not used here. fa_*: of the latent KV
(ModelSlim's FAKQuant)."""
_ID_DTYPES = (torch.int64, torch.int32)
"""Of id tables, as hash-routed models have them."""
DRAFT_VOCAB_MASK = "t2d"
"""The target model's tokens that an EAGLE-3 head can draft: bool [vocab]."""
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
"""Integer tensors that are parts of a packed weight."""
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
    unquantized_format: Format,
    grid: Grid | None,
    ignored: Callable[[str], bool] | None,
    tensors: Mapping[str, TensorInfo],
) -> dict[str, QuantizedLinear]:
    """Every quantized linear by module name; `ignored` modules, declared unquantized, may be stored
    in `unquantized_format`.

    Raises QuantkitError where tensors are missing, superfluous or malformed.
    """
    linears: dict[str, QuantizedLinear] = {}
    for tensor in tensors.values():
        module, own = format.quantized_module(tensor), format
        if module is None and ignored is not None:
            module, own = unquantized_format.quantized_module(tensor), unquantized_format
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
            _check_unquantized(path, format, tensor)
    return linears


def quantized_linear(
    path: Path, format: Format, grid: Grid | None, tensors: Mapping[str, TensorInfo], module: str
) -> QuantizedLinear:
    """The quantized linear `module` of `format`. Raises QuantkitError naming the first part that is
    missing or malformed."""
    shape, own_grid = format.stored(module, tensors, grid)
    names = []
    for part in format.parts(module, shape, own_grid):
        name = module + part.suffix
        tensor = tensors.get(name)
        if tensor is None:
            if part.required:
                raise QuantkitError(
                    f"{name} is missing from {path}, and {module} cannot be decoded without it "
                    "as config.json describes it (its codes are in "
                    f"{tensors[format.main_tensor(module, tensors)].shard})",
                    _AGAIN,
                )
            continue
        # Producers write scalars as [] or [1].
        scalar = part.shape in ((), (1,)) and tensor.shape in ((), (1,))
        if tensor.shape != part.shape and not scalar and not part.any_shape:
            raise QuantkitError(
                f"{name} in {path / tensor.shard} has shape {_shape(tensor.shape)}, expected "
                f"{_shape(part.shape)}",
                f"quantkit check {path} says whether the files are wrong or config.json",
            )
        if tensor.dtype not in part.dtypes:
            raise QuantkitError(
                f"{name} in {path / tensor.shard} is {dtype_name(tensor.dtype)}, expected "
                f"{' or '.join(map(dtype_name, part.dtypes))}",
                f"quantkit check {path} says whether the files are wrong or config.json",
            )
        names.append(name)
    return QuantizedLinear(format, shape, own_grid, tuple(names))


def _check_unquantized(path: Path, format: Format, tensor: TensorInfo) -> None:
    if tensor.name.endswith(format.own_suffixes) and not NGRAM_TABLE.search(tensor.name):
        raise QuantkitError(
            f"{tensor.name} in {path / tensor.shard} belongs to no quantized weight", _AGAIN
        )
    if not is_unquantized(tensor):
        raise QuantkitError(
            f"{tensor.name} in {path / tensor.shard} is {dtype_name(tensor.dtype)}, which "
            f"{format.name} ({format.variant}) does not have",
            "formats are mixed, or config.json is not the one of these weights",
        )


def is_unquantized(tensor: TensorSpec) -> bool:
    """Whether a tensor of this dtype and name may lie outside quantized linears: floats, id tables,
    tables of n-grams, the draft vocabulary mask, KV cache scales."""
    is_id_table = tensor.dtype in _ID_DTYPES and not tensor.name.endswith(_CODES)
    is_mask = tensor.dtype == torch.bool and tensor.name == DRAFT_VOCAB_MASK
    return (
        tensor.dtype in FLOAT_DTYPES
        or is_id_table
        or is_mask
        or CACHE_SCALES.fullmatch(tensor.name) is not None
        or NGRAM_TABLE.search(tensor.name) is not None
    )


def check_ignored(
    description_file: Path,
    format: Format,
    ignored: Callable[[str], bool] | None,
    linears: Mapping[str, QuantizedLinear],
) -> None:
    """Raise QuantkitError where the list of unquantized modules names a quantized one: engines
    trust the list and would load garbage.

    description_file: holds the list. Modules missing from it are found by
    `models.stored_parameters.check_listed`, which knows the model's table.
    """
    for module, linear in linears.items():
        if ignored is not None and linear.format is format and ignored(module):
            raise QuantkitError(
                f"{description_file} lists {module} as unquantized, but its tensors are quantized",
                "correct the list",
            )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


_MODULE_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules")
_OBJECTS = ("config_groups", "quantization")
_TEXTS = ("quant_method", "quant_algo", "format", "model_quant_type")


def check_description(
    path: Path, config: Mapping[str, Any], side: Mapping[str, Mapping[str, Any]]
) -> Path:
    """The file that describes the quantization. Raises QuantkitError naming the file and the key
    where a value has a type that no format reads."""
    block = config.get("quantization_config")
    if block is not None and not isinstance(block, dict):
        raise _wrong_type(path / "config.json", "quantization_config", block, "an object")
    described = [
        ("config.json", "quantization_config.", block or {}),
        *((name, "", value) for name, value in side.items()),
    ]
    for name, prefix, values in described:
        _check_types(path / name, prefix, values)
        if isinstance(values.get("quantization"), dict):
            _check_types(path / name, f"{prefix}quantization.", values["quantization"])
    return path / ("config.json" if block or not side else next(iter(side)))


def _check_types(file: Path, prefix: str, values: Mapping[str, Any]) -> None:
    for key in _OBJECTS:
        if not isinstance(values.get(key) or {}, dict):
            raise _wrong_type(file, prefix + key, values[key], "an object")
    for key in _TEXTS:
        if not isinstance(values.get(key) or "", str):
            raise _wrong_type(file, prefix + key, values[key], "a text")
    for key in _MODULE_LISTS:
        entries = values.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise _wrong_type(file, prefix + key, entries, "a list of module names")
        for entry in entries:
            if entry.startswith("re:"):
                _check_pattern(file, prefix + key, entry, entry[3:])
    gptq_rules = values.get("dynamic")
    for entry in gptq_rules if isinstance(gptq_rules, dict) else ():
        _check_pattern(file, prefix + "dynamic", entry, entry.removeprefix("+:").removeprefix("-:"))


def _check_pattern(file: Path, key: str, entry: str, pattern: str) -> None:
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise QuantkitError(
            f"{file} has {entry!r} in {key}, which is not a regular expression ({error})",
            "correct that file",
        ) from error


def _wrong_type(file: Path, key: str, value: Any, wanted: str) -> QuantkitError:
    return QuantkitError(
        f"{file} has {key} = {value!r:.60}, expected {wanted}", "download or copy that file again"
    )
