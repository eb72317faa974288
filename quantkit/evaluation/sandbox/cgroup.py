"""A control group (v2) for each sandbox, where this process may create one: the kernel then counts
memory of every kind, and processes.

Used where the cgroup of this process or its parent is writable and delegates the memory controller.
process.py checks limits as well.
"""

import contextlib
import secrets
import subprocess
import time
from functools import cache
from pathlib import Path


class Group:
    """Limits for added processes and their descendants: a new group in `above`. `processes`
    includes threads."""

    def __init__(self, above: Path, memory: int, processes: int) -> None:
        # A random name: a run that was killed may have left a group, and had the same pid.
        self._path = path = above / f"quantkit-{secrets.token_hex(8)}"
        path.mkdir()
        try:
            (path / "memory.max").write_text(str(memory))
            for name, value in (
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
                ("pids.max", str(processes)),
            ):
                with contextlib.suppress(OSError):  # the controller is not delegated
                    (path / name).write_text(value)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """A group can be removed once its last process is gone, which the kernel may notice
        shortly after the wait."""
        for _ in range(50):
            try:
                return self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)


def new_group(memory: int, processes: int) -> Group | None:
    above = usable()
    return None if above is None else Group(above, memory, processes)


@cache
def usable() -> Path | None:
    """The group in which we can create groups, or None."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        own = [
            line.partition("::")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        ]
    except OSError:
        return None
    for fields in mounts:
        if fields[2] == "cgroup2" and own:
            here = Path(fields[1] + own[0].rstrip("/"))
            return next((path for path in (here, here.parent) if _works(path)), None)
    return None


def _works(above: Path) -> bool:
    """Whether a group with a memory limit can be created in `above`, and a process moved into
    it."""
    try:
        if "memory" not in (above / "cgroup.subtree_control").read_text().split():
            return False
        group = Group(above, 1 << 30, 8)
    except OSError:
        return False
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:  # ends with its stdin
        try:
            group.add(child.pid)
            moved = True
        except OSError:
            moved = False
    group.remove()
    return moved
