"""Settings as YAML: recipes, engines, hardware, tasks, published figures. Unknown or repeated keys
are errors, so that a typo does not silently select the default, and so are NaN and infinite
numbers."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError

Settings = TypeVar("Settings")
_LARGEST = 1 << 20
"""Limit in bytes of a file."""
_SHOWN = 3
"""Faults that one error names."""


class Strict(BaseModel):
    """Base of settings models: unknown keys are rejected, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """Rejects repeated keys, as the YAML standard does; PyYAML takes the last value. Rejects
    aliases, with which a few lines become gigabytes, and keys that are not scalars."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"alias *{alias.anchor}; write the value out", alias.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            scalar = isinstance(key, yaml.ScalarNode)
            if not scalar or key.value in seen:
                fault = f"{key.value} appears twice" if scalar else "a key is not a scalar"
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def find_yaml(name_or_path: str, *folder: str) -> Path | None:
    """A YAML file by name without .yaml in `folder` of the shipped files, or by path; a name with a
    slash is a path. None if there is no such file."""
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    shipped = [] if is_path else [asset(*folder) / f"{name_or_path}.yaml"]
    try:
        return next((path for path in (*shipped, Path(name_or_path)) if path.is_file()), None)
    except OSError:  # not a valid file name
        return None


def read_yaml(path: Path, kind: type[Settings], remedy: str) -> Settings:
    """The file as a `kind`: a model, or a dict or tuple of models. Raises QuantkitError naming the
    file, the place in it and the fault."""
    try:
        with path.open("rb") as file:
            if len(data := file.read(_LARGEST + 1)) > _LARGEST:
                raise ValueError(f"it is larger than {_LARGEST >> 20} MiB")
        return checked(yaml.load(data.decode("utf-8-sig"), _Loader), kind, str(path), remedy)
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: invalid date, not UTF-8
        raise QuantkitError(f"{path} is not valid: {_fault(error)}", remedy) from error


def checked(value: Any, kind: type[Settings], source: str, remedy: str) -> Settings:
    """What was read from `source` as a `kind`. Raises QuantkitError naming the source, the place in
    it and the fault."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except (ValidationError, RecursionError) as error:
        raise QuantkitError(f"{source} is not valid: {_fault(error)}", remedy) from error


def _fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        faults = dict[Any, str]()  # the first of each key
        for one in error.errors():
            place, message = (
                ".".join(map(str, one["loc"])),
                one["msg"].removeprefix("Value error, "),
            )
            faults.setdefault(one["loc"][:1], f"{place}: {message}" if place else message)
        return "; ".join([*faults.values()][:_SHOWN])
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
