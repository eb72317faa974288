"""Where an output may go: apart from everything that is read for it.

Paths are compared by what they lead to (device and inode of every folder on the way), so that
links, mounts and other spellings of a path do not count.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from quantkit.common.errors import QuantkitError

_Id = tuple[int, int]


def absolute(out: Path) -> Path:
    """The path with the links of its parents resolved, its own not. Raises QuantkitError for the
    root, which nothing can replace."""
    path = (
        Path(os.path.realpath(out))
        if out.name in ("", "..")
        else Path(os.path.realpath(out.parent)) / out.name
    )
    _refuse(not path.name, f"{path} cannot be an output")
    return path


def partial_of(out: Path) -> Path:
    """Where `out` is made."""
    return out.with_name(f"{out.name}.partial")


def replaced_of(out: Path) -> Path:
    """Where what stood under `out` is for a moment, on file systems that cannot exchange two
    names."""
    return out.with_name(f"{out.name}.replaced")


def check_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Raise QuantkitError where writing `out` would touch one of `inputs`, files or directories:
    one is, holds or shares files with the other."""
    out = absolute(out)
    for given in inputs:
        for target in (out, partial_of(out), replaced_of(out)):
            _check_pair(target, given)


def check_folder(out: Path, inputs: Iterable[Path]) -> None:
    """Raise QuantkitError where a folder of results would be written into one of `inputs`, or among
    the weights of any model."""
    for given in inputs:
        _refuse(
            bool(_way_to(out) & _folders(given)), f"{out} is or lies in {given}, which is only read"
        )
    holds_model = (out / "config.json").exists() and any(out.glob("*.safetensors"))
    _refuse(holds_model, f"{out} holds a model, and results would be written among its files")


def _check_pair(target: Path, given: Path) -> None:
    place = _ids([target])
    _refuse(bool(place & _ids([given])), f"{target} is the same as {given}, which is only read")
    _refuse(
        bool(_way_to(target) & _folders(given)), f"{target} lies in {given}, which is only read"
    )
    _refuse(bool(_way_to(given) & place), f"{given} lies in {target}, which is to be written")
    ours = {one: path for path in _entries(target) for one in _ids([path])}
    for file in _entries(given):
        _refuse(
            bool(_way_to(file) & place), f"{file} is a link into {target}, which is to be written"
        )
        for one in _ids([file]) & ours.keys():
            _refuse(True, f"{file} and {ours[one]} are one file")


def _refuse(fault: bool, problem: str) -> None:
    if fault:
        raise QuantkitError(problem, "choose another --out")


def _way_to(path: Path) -> set[_Id]:
    """What `path` leads to and every folder above that, as far as they exist."""
    real = Path(os.path.realpath(path))
    return _ids([real, *real.parents])


def _folders(given: Path) -> set[_Id]:
    """The folder and those in it, one of which may be mounted elsewhere."""
    return _ids([given, *(path for path in _entries(given) if path.is_dir())])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _ids(paths: Iterable[Path]) -> set[_Id]:
    """Of those that exist."""
    found = set()
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found.add((stat.st_dev, stat.st_ino))
    return found
