"""The output directory: where it may be written, whether a run may start or resume, and how the
finished directory replaces an old one.

Paths are compared by device and inode of every folder on the way, so that links, mounts and other
spellings of a path are recognized. Every file that quantkit is about to create in OUT.partial is
registered there first, so that starting over removes those files and nothing else.

Killing the process at any moment leaves the old or the new directory complete. On Linux the two are
exchanged atomically; a file system that cannot do that (NFS) gets two renames, between which a kill
leaves the old one under OUT.replaced. The state directory (journals, locks) is renamed with the new
directory and removed last: if it exists inside OUT, only cleanup is left to do. Of a replaced
directory, only the files listed in its manifest are removed.

manifest.json: the files that quantkit wrote into a directory, and for which run. Files that it
does not list are never removed.

{"run": what determined the output, "files": {name: {"size", "sha256" of small ones}}, "sources":
{unit: {shard: sha256 of the bytes it was computed from}}, "tensors": what became of every tensor of
the source, ...}
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.journal import check_unlocked, journal_files, lock_path, read_fingerprint
from quantkit.common.atomic_write import is_unfinished, new_file, sync_folder
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json
from quantkit.common.result import JsonObject
from quantkit.common.sizes import format_bytes

MANIFEST = "manifest.json"
_ELSEWHERE = "choose another --out (DST of convert)"
_REMEDY = f"{_ELSEWHERE}, or move it away"


def file_entries(shards: Mapping[str, int], contents: Mapping[str, bytes]) -> dict[str, JsonObject]:
    """The entry "files". shards: sizes by name; they are not read again to be hashed."""
    small = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return {name: {"size": size} for name, size in shards.items()} | small


def read_manifest(directory: Path) -> JsonObject:
    """The manifest of an output that lists its files; empty for any other directory."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        valid = all(
            isinstance(entry["size"], int) for entry in manifest["files"].values()
        ) and isinstance(manifest["run"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return manifest if valid else {}


def read_report(directory: Path) -> JsonObject:
    """report.json of an output of `quantize`; empty for any other directory. Raises QuantkitError
    for one that is no JSON object."""
    path = directory / "report.json"
    return read_json(path, LARGEST) if read_manifest(directory) and is_there(path) else {}


def complete_manifest(directory: Path, run: Mapping[str, str]) -> JsonObject:
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
            f"{_ELSEWHERE}, or remove it by hand",
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


_Id = tuple[int, int]


def absolute(out: Path) -> Path:
    """The path with the links of its parents resolved, but not its own. Raises QuantkitError for
    the root directory."""
    path = (
        Path(os.path.realpath(out))
        if out.name in ("", "..")
        else Path(os.path.realpath(out.parent)) / out.name
    )
    _refuse(not path.name, f"{path} cannot be an output")
    return path


def partial_path(out: Path) -> Path:
    """Directory in which `out` is built."""
    return out.with_name(f"{out.name}.partial")


def replaced_path(out: Path) -> Path:
    """Temporary name of the previous `out` on file systems that cannot exchange two names."""
    return out.with_name(f"{out.name}.replaced")


def check_disjoint(out: Path, inputs: Iterable[Path]) -> None:
    """Raise QuantkitError where writing `out` would touch one of `inputs`, files or directories:
    they are the same, one contains the other, or they share files."""
    out = absolute(out)
    for path in inputs:
        for target in (out, partial_path(out), replaced_path(out)):
            _check_pair(target, path)


def check_results_folder(out: Path, inputs: Iterable[Path]) -> None:
    """Raise QuantkitError where a results folder would lie inside one of `inputs`, or next to the
    weights of a model."""
    for path in inputs:
        _refuse(
            bool(_ancestors(out) & _folders(path)),
            f"{out} is or lies in {path}, which is only read",
        )
    holds_model = (out / "config.json").exists() and any(out.glob("*.safetensors"))
    _refuse(holds_model, f"{out} holds a model, and results would be written among its files")


def _check_pair(target: Path, source: Path) -> None:
    target_id = _ids([target])
    _refuse(
        bool(target_id & _ids([source])), f"{target} is the same as {source}, which is only read"
    )
    _refuse(
        bool(_ancestors(target) & _folders(source)),
        f"{target} lies in {source}, which is only read",
    )
    _refuse(
        bool(_ancestors(source) & target_id), f"{source} lies in {target}, which is to be written"
    )
    outputs = {file_id: path for path in _entries(target) for file_id in _ids([path])}
    for file in _entries(source):
        _refuse(
            bool(_ancestors(file) & target_id),
            f"{file} is a link into {target}, which is to be written",
        )
        for file_id in _ids([file]) & outputs.keys():
            _refuse(True, f"{file} and {outputs[file_id]} are one file")


def _refuse(fault: bool, problem: str) -> None:
    if fault:
        raise QuantkitError(problem, _ELSEWHERE)


def _ancestors(path: Path) -> set[_Id]:
    """Ids of what `path` leads to and of every folder above it, as far as they exist."""
    real = Path(os.path.realpath(path))
    return _ids([real, *real.parents])


def _folders(folder: Path) -> set[_Id]:
    """Ids of a folder and its subfolders, one of which may be a mount point."""
    return _ids([folder, *(path for path in _entries(folder) if path.is_dir())])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _ids(paths: Iterable[Path]) -> set[_Id]:
    """(device, inode) of those that exist."""
    found = set()
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found.add((stat.st_dev, stat.st_ino))
    return found


STATE = ".quantkit"
"""The directory of journals and locks, in OUT.partial."""
_FILE_LIST = "files.json"


def check_target(out: Path, run: Mapping[str, str], overwrite: bool) -> None:
    """Raise QuantkitError where `out` exists and may not be replaced."""
    old = replaced_path(out)
    if os.path.lexists(old):
        raise QuantkitError(f"{old} exists: what {out} was before, or yours", "move it away")
    if not os.path.lexists(out):
        return
    if overwrite:
        return check_owned(out)
    previous = read_manifest(out).get("run")
    if previous is None:
        if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
            raise QuantkitError(f"{out} exists", f"{_ELSEWHERE}, or give --overwrite")
        raise QuantkitError(
            f"{out} exists, and quantkit did not make it",
            f"{_ELSEWHERE}, or remove it by hand",
        )
    different = differing_keys(
        previous,
        {key: value for key, value in run.items() if key != "layout"},  # follows from the others
    )
    how = f"made with a different {different}" if different else "and is not as it was written"
    raise QuantkitError(f"{out} exists, {how}", f"{_ELSEWHERE}, or give --overwrite")


def check_partial(partial: Path) -> None:
    """Raise QuantkitError where `partial` exists and is not an unfinished output."""
    if not os.path.lexists(partial):
        return
    # List once: another rank may be creating the directory, and creates the state directory first.
    directory = partial.is_dir() and not partial.is_symlink() and not (partial / STATE).is_symlink()
    names = {path.name for path in partial.iterdir()} if directory else set()
    if not directory or (names and STATE not in names):
        raise QuantkitError(
            f"{partial} exists and is not an unfinished output of quantkit", "move it away"
        )


def check_files(partial: Path) -> None:
    """Raise QuantkitError naming a file in an unfinished output that quantkit did not create, or
    that is a link. Removes files that a kill left half written."""
    registered = registered_files(partial)
    for path in sorted(partial.iterdir()):
        # .new: of versions before 2026-11-29
        if is_unfinished(path) or path.name.removesuffix(".new") in registered - {path.name}:
            path.unlink()  # a kill left it
        elif path.name != STATE and path.name not in registered:
            raise QuantkitError(
                f"{partial} holds {path.name}, which quantkit did not write", "move it away"
            )
    for path in (*partial.iterdir(), *(partial / STATE).iterdir()):
        try:
            found = path.lstat()
        except FileNotFoundError:  # another rank's, renamed meanwhile
            continue
        if path.name != STATE and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
            raise QuantkitError(
                f"{path} is a link, or not a file, and writing it would change another",
                "move it away",
            )


def check_run(partial: Path, run: Mapping[str, str], rank: int, *, discard: bool) -> None:
    """Refuse, or with `discard` empty, an unfinished output of another source, recipe or
    version."""
    state = partial / STATE
    for path in journal_files(state):
        previous = read_fingerprint(path)
        if previous == run:
            continue
        for number in range(len(journal_files(state)) + rank + 1):
            check_unlocked(lock_path(state, number), partial)
        different = ", ".join(
            key for key in sorted({*previous, *run}) if previous.get(key) != run.get(key)
        )
        if not discard:
            raise QuantkitError(
                f"{partial} was begun with a different {different}",
                "run the command that began it, or give --overwrite to start anew",
            )
        return _empty(partial)


def register_files(partial: Path, names: Iterable[str]) -> None:
    """Record that quantkit will create these files in `partial`."""
    listed = json.dumps(sorted({*registered_files(partial), *names}))
    with new_file(partial / STATE / _FILE_LIST) as file:
        file.write(listed.encode())


def registered_files(partial: Path) -> set[str]:
    path = partial / STATE / _FILE_LIST
    return set(json.loads(path.read_text())) if path.exists() else set()


def _empty(partial: Path) -> None:
    """Remove everything but the locks. `check_files` found only quantkit's files before."""
    for path in (*partial.iterdir(), *(partial / STATE).iterdir()):
        if path.name != STATE and path.suffix != ".lock":
            path.unlink()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Marker in the state directory: the old directory has, or will have, the name of the partial one.
_EXCHANGING = "exchanging"


def replace_directory(partial: Path, out: Path, state: str) -> None:
    """Rename `partial` to `out` and delete the previous `out`; `state` is the name of the
    subdirectory that is removed. Raises QuantkitError, and changes nothing, where `out` holds
    anything that quantkit did not write."""
    sync_folder(partial)
    if not os.path.lexists(out):
        partial.rename(out)
    else:
        check_owned(out)
        (partial / state / _EXCHANGING).touch()
        if not _exchange(partial, out):
            old = replaced_path(out)
            out.rename(old)
            partial.rename(out)
            old.rename(partial)
    sync_folder(out.parent)
    remove_leftovers(partial, out, state)


def remove_leftovers(partial: Path, out: Path, state: str) -> None:
    """Remove what a killed `replace_directory` left: the replaced directory, then the state
    directory."""
    if not read_manifest(out) or not (out / state).is_dir() or (out / state).is_symlink():
        return
    if (out / state / _EXCHANGING).exists() and partial.is_dir() and not partial.is_symlink():
        remove_owned(partial)
    shutil.rmtree(out / state)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if (
        libc.renameat2(
            _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
        )
        == 0
    ):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def check_disk(folder: Path, needed: int) -> None:
    """folder: need not exist yet."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        raise QuantkitError(
            f"{folder} has {format_bytes(free)} free and the output needs {format_bytes(needed)} "
            "more",
            f"free {format_bytes(needed - free)}, or {_ELSEWHERE}",
        )
