"""One process at a time: a lock on a file, which goes with the process however that ends.

The file says which process holds the lock, so that whoever is refused can be told. On NFS the
server must keep locks (NFSv4, or lockd): without one the system refuses the lock, and that is told
too.
"""

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO

from quantkit.common.errors import QuantkitError


class Lock:
    """Holds `path` until `close`, which removes it. Raises QuantkitError that names the process at
    work on `what`, where there is one."""

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._file = _open(path)
        _take(self._file, what, fcntl.LOCK_EX)
        while not _is(self._file, path):  # its last holder removed it after we had opened it
            self._file.close()
            self._file = _open(path)
            _take(self._file, what, fcntl.LOCK_EX)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        if self._file.closed:
            return
        if _is(self._file, self._path):  # else its directory was moved, or removed
            self._path.unlink()
        self._file.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_free(path: Path, what: Path) -> None:
    """Raise QuantkitError as `Lock` does, and make nothing."""
    try:
        file = path.open("rb")
    except OSError:
        return
    _take(file, what, fcntl.LOCK_SH)
    file.close()


def _open(path: Path) -> IO[bytes]:
    return open(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666),
        "r+b",
        buffering=0,
    )


def _take(file: IO[bytes], what: Path, kind: int) -> None:
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


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False
