"""The journal of an unfinished output: which units are written, and with which bytes.

One file of JSON lines per process, so that ranks never wait for each other. The first line is the
fingerprint of the run;
every other line is one unit: {"unit", "tensors": its names, "sha256": over their bytes in order of
name, "facts", "source": what it was made from}. A line is appended after its unit's bytes, and a
unit counts only if its bytes still hash to what its line says; so nothing need reach the disk in
any order, and what a power failure tears is simply written again. From a torn line on, a journal is
dropped.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from quantkit.checkpoint.lock import Lock


@dataclass(frozen=True)
class JournalEntry:
    """One finished unit."""

    unit: str
    tensors: tuple[str, ...]
    sha256: str
    facts: dict[str, Any]
    source: dict[str, str] = field(default_factory=dict)
    """sha256 of what it was made from, by shard"""


class Journal:
    """This process's journal file in `directory`, open for appending. It is this rank's alone until
    `close` or death."""

    def __init__(self, directory: Path, rank: int, fingerprint: Mapping[str, str]) -> None:
        self.path = directory / f"journal-{rank:05d}.jsonl"
        self._lock = Lock(lock_path(directory, rank), directory.parent)
        if not self.path.exists():
            # Appears whole or not at all, so that a journal always has its first line.
            fresh = self.path.with_suffix(".new")
            fresh.write_text(_line({"fingerprint": dict(fingerprint)}))
            fresh.rename(self.path)
        self._file = self.path.open(
            "r+b", buffering=0
        )  # a line that could not be written is not tried again by `close`
        whole = sum(len(line) for line in _whole_lines(self.path))
        self._file.truncate(whole)
        self._file.seek(whole)

    def append(self, entry: JournalEntry) -> None:
        """Hand the line to the system, where a kill of this process does not reach it."""
        line = memoryview(_line(asdict(entry)).encode())
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        self._lock.close()


def lock_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.lock"


def journals(directory: Path) -> list[Path]:
    return sorted(directory.glob("journal-*.jsonl"))


def read_fingerprint(path: Path) -> dict[str, str]:
    lines = _whole_lines(path)
    first = json.loads(lines[0]) if lines else {}
    return dict(first.get("fingerprint", {}))


class Journals:
    """What is in the journals of all processes in `directory`, read as they grow: after fifty
    layers they are long."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        """Bytes of whole lines that were read, by journal."""

    def more(self) -> dict[str, JournalEntry]:
        """Units that were entered since the last call; of one written twice, the last line of its
        journal."""
        entries: dict[str, JournalEntry] = {}
        for path in journals(self._directory):
            start = self._read.get(path, 0)
            lines = _whole_lines(path, start)
            for line in lines if start else lines[1:]:
                fields = json.loads(line)
                entries[fields["unit"]] = JournalEntry(
                    fields["unit"],
                    tuple(fields["tensors"]),
                    fields["sha256"],
                    fields["facts"],
                    fields["source"],
                )
            self._read[path] = start + sum(map(len, lines))
        return entries


def _whole_lines(path: Path, start: int = 0) -> list[bytes]:
    """From a byte on."""
    with path.open("rb") as file:
        file.seek(start)
        return list(takewhile(_is_whole, file))


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"  # ASCII: a character is a byte
