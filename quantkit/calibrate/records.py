"""Records of a file or a data set, as they are stored: each with the place that a message about it
names.

.txt and .md are one text. .jsonl, .ndjson and .json hold a record a line, or a list of records,
whatever the name says; .csv and .tsv have a header; .parquet is read through pyarrow. What is no
file may be the id of a data set: from the cache of the `datasets` library where it lies there, else
streamed from the hub.
"""

import csv
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.calibrate.documents import ACCEPTED
from quantkit.common.errors import QuantkitError

Record = tuple[str, Any]
"""A place ("data.jsonl line 3") and what stands there."""

TEXTS = (".txt", ".md")
FILES = (*TEXTS, ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MOST_ROWS = 20_000
"""Rows that are read of a table or a data set: documents are drawn among these."""
_DATA_SET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]+){0,2}")
_GIVE = f"give a {', '.join(FILES[:-1])} or {FILES[-1]} file, or the id of a data set"


def read_records(source: str) -> Iterator[Record]:
    """All records of a file, or the first 20,000 rows of a table or a data set. Raises
    QuantkitError."""
    path = Path(source)
    ending = path.suffix.casefold()
    if ending in FILES or path.exists():
        if path.is_dir():
            raise QuantkitError(f"calibration data {source} is a folder", _GIVE)
        if ending not in FILES:
            raise QuantkitError(
                f"calibration data {source} is none of the files that are read", _GIVE
            )
        return _file(path, ending)
    if not _DATA_SET.fullmatch(source) or source.startswith("."):
        raise QuantkitError(f"calibration data {source} does not exist", _GIVE)
    return _data_set(source)


def read_text(path: Path) -> str:
    """UTF-8, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise QuantkitError(
            f"cannot read calibration data {path}: {error.strerror}", _GIVE
        ) from error
    except UnicodeDecodeError as error:
        raise QuantkitError(
            f"calibration data {path} is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from error


def _file(path: Path, ending: str) -> Iterator[Record]:
    if ending in TEXTS:
        return iter([(str(path), read_text(path))])
    if ending in (".csv", ".tsv"):
        return _table(path, "\t" if ending == ".tsv" else ",")
    return _parquet(path) if ending == ".parquet" else _json(path)


def _json(path: Path) -> Iterator[Record]:
    text = read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        yield from _listed(path, text, text.index("[") + 1)
        return
    try:
        value = json.loads(text) if start == "{" else None
    except ValueError:  # more than one value: a record a line
        value = None
    except RecursionError as error:
        raise QuantkitError(f"{path} is nested too deep", f"give records of {ACCEPTED}") from error
    if value is None:
        yield from _lines(path, text)
        return
    inner = [
        (name, one)
        for name, one in value.items()
        if isinstance(one, list) and one and all(isinstance(row, dict) for row in one)
    ]
    is_record = {name.casefold() for name in value} & {
        "messages",
        "conversations",
        "conversation",
        "text",
        "prompt",
    }
    if len(inner) == 1 and not is_record:  # {"data": [...]}
        name, rows = inner[0]
        yield from ((f"{path} {name}[{number}]", row) for number, row in enumerate(rows))
    else:
        yield f"{path} line 1", value


def _lines(path: Path, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", _parsed(f"{path} line {number}", line)


def _parsed(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuantkitError(
            f"{place} is not JSON ({error})",
            f"correct or remove it; a line is a record of {ACCEPTED}",
        ) from error


def _listed(path: Path, text: str, at: int) -> Iterator[Record]:
    """Elements of a list, each with the line that it begins on."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    blank = re.compile(r"[\s,]*")
    while True:
        at = blank.match(text, at).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise QuantkitError(
                f"{path} line {line} is not JSON ({error})", "correct it, or give a record a line"
            ) from error
        yield f"{path} line {line}", value


def _table(path: Path, delimiter: str) -> Iterator[Record]:
    text = read_text(path)
    csv.field_size_limit(1 << 30)
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
    if rows.fieldnames and len(rows.fieldnames) == 1 and ";" in rows.fieldnames[0]:
        rows = csv.DictReader(text.splitlines(keepends=True), delimiter=";")
    try:
        for number, row in enumerate(rows):
            if number == _MOST_ROWS:
                return
            if None in row:
                raise QuantkitError(
                    f"{path} line {rows.line_num} has more fields than the header",
                    "put texts with commas in quotes",
                )
            yield f"{path} line {rows.line_num}", row
    except csv.Error as error:
        raise QuantkitError(
            f"{path} line {rows.line_num} is no CSV: {error}",
            "save it as CSV with a header and quoted texts",
        ) from error


def _parquet(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise QuantkitError(f"cannot read calibration data {path}: it does not exist", _GIVE)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise QuantkitError(
            f"calibration data {path} needs pyarrow, which is not installed",
            "pip install quantkit[datasets], or save it as .jsonl",
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    if number == _MOST_ROWS:
                        return
                    number += 1
                    yield f"{path} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise QuantkitError(
            f"{path} is no Parquet file that can be read: {error}", "save it again, or as .jsonl"
        ) from error


def _data_set(name: str) -> Iterator[Record]:
    """`id`, `id:split` or `id:config:split`."""
    try:
        import datasets
    except ImportError as error:
        raise QuantkitError(
            f"calibration data {name} is not a file, and the `datasets` library is not installed",
            "give a file, or pip install quantkit[datasets]",
        ) from error
    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    options = {"path": identifier, "name": rest[0] if len(rest) > 1 else None, "split": split}
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # retries would be told line by line
    try:
        rows = _cached(datasets, options) or datasets.load_dataset(**options, streaming=True).take(
            _MOST_ROWS
        )
        for number, row in zip(range(_MOST_ROWS), rows):
            yield f"data set {name} row {number + 1}", row
    except (
        Exception
    ) as error:  # the library raises its own errors, and those of several network clients
        told = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        lost = datasets.config.HF_HUB_OFFLINE and not _in_cache(datasets, identifier)
        problem = (
            f"data set {name} is not in the cache, and this is offline"
            if lost
            else f"data set {name} cannot be had: {told}"
        )
        raise QuantkitError(problem, "check its id and split, or give a file") from error


def _cached(datasets: Any, options: dict[str, Any]) -> Any:
    """The data set as an earlier download left it in the cache, without asking the hub; None where
    it is not there."""
    if not _in_cache(datasets, str(options["path"])):
        return None
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        return datasets.load_dataset(**options)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _in_cache(datasets: Any, identifier: str) -> bool:
    wanted, cache = _same(identifier.replace("/", "___")), Path(datasets.config.HF_DATASETS_CACHE)
    folders = (
        [one for one in cache.iterdir() if _same(one.name) == wanted] if cache.is_dir() else []
    )
    return any(any(one.rglob("*.arrow")) for one in folders)


def _same(name: str) -> str:
    """The library writes OpenOrca as open_orca in its cache."""
    return name.casefold().replace("_", "")
