"""Objects of a file: .jsonl, .json, .csv or .parquet, perhaps .gz. What cannot be read is refused
in one line that names the file, and the line where it applies."""

import csv
import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import open_file, parse_json

Row = dict[str, Any]
_LONGEST_LINE = 256 << 20
"""Limit in bytes of a row; LiveCodeBench's reach tens of millions."""
_LARGEST_UNPACKED = 4 << 30
"""Limit in bytes of a compressed file's contents: all rows are in memory."""


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a data file. Files saved on Windows may begin with a byte order mark."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as table:
                yield from csv.DictReader(table)
        elif path.suffix == ".json":
            yield from _examples(path)
        else:
            yield from (row for _, row in json_lines(path))
    except UnicodeDecodeError as error:
        raise QuantkitError(
            f"{path} is not UTF-8 ({error.reason}: byte {error.start})", "save it as UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise QuantkitError(f"{path} cannot be read ({error})", "download it again") from error


def read_text(path: Path, what: str) -> str:
    """A UTF-8 text without its byte order mark; `what` it is to the user."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantkitError(
            f"{what} {path} cannot be read: {getattr(error, 'strerror', error)}",
            "give a UTF-8 .txt or .jsonl file",
        ) from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        if sum(group.total_byte_size for group in groups) > _LARGEST_UNPACKED:
            raise _too_large(path)
        yield from file.read().to_pylist()
    except pyarrow.ArrowException as error:
        raise QuantkitError(
            f"{path} is not Parquet ({str(error).splitlines()[0]})", "download it again"
        ) from error


def _too_large(path: Path) -> QuantkitError:
    return QuantkitError(
        f"{path} unpacks to more than {_LARGEST_UNPACKED >> 30} GiB, or has a row of more than "
        f"{_LONGEST_LINE >> 20} MiB",
        "split it, or use the files as published",
    )


def json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """The object of every line that is not empty, with its place; only LF ends a line."""
    packed = path.suffix == ".gz"
    with (
        os.fdopen(open_file(path), "rb") as file,
        gzip.open(file) if packed else nullcontext(file) as lines,
    ):
        size = 0
        for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), b""), start=1):
            size += len(line)
            if len(line) == _LONGEST_LINE or (packed and size > _LARGEST_UNPACKED):
                raise _too_large(path)
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                row, fault = parse_json(line.decode()), "a JSON object"
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                row, fault = None, f"JSON ({error})"
            if not isinstance(row, dict):
                raise QuantkitError(
                    f"{path}:{number} is not {fault}",
                    "one JSON object a line is expected: restore the file, or remove that line",
                )
            yield f"{path}:{number}", row


def _examples(path: Path) -> Iterator[Row]:
    """A list of objects, BIG-Bench's {"examples": [...]}, or, as in BFCL, an object a line."""
    text = path.read_text(encoding="utf-8-sig").strip()
    if text.startswith("{") and "}\n{" in text:
        yield from (row for _, row in json_lines(path))
        return
    try:
        content = parse_json(text)
    except ValueError as error:
        raise QuantkitError(
            f"{path} is not JSON ({error})", "a list of objects is expected"
        ) from error
    rows = content.get("examples", [content]) if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise QuantkitError(
            f"{path} is not a list of objects",
            "a list of objects, or one below `examples`, is expected",
        )
    yield from rows
