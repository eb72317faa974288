"""Whether an output may be begun, or gone on with: what stands under OUT and OUT.partial.

Whatever quantkit is about to make in OUT.partial is noted there first, so that starting anew
removes that and nothing else.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.checkpoint.journal import journals, lock_path, read_fingerprint
from quantkit.checkpoint.lock import check_free
from quantkit.checkpoint.manifest import check_own, differences, read_manifest
from quantkit.checkpoint.output_dir import replaced_of
from quantkit.common.errors import QuantkitError

STATE = ".quantkit"
"""The directory of journals and locks, in OUT.partial."""
_NOTED = "files.json"


def check_target(out: Path, run: Mapping[str, str], overwrite: bool) -> None:
    """Raise QuantkitError where `out` exists and may not be replaced."""
    aside = replaced_of(out)
    if os.path.lexists(aside):
        raise QuantkitError(f"{aside} exists: what {out} was before, or yours", "move it away")
    if not os.path.lexists(out):
        return
    if overwrite:
        return check_own(out)
    begun = read_manifest(out).get("run")
    if begun is None:
        if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
            raise QuantkitError(f"{out} exists", "choose another --out, or give --overwrite")
        raise QuantkitError(
            f"{out} exists, and quantkit did not make it",
            "choose another --out, or remove it by hand",
        )
    different = differences(
        begun, {key: value for key, value in run.items() if key != "layout"}
    )  # which follows from the others
    how = f"made with a different {different}" if different else "and is not as it was written"
    raise QuantkitError(f"{out} exists, {how}", "choose another --out, or give --overwrite")


def check_partial(partial: Path) -> None:
    """Raise QuantkitError where `partial` is there and is no unfinished output."""
    if not os.path.lexists(partial):
        return
    # One look: another rank may be creating the directory, and makes the state directory before
    # anything else in it.
    directory = partial.is_dir() and not partial.is_symlink() and not (partial / STATE).is_symlink()
    names = {path.name for path in partial.iterdir()} if directory else set()
    if not directory or (names and STATE not in names):
        raise QuantkitError(
            f"{partial} exists and is no unfinished output of quantkit", "move it away"
        )


def check_files(partial: Path) -> None:
    """Raise QuantkitError naming a file in an unfinished output that quantkit did not put there, or
    that is another's, too."""
    noted = read_noted(partial)
    for path in sorted(partial.iterdir()):
        if path.name != STATE and path.name.removesuffix(".new") not in noted:
            raise QuantkitError(
                f"{partial} holds {path.name}, which quantkit did not write", "move it away"
            )
    for path in (*partial.iterdir(), *(partial / STATE).iterdir()):
        try:
            found = path.lstat()
        except FileNotFoundError:  # another rank's, that got its name
            continue
        if path.name != STATE and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
            raise QuantkitError(
                f"{path} is a link, or no file, and writing it would change another", "move it away"
            )


def check_run(partial: Path, run: Mapping[str, str], rank: int, *, discard: bool) -> None:
    """Refuse, or with `discard` empty, an unfinished output that another source, recipe or version
    began."""
    state = partial / STATE
    for path in journals(state):
        begun = read_fingerprint(path)
        if begun == run:
            continue
        for number in range(len(journals(state)) + rank + 1):
            check_free(lock_path(state, number), partial)
        different = ", ".join(
            key for key in sorted({*begun, *run}) if begun.get(key) != run.get(key)
        )
        if not discard:
            raise QuantkitError(
                f"{partial} was begun with a different {different}",
                "run the command that began it, or give --overwrite to start anew",
            )
        return _empty(partial)


def note_files(partial: Path, names: Iterable[str]) -> None:
    """Note that these files, in `partial`, will be quantkit's."""
    fresh = partial / STATE / f"{_NOTED}.new"
    fresh.write_text(json.dumps(sorted({*read_noted(partial), *names})))
    fresh.rename(partial / STATE / _NOTED)


def read_noted(partial: Path) -> set[str]:
    path = partial / STATE / _NOTED
    return set(json.loads(path.read_text())) if path.exists() else set()


def _empty(partial: Path) -> None:
    """Remove everything but the locks: `check_files` has found nothing that is not quantkit's."""
    for path in (*partial.iterdir(), *(partial / STATE).iterdir()):
        if path.name != STATE and path.suffix != ".lock":
            path.unlink()
