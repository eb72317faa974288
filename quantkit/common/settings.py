"""Settings as YAML: recipes, engines, hardware, tasks, published figures. A key that is not known,
or stands twice, is an error, so that a typo does not silently give the default; so is a number that
is none, or infinite."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError

Settings = TypeVar("Settings")


class Strict(BaseModel):
    """A part of a file: no key but those that are named, and no change after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, as YAML does: PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} stands twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def find_yaml(name_or_path: str, *folder: str) -> Path | None:
    """A YAML file by its path, or by its name without .yaml where it ships with quantkit in
    `folder`. None where it is not there. What has a slash is a path, whatever it ends in."""
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    path = Path(name_or_path) if is_path else asset(*folder) / f"{name_or_path}.yaml"
    try:
        return path if path.is_file() else None
    except OSError:  # a name that no file can have
        return None


def read_yaml(path: Path, kind: type[Settings], remedy: str) -> Settings:
    """The file as a `kind`: a model, or a dict or tuple of models. Raises QuantkitError with the
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
    ) as error:  # ValueError: no such date, not UTF-8, not as `kind` says
        raise QuantkitError(f"{path} is not valid: {_fault(error)}", remedy) from error


def _fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
