"""Rows of a task: shipped with quantkit, from a file below --data-dir, or from a hub (hubs.py).
quantkit ships no public data set.

The hash of the data goes into every result, so that two scores are known to use the same
questions.
"""

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError
from quantkit.common.records import Row
from quantkit.common.records import read_rows as rows_of
from quantkit.evaluation.tasks.definitions import DataSource, Dates, Problem, Setting, Task


@dataclass(frozen=True)
class TaskRows:
    """Rows, their origin, and the SHA-256 of the files' bytes (for a hub's rows: of their JSON)."""

    rows: list[Row]
    origin: str
    sha256: str


def read_rows(task: str, source: DataSource, data_dir: Path | None) -> TaskRows:
    paths, origin = _find_files(source.files, source, data_dir), ""
    if not paths and source.hub is not None and data_dir is None:
        from quantkit.evaluation.tasks import hubs  # httpx: nothing else here needs it

        hub = hubs.hub_name()
        repo = (source.modelscope if hub == "modelscope" else None) or source.hub["path"]
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quantkit"
        name, split = source.hub.get("name"), source.hub["split"]
        paths = hubs.download(repo, name, split, cache / "datasets", hub)
        origin = f"{repo} ({split}) of {hub}"
    if not paths:
        place = f"not below {data_dir}" if data_dir is not None else "no --data-dir given"
        raise QuantkitError(
            f"data of {task} not found: {place}",
            f"put {' or '.join(source.files)} below --data-dir ({source.where})",
        )
    digests = [_digest(path) for path in paths]
    if len(paths) == 1 and (origin or not any("*" in one for one in source.files)):
        return TaskRows(
            [row for _, row in rows_of(paths[0])], origin or str(paths[0]), digests[0].hex()
        )
    rows = [{"file": _subject(path)} | row for path in paths for _, row in rows_of(path)]
    if source.answers:
        further = _find_files(source.answers, source, data_dir)
        digests += [_digest(path) for path in further]
        answers = {row.get("id"): row for path in further for _, row in rows_of(path)}
        rows = [row | answers.get(row.get("id"), {}) for row in rows]
    return TaskRows(
        rows,
        origin or f"{paths[0].parent} ({len(paths)} files)",
        hashlib.sha256(b"".join(digests)).hexdigest(),
    )


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def problems(setting: Setting, find_gold: Callable[[Row], str], rows: list[Row]) -> list[Problem]:
    """Problems in file order; the id is the row number where the file has none. find_gold: as
    `Grader.gold`."""
    found: list[Problem] = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        fields = map_fields(setting.task, row, number)
        if setting.dates is not None and not _in_range(fields, setting.dates):
            continue
        name = str(fields.get("id") or number)
        if name in seen:
            raise QuantkitError(
                f"{setting.task.name}: id {name!r} occurs twice", "give every row its own id"
            )
        seen.add(name)
        try:
            gold = find_gold(fields)
        except QuantkitError as fault:
            raise QuantkitError(
                f"row {number} of {setting.task.name}: {fault.problem}", fault.remedy
            ) from fault
        found.append(Problem(name, fields, gold, str(fields.get("group", ""))))
    if not found:
        raise QuantkitError(
            f"{setting.task.name}: no problem remains",
            "check the data file and the protocol's dates",
        )
    return found


def map_fields(task: Task, row: Row, number: int) -> Row:
    """The row under the task's field names. Of several names the first present is used; optional
    fields may be missing."""

    def first(keys: str | list[str]) -> Any:
        names = [keys] if isinstance(keys, str) else keys
        present = [row[name] for name in names if row.get(name) is not None]
        if not present:
            raise QuantkitError(
                f"row {number} of {task.name} has no field {keys}",
                f"it has {', '.join(sorted(map(str, row)))}",
            )
        return present[0]

    fields: Row = {name: row.get(key) or "" for name, key in task.optional.items()}
    fields |= {name: first(keys) for name, keys in task.fields.items()}
    if task.option_columns:
        fields["options"] = [str(first(column)).strip() for column in task.option_columns]
    if task.right_option is not None:
        right = str(first(task.right_option)).strip()
        fields["options"] = _shuffle([*fields["options"], right], str(fields["problem"]))
        fields["answer"] = fields["options"].index(right)
    return fields


def _shuffle(options: list[str], question: str) -> list[str]:
    """Options in an order that depends on the question only, the same as evalscope's."""
    shuffled = list(options)
    seed = int.from_bytes(hashlib.sha256(question.strip().encode()).digest()[:8], "big")
    random.Random(seed).shuffle(shuffled)
    return shuffled


def stratify(problems: list[Problem], limit: int | None) -> list[Problem]:
    """`limit` problems from all groups in proportion, in file order. A larger limit includes all
    problems of a smaller one."""
    if limit is None or limit >= len(problems):
        return problems
    sizes = Counter(problem.group for problem in problems)
    seen: Counter[str] = Counter()
    places = []
    for number, problem in enumerate(problems):
        places.append(((seen[problem.group] + 0.5) / sizes[problem.group], number))
        seen[problem.group] += 1
    return [
        problems[number] for _, number in sorted(sorted(places)[:limit], key=lambda place: place[1])
    ]


def _in_range(fields: Row, dates: Dates) -> bool:
    return dates.first <= str(fields["date"])[:10] <= dates.last


def _find_files(names: list[str], source: DataSource, data_dir: Path | None) -> list[Path]:
    """The file of a source, or all files of the first name with a * that matches; empty where
    there is none."""
    if data_dir is not None and not data_dir.is_dir():
        raise QuantkitError(
            f"{data_dir} is not a directory",
            "give --data-dir a directory that holds the tasks' files",
        )
    if source.builtin is not None:
        return [asset("eval", *source.builtin.split("/"))]
    if data_dir is None:
        return []
    for name in names:
        found = (
            sorted(data_dir.glob(name))
            if "*" in name
            else [data_dir / f"{name}{ending}" for ending in ("", ".gz")]
        )
        present = [path for path in found if path.is_file()]
        if present:
            return present if "*" in name else present[:1]
    return []


def _subject(path: Path) -> str:
    """Of law_test.csv, and of law/test-00000-of-00001.parquet: law."""
    stem = path.name.split(".")[0]
    by_folder = re.match(r"(?:test|val|validation|dev|train)(?:-|$)", stem)
    return path.parent.name if by_folder else re.sub(r"_(?:test|val|dev)$", "", stem)
