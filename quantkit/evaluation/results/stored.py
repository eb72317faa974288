"""Files of a results folder as they are read: the folder may come from anyone, or from an older
version. What is not as quantkit writes it is refused in one line that names the place."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import parse_json, read_json, read_text
from quantkit.common.records import json_lines
from quantkit.common.result import JsonObject
from quantkit.common.settings import checked
from quantkit.evaluation.generators.generator import ModelReply, Prompt
from quantkit.evaluation.tasks.definitions import REASONS

T = TypeVar("T")
_REMEDY = "give the --out folder of an evaluation, as quantkit wrote it"


class _Stored(BaseModel):
    """Fields that other code relies on; further ones are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Sample(_Stored):
    task: str
    problem: str
    repeat: int = Field(ge=0, le=2**31)
    correct: bool
    reason: str = Field(pattern=rf"^({'|'.join(REASONS)})$")
    answer: str | None
    detail: str
    prompt_tokens: int = Field(0, ge=0, le=2**53)
    completion_tokens: int = Field(ge=0, le=2**53)
    finish_reason: str = "stop"
    think_open: bool | None = None
    reasoning: str | None = None
    text: str


class _Part(_Stored):
    role: str
    content: str


class _Prompt(_Stored):
    task: str
    problem: str
    prompt: list[_Part] = Field(min_length=1)


class _Generation(_Stored):
    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float
    top_p: float
    max_tokens: int | None
    stop: list[str]


class _Facts(_Stored):
    generation: _Generation
    task: str
    protocol: str
    prompt: str
    system: str | None
    data: str
    shots: str | None
    seed: int
    model: JsonObject


class _TaskFigures(_Stored):
    facts: _Facts | None = None  # None: no sample could be scored


class _Results(_Stored):
    model: str
    hardware: str = "not known"
    results: dict[str, _TaskFigures]


class _Request(_Stored):
    task: str | None = None
    data_dir: str | None = None
    model: str | None = None


class _JournalHead(_Stored):
    facts: _Facts
    request: _Request = _Request()


_Key: Any = tuple[str, Annotated[int, Field(ge=0, le=2**31, strict=True)]]


def read_results(path: Path) -> JsonObject:
    """results.json. Raises QuantkitError."""
    found = read_json(path, limit=1 << 30)
    checked(found, _Results, str(path), _REMEDY)
    return found


def read_samples(path: Path) -> list[JsonObject]:
    """samples.jsonl. Raises QuantkitError."""
    return _rows(path, _Sample)


def read_prompts(path: Path) -> list[JsonObject]:
    """prompts.jsonl. Raises QuantkitError."""
    return _rows(path, _Prompt)


def _rows(path: Path, kind: type[_Stored]) -> list[JsonObject]:
    rows = []
    for where, row in json_lines(path):
        checked(row, kind, where, _REMEDY)
        rows.append(row)
    return rows


def read_list(path: Path, kind: type[T]) -> T:
    """looks.json or order.json, which can be made again. Raises QuantkitError."""
    try:
        return checked(parse_json(read_text(path)), kind, str(path), "remove that file")
    except ValueError as error:
        raise QuantkitError(f"{path} is not valid JSON ({error})", "remove that file") from error


def read_journal_head(path: Path) -> tuple[JsonObject, JsonObject]:
    """(facts, request) of a journal of replies. Raises QuantkitError."""
    for where, head in json_lines(path):
        checked(head, _JournalHead, where, _REMEDY)
        return head["facts"], head.get("request", {})
    raise QuantkitError(f"{path} is empty", _REMEDY)


def read_journal_rows(path: Path) -> Iterator[tuple[tuple[str, int] | Prompt, ModelReply]]:
    """Every reply with its problem and repeat, or with the prompt by which the model is recognised.
    Raises QuantkitError."""
    for where, row in itertools.islice(json_lines(path), 1, None):
        probe = row.pop("probe", None)
        key: tuple[str, int] | Prompt
        if probe is None:
            key = checked((row.pop("problem", None), row.pop("repeat", None)), _Key, where, _REMEDY)
        else:
            key = checked(row.get("prompt"), Prompt, where, _REMEDY)
        reply = row if probe is None else probe
        reply = {"index": -1} | reply if isinstance(reply, dict) else reply
        yield key, checked(reply, ModelReply, where, _REMEDY)
