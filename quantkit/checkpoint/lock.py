"""A file lock for one process at a time; the system releases it when the process ends.

The file names the process that holds the lock, for the error message of the others. On NFS the
server must support locks (NFSv4, or lockd); otherwise locking fails with an error that says so.
"""

import fcntl
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

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
