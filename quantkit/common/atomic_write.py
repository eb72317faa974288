"""Atomic file writes: a file appears complete or not at all."""

from contextlib import suppress
from pathlib import Path

from quantkit.common.errors import QuantkitError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write the file atomically, text as UTF-8. An existing file stays until the new one is
    complete, and a partial file is removed on failure.

    Raises QuantkitError naming `path` if it cannot be written.
    """
    partial = _partial_path(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # report the first error
            partial.unlink()
        raise _write_error(path, error) from error


def check_writable(path: Path, option: str) -> None:
    """Raise QuantkitError, before hours of work, if the file given as `option` could not be
    written."""
    if path.is_dir():
        raise QuantkitError(f"{path} is a directory", f"give {option} the name of a file")
    if not path.parent.is_dir():
        raise QuantkitError(
            f"cannot write {path}: there is no folder {path.parent}",
            "make it, or give another file",
        )
    partial = _partial_path(path)
    try:
        partial.write_bytes(bytes(1))
        partial.unlink()
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise _write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Create the folder and its parents; raises QuantkitError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error


def _partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _write_error(path: Path, error: OSError) -> QuantkitError:
    return QuantkitError(
        f"cannot write {path}: {error.strerror}", "fix that, or choose another place"
    )
