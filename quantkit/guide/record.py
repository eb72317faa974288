"""go.json: the request, the choice and the finished steps. It is replaced atomically, so that a
kill leaves the last state."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from quantkit import __version__
from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.common.result import JsonObject
from quantkit.common.settings import checked

NAME = "go.json"


@dataclass(frozen=True)
class Agreed:
    """The choice that was agreed to. devices: the number that share the model."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scheme: str
    engine: str
    devices: int


class _Step(BaseModel):
    at: str
    found: JsonObject


class _File(BaseModel):
    quantkit: str
    asked: JsonObject
    choice: Agreed | None
    steps: dict[str, _Step]


_REMEDY = "remove that file, and steps that are done are found again"


class Record:
    """The record of one output folder. request: everything that the outcome depends on, as JSON."""

    def __init__(self, out: Path, request: JsonObject) -> None:
        """Raises QuantkitError if the folder was begun with other settings, or its file is
        damaged."""
        self._path = out / NAME
        found = read_json(self._path) if self._path.exists() else {}
        if found:
            checked(found, _File, str(self._path), _REMEDY)
        if found and _begun(out, found):
            _check_same(self._path, found, request)
        elif found and found["asked"] != request:
            found = {}
        self._state: JsonObject = found or {
            "quantkit": __version__,
            "asked": request,
            "choice": None,
            "steps": {},
        }

    @property
    def choice(self) -> Agreed | None:
        """None before agreement."""
        chosen = self._state["choice"]
        return None if chosen is None else Agreed(**chosen)

    def agree(self, choice: Agreed) -> None:
        self._state["choice"] = asdict(choice)
        self._write()

    def done(self, step: str) -> JsonObject | None:
        """The result of a finished step, else None."""
        entry: JsonObject | None = self._state["steps"].get(step)
        return None if entry is None else dict(entry["found"])

    def when(self, step: str) -> str:
        return str(self._state["steps"][step]["at"])

    def finish(self, step: str, found: JsonObject) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._state["steps"][step] = {"at": now, "found": found}
        self._write()

    def undo(self, steps: tuple[str, ...]) -> None:
        """Forget steps whose input changed."""
        for step in steps:
            self._state["steps"].pop(step, None)
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._state, indent=1) + "\n")


def _begun(out: Path, found: JsonObject) -> bool:
    """Whether another choice would discard work."""
    return bool(found["steps"]) or any(out.glob("*.partial/*"))


def _check_same(path: Path, found: JsonObject, request: JsonObject) -> None:
    keys = dict.fromkeys([*request, *found["asked"]])
    other = [key for key in keys if found["asked"].get(key) != request.get(key)]
    if other:
        before = ", ".join(f"{key} {_shown(found['asked'].get(key))}" for key in other)
        raise QuantkitError(
            f"{path.parent} was begun with {before}", "give the same to go on, or another --out"
        )


def _shown(value: Any) -> str:
    return (
        "not given"
        if value is None
        else json.dumps(value)
        if isinstance(value, bool)
        else str(value)
    )
