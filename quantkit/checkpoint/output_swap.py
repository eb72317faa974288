"""Putting a finished directory in the place of its name, and of what stood there, so that a kill
leaves one of the two whole.

On Linux the new and the old directory are exchanged in one step. A file system that cannot (NFS)
gets two renames, between which a kill leaves the old one under OUT.replaced.

The state directory (journals, locks) goes with the new one and is removed last: seen inside OUT, it
says that what remains to do is only to clear up. Of what was replaced, only what its manifest lists
is removed.
"""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from quantkit.checkpoint.manifest import check_own, read_manifest, remove_own
from quantkit.checkpoint.output_dir import replaced_of

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# in the state directory: the old directory is, or will be, under the name of the partial one
_EXCHANGING = "exchanging"


def replace_directory(partial: Path, out: Path, state: str) -> None:
    """Turn `partial` into `out`, deleting what `out` was; `state` is the name of the directory
    within that is not kept. Raises QuantkitError, and changes nothing, where `out` holds anything
    that quantkit did not write."""
    _sync(partial)
    if not os.path.lexists(out):
        partial.rename(out)
    else:
        check_own(out)
        (partial / state / _EXCHANGING).touch()
        if not _exchange(partial, out):
            aside = replaced_of(out)
            out.rename(aside)
            partial.rename(out)
            aside.rename(partial)
    _sync(out.parent)
    remove_leftovers(partial, out, state)


def remove_leftovers(partial: Path, out: Path, state: str) -> None:
    """Clear up behind a directory that is in its place: the one it replaced, then its state
    directory."""
    if not read_manifest(out) or not (out / state).is_dir() or (out / state).is_symlink():
        return
    if (out / state / _EXCHANGING).exists() and partial.is_dir() and not partial.is_symlink():
        remove_own(partial)
    shutil.rmtree(out / state)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
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


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
