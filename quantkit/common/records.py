"""Records of a file: JSON, one a line (.jsonl, .ndjson, also .gz) or in a list (.json), .csv, .tsv or
.parquet. What cannot be read is refused in one line that names the file and the place in it."""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file, parse_json

Record = tuple[str, Any]
"""A place ("data.jsonl:3") and the value there."""
Row = dict[str, Any]
ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Names of files of records end so, JSON's and tables of text perhaps with .gz after it."""
_Opened = io.BufferedReader | gzip.GzipFile
_LONGEST_LINE = 256 << 20
"""Limit in bytes of a line; LiveCodeBench's reach tens of millions."""
_LARGEST_UNPACKED = 4 << 30
"""Limit in bytes of what a file unpacks to: all rows are in memory."""
_NOT_TEXT = b"\xef\xbb\xbf \t\r\n"  # a byte order mark and blanks
_OF_RECORDS = {"id", "messages", "conversations", "conversation", "text", "prompt"}
"""Fields of an object that is a record itself, and not one that holds a list of them."""


def holds_records(path: Path) -> bool:
    """Whether its name says that the file holds records."""
    return _ending(path) in ENDINGS


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file. Whatever its name says, JSON may be a value a line, a list, or an
    object with one list of objects, as BIG-Bench's `examples`."""
    ending = _ending(path)
    real = Path(os.path.realpath(path))  # a link may lead anywhere
    try:
        if ending == ".parquet":
            yield from _parquet(real)
        elif ending in (".csv", ".tsv"):
            yield from _table(real, "\t" if ending == ".tsv" else ",")
        else:
            yield from _json(real)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise QuantkitError(f"{path} cannot be read ({error})", "download it again") from error


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The same of a file whose records are objects."""
    return _objects(read_records(path))


def json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """The object of every line that is not empty, with its place, of a file in a folder that may
    come from anyone; only LF ends a line."""
    with _opened(path) as file:
        yield from _objects(_lines(path, file))


def read_text(path: Path, what: str) -> str:
    """A UTF-8 text without its byte order mark; `what` it is to the user."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantkitError(
            f"{what} {path} cannot be read: {getattr(error, 'strerror', error)}",
            "give a UTF-8 .txt or .jsonl file",
        ) from error


def _ending(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.casefold()


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    with os.fdopen(open_file(path), "rb") as file:
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked
        else:
            yield file


def _whole(path: Path, file: _Opened) -> str:
    data = file.read(_LARGEST_UNPACKED + 1)
    if len(data) > _LARGEST_UNPACKED:
        raise _too_large(path)
    return _decoded(str(path), data)


def _decoded(place: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QuantkitError(
            f"{place} is not UTF-8 ({error.reason}: byte {error.start})", "save it as UTF-8"
        ) from error


def _too_large(path: Path) -> QuantkitError:
    return QuantkitError(
        f"{path} unpacks to more than {_LARGEST_UNPACKED >> 30} GiB, or has a row of more than "
        f"{_LONGEST_LINE >> 20} MiB",
        "split it, or use the files as published",
    )


def _json(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        is_list = file.peek(1024)[:1024].lstrip(_NOT_TEXT).startswith(b"[")
        if not is_list and _ending(path) != ".json":
            yield from _lines(path, file)
            return
        text = _whole(path, file)
    try:
        value = parse_json(text)
    except ValueError as error:
        if is_list or "\n{" not in text.strip():
            raise QuantkitError(
                f"{path} is not JSON ({error})", "a list of objects, or one a line, is expected"
            ) from error
        yield from _lines(path, io.BytesIO(text.encode()))
        return
    held = [one for one in value.values() if isinstance(one, list)] if _is_holder(value) else []
    if len(held) == 1 and all(isinstance(one, dict) for one in held[0]):
        value = held[0]
    listed = value if isinstance(value, list) else [value]
    yield from ((f"{path} record {number}", one) for number, one in enumerate(listed, start=1))


def _is_holder(value: Any) -> bool:
    return isinstance(value, dict) and not _OF_RECORDS & {str(name).casefold() for name in value}


def _lines(path: Path, file: _Opened | io.BytesIO) -> Iterator[Record]:
    size = 0
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        size += len(line)
        if len(line) == _LONGEST_LINE or (path.suffix == ".gz" and size > _LARGEST_UNPACKED):
            raise _too_large(path)
        if not line.strip(_NOT_TEXT):
            continue
        place = f"{path}:{number}"
        try:
            value = parse_json(_decoded(place, line))
        except ValueError as error:
            raise QuantkitError(
                f"{place} is not JSON ({error})",
                "one JSON object a line is expected: restore the file, or remove that line",
            ) from error
        yield place, value


def _objects(records: Iterable[Record]) -> Iterator[tuple[str, Row]]:
    for place, value in records:
        if not isinstance(value, dict):
            raise QuantkitError(
                f"{place} is not a JSON object", "an object is expected there: restore the file"
            )
        yield place, value


def _table(path: Path, delimiter: str) -> Iterator[Record]:
    with _opened(path) as file:
        text = _whole(path, file)
    csv.field_size_limit(1 << 30)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    if len(rows.fieldnames or ()) == 1 and ";" in text.partition("\n")[0]:
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=";")
    for row in rows:
        if None in row:
            raise QuantkitError(
                f"{path}:{rows.line_num} has more fields than the header",
                "put texts with commas in quotes",
            )
        yield f"{path}:{rows.line_num}", row


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise QuantkitError(
            f"{path} needs pyarrow, which is not installed",
            "pip install pyarrow, or save it as .jsonl",
        ) from error
    number = size = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                size += file.metadata.row_group(group).total_byte_size
                if size > _LARGEST_UNPACKED:
                    raise _too_large(path)
                for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise QuantkitError(
            f"{path} is not Parquet ({str(error).splitlines()[0]})", "download it again"
        ) from error
