"""Files that appear whole or not at all: results, reports, counts."""

from contextlib import suppress
from pathlib import Path

from quantkit.common.errors import QuantkitError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write the file, text as UTF-8. What stood there before stays until all is written, and what
    was begun goes where that fails.

    Raises QuantkitError that names `path` where there is no room or no right to write.
    """
    begun = _begun(path)
    try:
        begun.write_bytes(content.encode() if isinstance(content, str) else content)
        begun.replace(path)
    except OSError as error:
        with suppress(OSError):  # the fault that is told is the first
            begun.unlink()
        raise _refused(path, error) from error


def check_writable(path: Path, option: str) -> None:
    """Raise QuantkitError, before hours of work, where the file that was given as `option` could
    not be written at their end."""
    if path.is_dir():
        raise QuantkitError(f"{path} is a directory", f"give {option} the name of a file")
    if not path.parent.is_dir():
        raise QuantkitError(
            f"cannot write {path}: there is no folder {path.parent}",
            "make it, or give another file",
        )
    begun = _begun(path)
    try:
        begun.write_bytes(bytes(1))
        begun.unlink()
    except OSError as error:
        with suppress(OSError):
            begun.unlink()
        raise _refused(path, error) from error


def make_folder(folder: Path) -> None:
    """Raise QuantkitError where it is not there and cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, error) from error


def _begun(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _refused(path: Path, error: OSError) -> QuantkitError:
    return QuantkitError(
        f"cannot write {path}: {error.strerror}", "mend that, or choose another place"
    )
