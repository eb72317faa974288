"""Opening the files of a model's folder, which anybody may have made.

Only regular files are opened, and none makes the reader wait. A link may not lead out of the
folder; in the hub's cache, where every file of a snapshot is a link, it may lead anywhere in the
repository's own folder. Sizes are limited before a byte is read. Shards may lie in folders below,
where the index names them so.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError

LARGEST = 100_000_000
"""Bytes of a file that lists tensors or tokens. Published ones reach 35 MB; a header has the same
limit in the safetensors package."""
LARGEST_SETTINGS = 16 << 20
"""Bytes of a file of settings, or a chat template."""
_DEEPEST = 100
"""Objects and lists inside one another. A deeper file could be read, and not be written again."""
_AGAIN = "download or copy that file again"
_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the file begins that a clone has in place of a large one, where Git LFS is not installed."""
_KINDS = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)
_MOST_DIGITS = 4300  # Python's own limit
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of that name, of whatever kind: a broken link is there, and
    is told when it is opened."""
    return os.path.lexists(path)


def is_inside(name: str) -> bool:
    """Whether a name of an index leads to a file of the model's folder, or of a folder below it, by
    its words alone."""
    return not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/"))


def open_file(path: Path, folder: Path | None = None) -> int:
    """A descriptor for reading. folder: of the model, where `path` is in a folder below it. Raises
    QuantkitError where `path` is no regular file, stands for one of Git LFS, cannot be read, or
    leads out of the model's folder."""
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "special file")
            raise QuantkitError(f"{path} is a {kind}, not a file", _AGAIN)
        if not any(target.is_relative_to(root) for root in _roots(folder or path.parent)):
            raise QuantkitError(
                f"{path} is a link to {target}, outside of the model's folder",
                "put the file itself there, or remove the link",
            )
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            os.close(descriptor)
            raise QuantkitError(
                f"{path} is a pointer of Git LFS, not the file itself",
                "run `git lfs pull` there, or use `hf download`",
            )
        return descriptor
    except FileNotFoundError:
        if path.is_symlink():
            raise QuantkitError(
                f"{path} is a link to {os.readlink(path)}, which does not exist", _AGAIN
            ) from None
        raise QuantkitError(
            f"{path} does not exist", "restore it, or give the directory of a complete checkpoint"
        ) from None
    except OSError as error:
        raise QuantkitError(
            f"cannot read {path}: {error.strerror}", "restore that file and run again"
        ) from error
    except ValueError as error:  # a name that no file can have
        raise QuantkitError(f"cannot read {path}: {error}", _AGAIN) from error


def _roots(folder: Path) -> list[Path]:
    """Where the files of a folder may lie: in it, and in its repository where it is a snapshot of
    the hub's cache."""
    real = Path(os.path.realpath(folder))
    repository = real.parent.parent
    in_cache = real.parent.name == "snapshots" and repository.name.startswith(
        ("models--", "datasets--")
    )
    return [real, repository] if in_cache else [real]


def read_file(path: Path, limit: int = LARGEST) -> bytes:
    """The contents. Raises QuantkitError as `open_file` does, and where the file is larger than
    `limit` bytes."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise QuantkitError(
                f"{path} has {size} bytes, and such a file has {limit} at most", _AGAIN
            )
        return file.read(limit)


def read_text(path: Path, limit: int = LARGEST_SETTINGS) -> str:
    """UTF-8 text, without the byte order mark that some editors put before it."""
    try:
        return read_file(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QuantkitError(f"{path} is not UTF-8 text (byte {error.start})", _AGAIN) from error


def read_json(path: Path, limit: int = LARGEST_SETTINGS) -> dict[str, Any]:
    """A JSON object. Raises QuantkitError for anything else, for a name that is given two values,
    and where it is nested too deep."""
    text = read_text(path, limit)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise QuantkitError(f"{path} is not valid JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise QuantkitError(f"{path} is not a JSON object", _AGAIN)
    return value


def parse_json(text: str, *, unique: bool = False) -> Any:
    """The value. Raises ValueError where it is not JSON, or where a name has two values (with
    `unique`: where it appears twice)."""
    try:
        value = json.loads(
            text, object_pairs_hook=_unique if unique else _unambiguous, parse_int=_integer
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    _check_depth(value)
    if _HALF_CHARACTER.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a string holds half of a character") from error
    return value


def _integer(digits: str) -> int:
    # Python's own limit is a setting of the process, which a library may have lifted.
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, one in pairs:
            if one != value[key]:
                raise ValueError(f"{key} has two values")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name appears twice")
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        level = [
            inner
            for outer in level
            for inner in (
                outer.values()
                if isinstance(outer, dict)
                else outer
                if isinstance(outer, list)
                else ()
            )
            if isinstance(inner, dict | list)
        ]
