"""Atomic file writes: a file appears complete or not at all, after a kill or a power failure too.

A new file has a random name in the folder of its target until it is complete and on the disk, so
that nothing else is overwritten and no link is followed.
"""

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from quantkit.common.errors import QuantkitError

_PREFIX, _SUFFIX = ".quantkit-", ".partial"


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which gets the name `path`, and replaces what had it, after the block. It is
    removed if the block raises. Raises OSError."""
    unfinished = path.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o666)  # less the umask, unlike mkstemp's 0600
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):  # report the first error
            os.unlink(unfinished)
        raise
    sync_folder(path.parent)


def is_unfinished(path: Path) -> bool:
    """Whether the name is that of a file that `new_file` was stopped in writing."""
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Flush the folder's names to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder with all that is in it to the disk. Raises OSError."""
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(place))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write the file atomically, text as UTF-8.

    Raises QuantkitError naming `path` if it cannot be written.
    """
    try:
        with new_file(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _write_error(path, error) from error


def check_writable(path: Path, option: str) -> None:
    """Raise QuantkitError, before hours of work, if the file given as `option` could not be
    written."""
    try:
        if path.is_dir():
            raise QuantkitError(f"{path} is a directory", f"give {option} the name of a file")
        if not path.parent.is_dir():
            raise QuantkitError(
                f"cannot write {path}: there is no folder {path.parent}",
                "make it, or give another file",
            )
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(bytes(1))
    except OSError as error:
        raise _write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Create the folder and its parents; raises QuantkitError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error


def _write_error(path: Path, error: OSError) -> QuantkitError:
    return QuantkitError(
        f"cannot write {path}: {error.strerror}", "fix that, or choose another place"
    )
