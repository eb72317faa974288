"""Start an isolated process tree, check its resource use, and kill it."""

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.sandbox import cgroup

Level = Literal["namespaces", "rlimits"]

MIB = 1 << 20
MEMORY = 2048 * MIB  # of each process, and of all processes of a sandbox together
OUTPUT = 16 * MIB  # of each file, so also of stdout
DISK_MIB, PROCESSES, FILES, STACK = 64, 80, 128, 64 * MIB
CPUS = 8  # process pools start one worker per visible CPU
OWN_PROCESSES = 4  # processes of a sandbox between this process and the program, and one spare
START_S = 30.0  # for setting up the isolation on a busy machine
WATCH_S = 0.05
INSIDE = Path(__file__).with_name("inside")


class SandboxError(Exception):
    """The isolation could not be set up. Says nothing about the program, which has not started."""


@dataclass(frozen=True)
class Command:
    """What runs in the sandbox: interpreter arguments, streams (None: discarded), and inherited
    pipes.

    files: text files in its directory. views: more host files that it sees, as (source, path
    inside, writable), and links: symbolic links, as (path inside, target); only with namespaces.
    """

    arguments: list[str]
    stdin: IO[bytes]
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None
    keep: tuple[int, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    views: tuple[tuple[str, str, bool], ...] = ()
    links: tuple[tuple[str, str], ...] = ()


class SandboxProcess:
    """One process tree isolated at `level`. cpu_s: seconds of CPU time for each process."""

    def __init__(self, level: Level, command: Command, cpu_s: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="quantkit-sandbox-"))
        self._started, started = os.pipe()
        self._ended, ended = os.pipe()
        self._level = level
        self._status: int | None = None
        self._group: cgroup.Group | None = None
        try:
            if (above := cgroup.usable()) is not None:
                self._group = cgroup.Group(above, MEMORY, PROCESSES + OWN_PROCESSES)
            self._process = self._start(level, command, cpu_s, started, ended)
        except (OSError, subprocess.SubprocessError) as error:
            self._remove()
            raise SandboxError(f"{type(error).__name__}: {error}") from error
        finally:
            os.close(started)
            os.close(ended)

    def _start(
        self, level: Level, command: Command, cpu_s: float, started: int, ended: int
    ) -> subprocess.Popen[bytes]:
        root = self.directory / "root"
        root.mkdir()
        stdin = command.stdin.fileno()
        process = subprocess.Popen(
            [_interpreter(), "-I", "-S", "-B", str(INSIDE / "launcher.py")],
            stdin=subprocess.PIPE,
            stdout=command.stdout or subprocess.DEVNULL,
            stderr=command.stderr or subprocess.DEVNULL,
            pass_fds=(started, ended, stdin, *command.keep),
            cwd="/",
            start_new_session=True,
        )
        if self._group is not None:
            self._group.add(process.pid)
        descriptors = {"started": started, "ended": ended, "input": stdin}
        request = _request(level, command, root, cpu_s) | descriptors
        assert process.stdin
        with (
            contextlib.suppress(BrokenPipeError),
            process.stdin as pipe,
        ):  # a dead launcher is detected in wait_started
            pipe.write(json.dumps(request).encode())
        return process

    def wait_started(self) -> None:
        """Return once the isolation is set up. Raises SandboxError."""
        data, deadline = b"", time.monotonic() + START_S
        while select.select([self._started], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(self._started, 4096)
            data += chunk
            if not chunk:
                break
        if data != b"ready":
            raise SandboxError(
                data.removeprefix(b"ready").decode(errors="replace")
                or "the isolation was not set up in time"
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n after signal n."""
        code = self._process.poll()
        if code is None:
            return None
        if self._status is None:  # with namespaces process 1 passes it on, unless it was killed
            instead = -signal.SIGKILL if self._level == "namespaces" else code
            self._status = int(os.read(self._ended, 16) or instead)
        return self._status

    def excess(self) -> str:
        """The limit that the process tree exceeds, or an empty string. Memory: private, shared,
        swapped, page tables."""
        pids, threads = tree(self._process.pid)
        if threads > PROCESSES + OWN_PROCESSES:  # root without a second id has no process limit
            return f"more than {PROCESSES} processes and threads"
        # The exact sum is slow, so it is read only where the fast one exceeds the limit.
        if sum(map(_private_bytes, pids)) > MEMORY and sum(map(_proportional_bytes, pids)) > MEMORY:
            return f"more than {MEMORY >> 20} MiB of memory"
        return ""

    def close(self) -> None:
        """Kill every process and remove all files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._remove()

    def _remove(self) -> None:
        os.close(self._started)
        os.close(self._ended)
        if self._group is not None:
            self._group.remove()
        shutil.rmtree(self.directory, ignore_errors=True)


_ENVIRONMENT = (
    "PATH=/usr/bin:/bin PYTHONHASHSEED=0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 LANG=C.UTF-8 "
    "MALLOC_ARENA_MAX=2 QUANTKIT_PROGRAM=1"  # an arena takes 64 MiB of addresses
)


def _request(level: Level, command: Command, root: Path, cpu_s: float) -> dict[str, Any]:
    isolate, packages = level == "namespaces", _packages()
    home, inside = ("/work", "/sandbox") if isolate else (str(root), str(INSIDE))
    paths = ["/packages"] if isolate else sorted({str(package.parent) for package in packages})
    views: list[tuple[str, str, bool]] = [(name, name, False) for name in _system_paths()]
    views += [(str(package), f"/packages/{package.name}", False) for package in packages]
    views += [(str(INSIDE), "/sandbox", False), *command.views]
    counted = 0 if isolate and _has_namespace_process_limits() else _count_user_threads()
    cpus = sorted(os.sched_getaffinity(0))
    limits = {"CPU": int(cpu_s) + 1, "AS": MEMORY, "FSIZE": OUTPUT, "NOFILE": FILES, "CORE": 0}
    limits |= {"NPROC": PROCESSES + counted, "STACK": STACK, "MSGQUEUE": 0, "SIGPENDING": 256}
    arguments = [argument.replace("{inside}", inside) for argument in command.arguments]
    environment = dict(pair.split("=") for pair in _ENVIRONMENT.split())
    path = os.pathsep.join([*paths, f"{inside}/ending"])
    return {
        "caller": os.getpid(),
        "isolate": isolate,
        "root": str(root),
        "views": views,
        "links": command.links,
        "disk_mib": DISK_MIB,
        "cpus": random.sample(cpus, min(CPUS, len(cpus))),
        "files": command.files,
        "command": [_interpreter(), "-s", "-B", *arguments],
        "environment": environment | {"HOME": home, "TMPDIR": home, "PYTHONPATH": path},
        "limits": limits | {"MEMLOCK": MIB},
    }


def _interpreter() -> str:
    """The real interpreter of a virtual environment, with the standard library only."""
    return os.path.realpath(sys.executable)


@cache
def _system_paths() -> list[str]:
    """What a program may read in addition to its scratch space: system libraries and the
    interpreter."""
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if prefix.startswith("/usr") else [*paths, f"{prefix}/bin", f"{prefix}/lib"]


@cache
def _packages() -> list[Path]:
    """numpy, which contest solutions expect, and its bundled libraries."""
    spec = find_spec("numpy")
    if spec is None or spec.origin is None:
        raise QuantkitError("numpy is not installed", "reinstall quantkit")
    package = Path(spec.origin).parent
    return [path for path in (package, package.with_name("numpy.libs")) if path.is_dir()]


def _has_namespace_process_limits() -> bool:
    """Whether the kernel counts a user's processes per user namespace (Linux 5.14)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 14)


def _count_user_threads() -> int:
    """Threads outside the sandbox that count against its process limit: those of this user, and
    of uid 65534, which root's sandboxes use."""
    users, count = {os.getuid(), 65534}, 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(entry / "task")) if entry.stat().st_uid in users else 0
    return count


def tree(pid: int) -> tuple[list[int], int]:
    """A process with its descendants, and their number of threads."""
    found, threads = [pid], 0
    for one in found:
        with contextlib.suppress(OSError, ValueError):
            for task in os.listdir(f"/proc/{one}/task"):
                threads += 1
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_bytes().split())
    return found, threads


_HELD = (b"RssAnon", b"RssShmem", b"VmSwap", b"VmPTE", b"HugetlbPages")


def _private_bytes(pid: int) -> int:
    return _fields(f"/proc/{pid}/status", _HELD)


def _proportional_bytes(pid: int) -> int:
    """Shared pages divided by the number of their processes, where the kernel reports it; else
    `_private_bytes`."""
    try:
        return _fields(
            f"/proc/{pid}/smaps_rollup", (b"Pss_Anon", b"Pss_Shmem", b"SwapPss")
        ) + _fields(f"/proc/{pid}/status", (b"VmPTE",))
    except PermissionError:
        return _private_bytes(pid)


def _fields(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of some kB fields of a file in /proc, in bytes; 0 for a process that has ended. Bytes:
    a program may name its process as it likes."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(b":")[0] in names)
