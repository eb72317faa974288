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


class Strict(BaseModel):
    """Base of settings models: unknown keys are rejected, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """Rejects repeated keys, as the YAML standard does; PyYAML takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} appears twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def find_yaml(name_or_path: str, *folder: str) -> Path | None:
    """A YAML file by path, or by name without .yaml in `folder` of the shipped files; a name with a
    slash is a path. None if there is no such file."""
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    path = Path(name_or_path) if is_path else asset(*folder) / f"{name_or_path}.yaml"
    try:
        return path if path.is_file() else None
    except OSError:  # not a valid file name
        return None


def read_yaml(path: Path, kind: type[Settings], remedy: str) -> Settings:
    """The file as a `kind`: a model, or a dict or tuple of models. Raises QuantkitError naming the
    file, the place in it and the fault."""
    try:
        return TypeAdapter(kind).validate_python(
            yaml.load(path.read_text(encoding="utf-8"), _Loader)
        )
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: invalid date, not UTF-8, does not match `kind`
        raise QuantkitError(f"{path} is not valid: {_fault(error)}", remedy) from error


def _fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
