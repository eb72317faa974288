"""Rows of a task: from quantkit itself, from a file below --data-dir, or through the `datasets` extra. quantkit ships no public data set.

Files may be .jsonl, .jsonl.gz or .parquet. The hash of what was read goes into every result, so that two scores are known to be on the
same questions.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.assets import asset
from quantkit.errors import QuantkitError
from quantkit.evaluation.grading.graders import Grader
from quantkit.evaluation.tasks.definitions import DataSource, Dates, Setting, Task
from quantkit.evaluation.tasks.problems import Problem

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskRows:
    """Rows with where they came from and the SHA-256 of the bytes (a hub's rows: of their JSON)."""

    rows: list[Row]
    origin: str
    sha256: str


def read_rows(task: str, source: DataSource, data_dir: Path | None) -> TaskRows:
    path = _find(source, data_dir)
    if path is not None:
        return TaskRows(list(_read_file(path)), str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    if source.hub is not None and data_dir is None:
        return _read_hub(task, source)
    place = f"not below {data_dir}" if data_dir is not None else "no --data-dir given"
    wanted = " or ".join(source.files)
    raise QuantkitError(f"data of {task} not found: {place}", f"put {wanted} below --data-dir ({source.where})")


def problems(setting: Setting, grader: Grader, rows: list[Row]) -> list[Problem]:
    """Problems in file order, ids made unique by row number where the file has none."""
    found: list[Problem] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        fields = map_fields(setting.task, row, number)
        if setting.dates is not None and not _within(fields, setting.dates):
            continue
        name = str(fields.get("id") or number)
        if name in seen:
            raise QuantkitError(f"{setting.task.name}: id {name!r} occurs twice", "give every row its own id")
        seen.add(name)
        found.append(Problem(name, fields, grader.gold(fields), str(fields.get("group", ""))))
    if not found:
        raise QuantkitError(f"{setting.task.name}: no problem is left", "look at the data file and the protocol's dates")
    return found


def map_fields(task: Task, row: Row, number: int) -> Row:
    """The row under the task's field names; a list of names takes the first that the row has, an optional field may be missing."""
    fields: Row = {name: row.get(key) or "" for name, key in task.optional.items()}
    for name, keys in task.fields.items():
        present = [key for key in ([keys] if isinstance(keys, str) else keys) if row.get(key) is not None]
        if not present:
            raise QuantkitError(f"row {number} of {task.name} has no field {keys}", f"it has {', '.join(sorted(row))}")
        fields[name] = row[present[0]]
    return fields


def _within(fields: Row, dates: Dates) -> bool:
    return dates.first <= str(fields["date"])[:10] <= dates.last


def _find(source: DataSource, data_dir: Path | None) -> Path | None:
    if source.builtin is not None:
        return asset("eval", *source.builtin.split("/"))
    if data_dir is None:
        return None
    if not data_dir.is_dir():
        raise QuantkitError(f"{data_dir} is not a directory", "give --data-dir a directory that holds the tasks' files")
    candidates = [data_dir / f"{name}{ending}" for name in source.files for ending in ("", ".gz")]
    return next((path for path in candidates if path.is_file()), None)


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise QuantkitError(f"{path} needs pyarrow", "pip install 'quantkit[datasets]', or convert it to jsonl") from error
        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise QuantkitError(f"{path}:{number} is not JSON ({error})", "one JSON object per line is expected") from error
            if not isinstance(row, dict):
                raise QuantkitError(f"{path}:{number} is not a JSON object", "one JSON object per line is expected")
            yield row


def _read_hub(task: str, source: DataSource) -> TaskRows:
    assert source.hub is not None
    instead = f"put {source.files[0]} below --data-dir ({source.where})" if source.files else "look at the task's hub entry"
    try:
        import datasets
    except ImportError as error:
        raise QuantkitError(
            f"data of {task} not found: no --data-dir given and the datasets extra is not installed",
            f"{instead}, or pip install 'quantkit[datasets]'",
        ) from error
    try:
        rows = [dict(row) for row in datasets.load_dataset(**source.hub)]
    except Exception as error:  # the library raises many kinds, all meaning: not to be had from here
        raise QuantkitError(f"data of {task} cannot be loaded from the hub ({type(error).__name__})", instead) from error
    text = "\n".join(json.dumps(row, sort_keys=True, default=str) for row in rows)
    return TaskRows(rows, f"{source.hub['path']} ({source.hub['split']})", hashlib.sha256(text.encode()).hexdigest())
