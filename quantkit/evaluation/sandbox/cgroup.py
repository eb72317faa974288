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
        except OSError:
            self.remove()
            raise
        further = {"memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes}
        for name, value in further.items():
            with contextlib.suppress(OSError):  # the controller is not delegated
                (path / name).write_text(str(value))

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """A group can be removed once its last process is gone, which the kernel may notice
        shortly after the wait."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                return self._path.rmdir()
            if not self._path.exists():
                return
            time.sleep(0.01)


@cache
def usable() -> Path | None:
    """The group in which we can create groups with a memory limit, and move a process into them, or
    None."""
    with contextlib.suppress(OSError):
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        at = next((line.split()[1] for line in mounts if line.split()[2] == "cgroup2"), None)
        own = next((line[3:] for line in groups if line.startswith("0::")), None)
        for above in (Path(f"{at}{own}"), Path(f"{at}{own}").parent) if at and own else ():
            with contextlib.suppress(OSError):
                if "memory" in (above / "cgroup.subtree_control").read_text().split():
                    group = Group(above, 1 << 30, 8)
                    try:  # cat ends with its stdin
                        with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
                            group.add(child.pid)
                        return above
                    finally:
                        group.remove()
    return None
