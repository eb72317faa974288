"""Files of a results folder as they are read: the folder may come from anyone, or from an older
version. What is not as quantkit writes it is refused in one line that names the place."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file, parse_json, read_json, read_text
from quantkit.common.settings import checked
from quantkit.evaluation.generators.generator import ModelReply, Prompt
from quantkit.evaluation.tasks.definitions import REASONS

_REMEDY = "give the --out folder of an evaluation, as quantkit wrote it"
_LONGEST_LINE = 256 << 20
"""Limit in bytes of one sample."""


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
    completion_tokens: int = Field(ge=0, le=2**53)
    reasoning: str | None = None
    text: str


class _Generation(_Stored):
    temperature: float


class _Facts(_Stored):
    generation: _Generation


class _TaskFigures(_Stored):
    facts: _Facts | None = None  # None: no sample could be scored


class _Results(_Stored):
    model: str
    hardware: str = "not known"
    results: dict[str, _TaskFigures]


class _Parameters(_Generation):
    model_config = ConfigDict(extra="forbid", strict=True)

    top_p: float
    max_tokens: int | None
    stop: list[str]


class _JournalFacts(_Stored):
    generation: _Parameters
    task: str
    protocol: str
    prompt: str
    system: str | None
    data: str
    shots: str | None
    seed: int
    model: dict[str, Any]


class _Request(_Stored):
    task: str | None = None
    data_dir: str | None = None
    model: str | None = None


class _JournalHead(_Stored):
    facts: _JournalFacts
    request: _Request = _Request()


class _Reply(_Stored):
    problem: str
    repeat: int = Field(ge=0, le=2**31)


def read_results(path: Path) -> dict[str, Any]:
    """results.json. Raises QuantkitError."""
    found = read_json(path, limit=1 << 30)
    checked(found, _Results, str(path), _REMEDY)
    return found


def read_samples(path: Path) -> list[dict[str, Any]]:
    """samples.jsonl. Raises QuantkitError."""
    return [_row(path, number, line, _Sample) for number, line in _lines(path)]


def read_looks(path: Path) -> dict[str, list[list[int]]]:
    """looks.json: numbers of samples compared, by pair of runs. Raises QuantkitError."""
    return checked(read_json(path), dict[str, list[list[int]]], str(path), "remove that file")


def read_order(path: Path) -> list[str]:
    """order.json. Raises QuantkitError."""
    try:
        found = parse_json(read_text(path))
    except ValueError as error:
        raise QuantkitError(f"{path} is not valid JSON ({error})", "remove that file") from error
    return checked(found, list[str], str(path), "remove that file")


def read_journal_head(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts, request) of a journal of replies. Raises QuantkitError."""
    for number, line in _lines(path):
        head = _row(path, number, line, _JournalHead)
        return head["facts"], head.get("request", {})
    raise QuantkitError(f"{path} is empty", _REMEDY)


def read_journal_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of replies with "problem", "repeat" and "reply", and rows with "probe" and "prompt".
    Raises QuantkitError."""
    for number, line in _lines(path):
        if number == 1:
            continue
        row, where = _parsed(path, number, line), f"{path}, line {number}"
        if "probe" in row:
            reply = _reply(row["probe"], where)
            yield {"probe": reply, "prompt": checked(row.get("prompt"), Prompt, where, _REMEDY)}
            continue
        checked(row, _Reply, where, _REMEDY)
        key = {name: row.pop(name) for name in ("problem", "repeat")}
        yield key | {"reply": _reply(row, where)}


def _reply(row: Any, where: str) -> ModelReply:
    return checked(
        {"index": -1, **row} if isinstance(row, dict) else row, ModelReply, where, _REMEDY
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1; only LF ends one."""
    with os.fdopen(open_file(path), "rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise QuantkitError(
                    f"{path}, line {number} has more than {_LONGEST_LINE >> 20} MiB", _REMEDY
                )
            if line.strip():
                yield number, line


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return _object(parse_json(line.decode()))
    except ValueError as error:
        raise QuantkitError(
            f"{path}, line {number} is damaged ({error})", "restore the file, or remove that line"
        ) from error


def _row(path: Path, number: int, line: bytes, kind: type[_Stored]) -> dict[str, Any]:
    row = _parsed(path, number, line)
    checked(row, kind, f"{path}, line {number}", _REMEDY)
    return row


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value
