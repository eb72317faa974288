"""Safe reading of the files in a model's folder, which may come from anyone.

Only regular files are opened, and opening never blocks. A link must not lead out of the folder,
except in the Hub cache, where every file of a snapshot is a link into the repository's own folder.
Sizes are limited before a byte is read. Shards may be in subfolders if the index names them so.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError

LARGEST = 100_000_000
"""Limit in bytes for files that list tensors or tokens. Published ones reach 35 MB; the safetensors
package limits headers to the same size."""
LARGEST_SETTINGS = 16 << 20
"""Limit in bytes for a settings file or a chat template."""
_DEEPEST = 100
"""Limit of nested objects and lists. A deeper file could be read but not written again."""
_AGAIN = "download or copy that file again"
_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer file that a clone has in place of a large file if Git LFS is not
installed."""
_KINDS = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)
FOLLOW_LINKS = "QUANTKIT_FOLLOW_LINKS"
"""Variable of the environment: 1 where a model's files may be links to anywhere (--follow-links)."""
_MOST_DIGITS = 4300  # Python's own limit
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of that name, of any kind. A broken link counts, so that
    opening it reports the fault."""
    return os.path.lexists(path)


def is_inside(name: str) -> bool:
    """Whether a name from an index is a path inside the model's folder, judged by its text
    alone."""
    return not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/"))


def open_file(path: Path, folder: Path | None = None) -> int:
    """A file descriptor for reading.

    folder: the model's folder, if `path` is in a subfolder of it. Raises QuantkitError if `path` is
    not a regular file, is a Git LFS pointer, cannot be read, or leads out of the model's folder.
    """
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "special file")
            raise QuantkitError(f"{path} is a {kind}, not a file", _AGAIN)
        roots = _roots(folder or path.parent)
        if os.environ.get(FOLLOW_LINKS) != "1" and not _is_below(target, roots):
            links = [one for one in path.parent.iterdir() if one != path and one.is_symlink()]
            more = sum(not _is_below(Path(os.path.realpath(one)), roots) for one in links)
            others = f", as {more} other file{'s' * (more > 1)} there" if more else ""
            raise QuantkitError(
                f"{path} is a link to {target}, outside of the model's folder{others}",
                "put the file itself there, or give --follow-links where you trust the links",
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
    except PermissionError as error:
        real = os.path.realpath(path)
        link = f", a link to {real}" if os.path.islink(path) else ""
        raise QuantkitError(
            f"cannot read {path}{link}: {error.strerror}",
            f"its owner can allow it: chmod -R a+rX {os.path.dirname(real)}",
        ) from error
    except OSError as error:
        raise QuantkitError(
            f"cannot read {path}: {error.strerror}", "restore that file and run again"
        ) from error
    except ValueError as error:  # not a valid file name
        raise QuantkitError(f"cannot read {path}: {error}", _AGAIN) from error


def _is_below(target: Path, roots: list[Path]) -> bool:
    return any(target.is_relative_to(root) for root in roots)


def _roots(folder: Path) -> list[Path]:
    """Folders that the files may resolve to: the folder itself, and its repository if it is a
    snapshot in the Hub cache."""
    real = Path(os.path.realpath(folder))
    repository = real.parent.parent
    in_cache = real.parent.name == "snapshots" and repository.name.startswith(
        ("models--", "datasets--")
    )
    return [real, repository] if in_cache else [real]


def read_file(path: Path, limit: int = LARGEST) -> bytes:
    """The contents. Raises QuantkitError as `open_file` does, or if the file is larger than `limit`
    bytes."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise QuantkitError(
                f"{path} has {size} bytes, and such a file has {limit} at most", _AGAIN
            )
        return file.read(limit)


def read_text(path: Path, limit: int = LARGEST_SETTINGS) -> str:
    """UTF-8 text without a byte order mark."""
    try:
        return read_file(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QuantkitError(f"{path} is not UTF-8 text (byte {error.start})", _AGAIN) from error


def read_json(path: Path, limit: int = LARGEST_SETTINGS) -> dict[str, Any]:
    """A JSON object. Raises QuantkitError for anything else, for a key with two different values,
    and for nesting that is too deep."""
    text = read_text(path, limit)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise QuantkitError(f"{path} is not valid JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise QuantkitError(f"{path} is not a JSON object", _AGAIN)
    return value


def parse_json(text: str, *, strict: bool = False) -> Any:
    """The parsed value. Raises ValueError for invalid JSON and for a key with two different values
    (with `strict`: for any repeated key, and for NaN and infinite numbers)."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique if strict else _unambiguous,
            parse_int=_integer,
            parse_constant=_finite if strict else float,
            parse_float=_finite if strict else float,
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


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:30]} is not a finite number")
    return value


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
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:100]} appears twice")
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
