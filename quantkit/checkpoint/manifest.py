"""manifest.json: what quantkit wrote into a directory, for which run. What it does not list is not
quantkit's, and is never removed.

{"run": what determined the output, "files": {name: {"size", "sha256" of small ones}}, "sources":
{unit: {shard: sha256 of what it was made from}}, "tensors": what became of every tensor of the
source, ...}
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


def list_files(
    shards: Mapping[str, int], contents: Mapping[str, bytes]
) -> dict[str, dict[str, Any]]:
    """The entry "files". shards: sizes by name; they are not read again for a hash."""
    small = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return {name: {"size": size} for name, size in shards.items()} | small


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an output that lists its files; empty for anything else."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        listed = all(
            isinstance(facts["size"], int) for facts in manifest["files"].values()
        ) and isinstance(manifest["run"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return manifest if listed else {}


def made_for(directory: Path, run: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a whole output of `run`; empty for anything else. Keys that `run` lacks do
    not count."""
    manifest = read_manifest(directory)
    if not manifest or differences(manifest["run"], run):
        return {}
    whole = all(_is_as_listed(directory / name, facts) for name, facts in manifest["files"].items())
    return manifest if whole else {}


def differences(begun: Mapping[str, str], run: Mapping[str, str]) -> str:
    """Which entries of `run` another run does not have, in words."""
    return ", ".join(key for key in sorted(run) if begun.get(key) != run[key])


def check_own(directory: Path) -> None:
    """Raise QuantkitError naming the first thing in `directory` that quantkit did not write, or not
    so."""
    if directory.is_symlink() or not directory.is_dir():
        raise QuantkitError(
            f"{directory} exists and is no directory, so it is not overwritten", _REMEDY
        )
    found = sorted(directory.iterdir())
    files = read_manifest(directory).get("files", {})
    if found and not files:
        made = (
            "and its manifest.json does not list its files"
            if (directory / MANIFEST).exists()
            else "which quantkit did not write"
        )
        raise QuantkitError(
            f"{directory} holds {found[0].name}, {made}, so it is not overwritten",
            "choose another --out, or remove it by hand",
        )
    for path in found:
        if path.name != MANIFEST and path.name not in files:
            raise QuantkitError(
                f"{directory} holds {path.name}, which quantkit did not write, so it is not "
                "overwritten",
                _REMEDY,
            )
        if path.name != MANIFEST and not _is_as_listed(path, files[path.name]):
            raise QuantkitError(
                f"{path} is no longer what quantkit wrote, so {directory} is not overwritten",
                _REMEDY,
            )


def remove_own(directory: Path) -> None:
    """Remove what quantkit wrote, and the directory. The manifest goes last: a removal that was
    killed goes on."""
    for name in read_manifest(directory).get("files", {}):
        if Path(name).name == name:
            (directory / name).unlink(missing_ok=True)
    left = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    if left:
        raise QuantkitError(
            f"{directory}, which was replaced, holds {left[0]}, which quantkit did not write",
            "move it away",
        )
    (directory / MANIFEST).unlink(missing_ok=True)
    directory.rmdir()


def _is_as_listed(path: Path, facts: Mapping[str, Any]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != facts["size"]:
        return False
    return "sha256" not in facts or hashlib.sha256(path.read_bytes()).hexdigest() == facts["sha256"]
