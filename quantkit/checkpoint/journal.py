"""The journal of an unfinished output: which work units are written, and the hash of their bytes.

One file of JSON lines per process, so that ranks never wait for each other. The first line is the
run's fingerprint; every other line is one unit: {"unit", "tensors": its names, "sha256": over
their bytes in order of name, "facts", "source": hashes of its inputs}. A line is appended after the
unit's bytes, and a unit counts only if its bytes still match the line's hash. So nothing has to
reach the disk in any order, and what a power failure tears is written again. A journal is truncated
at its first torn line.

A file lock for one process at a time; the system releases it when the process ends.

The file names the process that holds the lock, for the error message of the others. On NFS the
server must support locks (NFSv4, or lockd); otherwise locking fails with an error that says so.
"""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from quantkit.common.atomic_write import new_file
from quantkit.common.errors import QuantkitError


class Lock(AbstractContextManager["Lock"]):
    """Holds `path` until `close`, which removes it. Raises QuantkitError that names the process
    writing `what`, if there is one."""

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._file = _open(path)
        _lock(self._file, what, fcntl.LOCK_EX)
        while not _is_same_file(self._file, path):  # its last holder removed it after we opened it
            self._file.close()
            self._file = _open(path)
            _lock(self._file, what, fcntl.LOCK_EX)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        if self._file.closed:
            return
        if _is_same_file(self._file, self._path):  # else its directory was moved or removed
            self._path.unlink()
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def check_unlocked(path: Path, what: Path) -> None:
    """Raise QuantkitError as `Lock` does, without creating the file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    _lock(file, what, fcntl.LOCK_SH)
    file.close()


def _open(path: Path) -> IO[bytes]:
    return open(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666),
        "r+b",
        buffering=0,
    )


def _lock(file: IO[bytes], what: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read().decode(errors="replace").strip() or "another process"
        file.close()
        raise QuantkitError(f"{holder} is writing {what}", "wait for it, or stop it") from None
    except OSError as error:
        file.close()
        raise QuantkitError(
            f"{what} cannot be locked: {error.strerror}",
            "choose an --out on a file system that has locks",
        ) from error


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


@dataclass(frozen=True)
class JournalEntry:
    """One finished unit."""

    unit: str
    tensors: tuple[str, ...]
    sha256: str
    facts: dict[str, Any]
    source: dict[str, str] = field(default_factory=dict)
    """sha256 of the bytes it was computed from, by shard"""


class Journal:
    """This process's journal file in `directory`, open for appending, locked for this rank until
    `close` or the end of the process."""

    def __init__(self, directory: Path, rank: int, fingerprint: Mapping[str, str]) -> None:
        self.path = directory / f"journal-{rank:05d}.jsonl"
        self._lock = Lock(lock_path(directory, rank), directory.parent)
        if not self.path.exists():
            with new_file(self.path) as file:  # a journal always has its first line
                file.write(_line({"fingerprint": dict(fingerprint)}).encode())
        # Unbuffered: `close` must not retry a line that could not be written.
        self._file = self.path.open("r+b", buffering=0)
        end = sum(len(line) for line in _complete_lines(self.path))
        self._file.truncate(end)
        self._file.seek(end)

    def append(self, entry: JournalEntry) -> None:
        """Write the line to the page cache, where killing this process does not lose it."""
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


def journal_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("journal-*.jsonl"))


def read_fingerprint(path: Path) -> dict[str, str]:
    lines = _complete_lines(path)
    first = json.loads(lines[0]) if lines else {}
    return dict(first.get("fingerprint", {}))


class JournalReader:
    """Reads the journals of all processes in `directory` incrementally."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        """Bytes of complete lines read so far, by journal."""

    def read_new(self) -> dict[str, JournalEntry]:
        """Units entered since the last call; for a unit written twice, its last line."""
        entries: dict[str, JournalEntry] = {}
        for path in journal_files(self._directory):
            start = self._offsets.get(path, 0)
            lines = _complete_lines(path, start)
            for line in lines if start else lines[1:]:
                fields = json.loads(line)
                entries[fields["unit"]] = JournalEntry(
                    fields["unit"],
                    tuple(fields["tensors"]),
                    fields["sha256"],
                    fields["facts"],
                    fields["source"],
                )
            self._offsets[path] = start + sum(map(len, lines))
        return entries


def _complete_lines(path: Path, start: int = 0) -> list[bytes]:
    """Lines from byte `start` up to the first torn one."""
    with path.open("rb") as file:
        file.seek(start)
        return list(takewhile(_is_complete, file))


def _is_complete(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"  # ASCII: a character is a byte
