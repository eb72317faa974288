"""What a checkpoint says of its own quantization, checked for type before a format reads it. The
files may say anything."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

from quantkit.common.errors import QuantkitError

_MODULE_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules")
_OBJECTS = ("config_groups", "quantization")
_TEXTS = ("quant_method", "quant_algo", "format", "model_quant_type")


def check_description(
    path: Path, config: Mapping[str, Any], side: Mapping[str, Mapping[str, Any]]
) -> Path:
    """The file that describes the quantization. Raises QuantkitError naming the file and the key
    with a value of a type that none reads."""
    block = config.get("quantization_config")
    if block is not None and not isinstance(block, dict):
        raise _fault(path / "config.json", "quantization_config", block, "an object")
    described = [
        ("config.json", "quantization_config.", block or {}),
        *((name, "", value) for name, value in side.items()),
    ]
    for name, prefix, values in described:
        _check(path / name, prefix, values)
        if isinstance(values.get("quantization"), dict):
            _check(path / name, f"{prefix}quantization.", values["quantization"])
    return path / ("config.json" if block or not side else next(iter(side)))


def _check(file: Path, prefix: str, values: Mapping[str, Any]) -> None:
    for key in _OBJECTS:
        if not isinstance(values.get(key) or {}, dict):
            raise _fault(file, prefix + key, values[key], "an object")
    for key in _TEXTS:
        if not isinstance(values.get(key) or "", str):
            raise _fault(file, prefix + key, values[key], "a text")
    for key in _MODULE_LISTS:
        entries = values.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise _fault(file, prefix + key, entries, "a list of module names")
        for entry in entries:
            if entry.startswith("re:"):
                _check_pattern(file, prefix + key, entry, entry[3:])
    of_gptq = values.get("dynamic")
    for entry in of_gptq if isinstance(of_gptq, dict) else ():
        _check_pattern(file, prefix + "dynamic", entry, entry.removeprefix("+:").removeprefix("-:"))


def _check_pattern(file: Path, key: str, entry: str, pattern: str) -> None:
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise QuantkitError(
            f"{file} has {entry!r} in {key}, which is no regular expression ({error})",
            "correct that file",
        ) from error


def _fault(file: Path, key: str, value: Any, wanted: str) -> QuantkitError:
    return QuantkitError(
        f"{file} has {key} = {value!r:.60}, expected {wanted}", "download or copy that file again"
    )
