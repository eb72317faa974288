"""manifest.json: the files that quantkit wrote into a directory, and for which run. Files that it
does not list are never removed.

{"run": what determined the output, "files": {name: {"size", "sha256" of small ones}}, "sources":
{unit: {shard: sha256 of the bytes it was computed from}}, "tensors": what became of every tensor of
the source, ...}
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError

MANIFEST = "manifest.json"
_REMEDY = "choose another --out, or move it away"


def file_entries(
    shards: Mapping[str, int], contents: Mapping[str, bytes]
) -> dict[str, dict[str, Any]]:
    """The entry "files". shards: sizes by name; they are not read again to be hashed."""
    small = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return {name: {"size": size} for name, size in shards.items()} | small


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an output that lists its files; empty for any other directory."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        valid = all(
            isinstance(entry["size"], int) for entry in manifest["files"].values()
        ) and isinstance(manifest["run"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return manifest if valid else {}


def complete_manifest(directory: Path, run: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a complete output of `run`; empty for any other directory. Keys that `run`
    lacks are not compared."""
    manifest = read_manifest(directory)
    if not manifest or differing_keys(manifest["run"], run):
        return {}
    intact = all(_is_intact(directory / name, entry) for name, entry in manifest["files"].items())
    return manifest if intact else {}


def differing_keys(previous: Mapping[str, str], run: Mapping[str, str]) -> str:
    """Keys of `run` whose value another run does not have, separated by commas."""
    return ", ".join(key for key in sorted(run) if previous.get(key) != run[key])


def check_owned(directory: Path) -> None:
    """Raise QuantkitError naming the first file in `directory` that quantkit did not write, or that
    was changed since."""
    if directory.is_symlink() or not directory.is_dir():
        raise QuantkitError(
            f"{directory} exists and is not a directory, so it is not overwritten", _REMEDY
        )
    found = sorted(directory.iterdir())
    files = read_manifest(directory).get("files", {})
    if found and not files:
        reason = (
            "and its manifest.json does not list its files"
            if (directory / MANIFEST).exists()
            else "which quantkit did not write"
        )
        raise QuantkitError(
            f"{directory} holds {found[0].name}, {reason}, so it is not overwritten",
            "choose another --out, or remove it by hand",
        )
    for path in found:
        if path.name != MANIFEST and path.name not in files:
            raise QuantkitError(
                f"{directory} holds {path.name}, which quantkit did not write, so it is not "
                "overwritten",
                _REMEDY,
            )
        if path.name != MANIFEST and not _is_intact(path, files[path.name]):
            raise QuantkitError(
                f"{path} is no longer what quantkit wrote, so {directory} is not overwritten",
                _REMEDY,
            )


def remove_owned(directory: Path) -> None:
    """Remove the files that quantkit wrote, and the directory. The manifest goes last, so that a
    removal that was killed can be resumed."""
    for name in read_manifest(directory).get("files", {}):
        if Path(name).name == name:
            (directory / name).unlink(missing_ok=True)
    remaining = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    if remaining:
        raise QuantkitError(
            f"{directory}, which was replaced, holds {remaining[0]}, which quantkit did not write",
            "move it away",
        )
    (directory / MANIFEST).unlink(missing_ok=True)
    directory.rmdir()


def _is_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size"]:
        return False
    return "sha256" not in entry or hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
