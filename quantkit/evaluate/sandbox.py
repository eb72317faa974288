"""Running untrusted, model-written Python.

Every run is a fresh interpreter in its own session with an empty directory, no environment, and limits on CPU, memory, file size,
open files and processes. Where the kernel allows user namespaces it also gets its own process tree, no network, and a file system that
holds the interpreter, the system libraries and a small scratch space, nothing else. `active_level` finds out once which of the two this
machine gives.

The verdict is a nonce that the child sends after the tests returned; exit codes are not believed. A program that searches its own
interpreter's frames can still forge the nonce: that needs intent, and no walls inside one interpreter stop it.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import QuantkitError

Level = Literal["namespaces", "rlimits"]
Status = Literal["passed", "failed", "timeout", "no-verdict", "sandbox-error"]

# What each level holds, as the attack suite in the tests shows; the rest it does not.
HOLDS: dict[Level, frozenset[str]] = {
    "rlimits": frozenset({"early-exit", "patched-builtins", "endless-output", "memory", "endless-loop"}),
    "namespaces": frozenset(
        {"early-exit", "patched-builtins", "endless-output", "memory", "endless-loop"}
        | {"kill-parent", "orphan", "fork-bomb", "fill-disk", "read-environment", "read-home", "network"}
    ),
}
TIMEOUT_S = 10.0
_MIB = 1 << 20
_MEMORY, _FILE, _DISK_MIB, _OUTPUT, _REPORT = 2048 * _MIB, 16 * _MIB, 64, 16 * _MIB, 32 * _MIB
_RUNNER = Path(__file__).with_name("sandbox_runner.py")
_RETRIES = 3


@dataclass(frozen=True)
class Run:
    """What one program did. `result` for a call, `output` (stdout) for a script."""

    status: Status
    detail: str = ""
    output: str = ""
    result: Any = None
    seconds: float = 0.0


@cache
def active_level() -> Level:
    """The strongest level that works here, found by running a trivial program in it."""
    run = _attempt(
        "namespaces", {"kind": "tests", "program": "def f(): return 1", "tests": "assert f() == 1", "entry_point": "f"}, TIMEOUT_S
    )
    return "namespaces" if run.status == "passed" else "rlimits"


def run_tests(program: str, tests: str, entry_point: str, *, timeout_s: float = TIMEOUT_S, level: Level | None = None) -> Run:
    """Passed if `program` defines its names and then `tests`, run in the same process, return without raising."""
    return _run({"kind": "tests", "program": program, "tests": tests, "entry_point": entry_point}, timeout_s, level)


def run_script(program: str, stdin: str, *, timeout_s: float = TIMEOUT_S, level: Level | None = None) -> Run:
    """Passed if the program ran to its end; what it printed is in `output`."""
    return _run({"kind": "script", "program": program, "stdin": stdin}, timeout_s, level)


def run_call(program: str, entry_point: str, arguments: list[Any], *, timeout_s: float = TIMEOUT_S, level: Level | None = None) -> Run:
    """Passed if `entry_point(*arguments)` returned something that JSON can carry; it is in `result`."""
    return _run({"kind": "call", "program": program, "entry_point": entry_point, "arguments": arguments}, timeout_s, level)


def _run(request: dict[str, Any], timeout_s: float, level: Level | None) -> Run:
    """A fault of the sandbox itself is retried, and in the end reported as such: it says nothing about the program."""
    level = level or active_level()
    run = _attempt(level, request, timeout_s)
    for _ in range(_RETRIES - 1):
        if run.status != "sandbox-error":
            return run
        time.sleep(0.2)
        run = _attempt(level, request, timeout_s)
    return run


def _attempt(level: Level, request: dict[str, Any], timeout_s: float) -> Run:
    nonce = secrets.token_hex(16)
    work = tempfile.mkdtemp(prefix="quantkit-sandbox-")
    report_read, report_write = os.pipe()
    limits = {"CPU": int(timeout_s) + 1, "AS": _MEMORY, "FSIZE": _FILE, "NOFILE": 64, "CORE": 0, "NPROC": 16}
    request = request | {
        "isolate": level == "namespaces",
        "limits": limits,
        "disk_mib": _DISK_MIB,
        "paths": _system_paths(),
        "packages": _packages(),
        "work": work,
        "report_fd": report_write,
        "nonce": nonce,
    }
    home = "/work" if level == "namespaces" else work
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [_interpreter(), "-I", "-S", "-B", str(_RUNNER)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                pass_fds=(report_write,),
                cwd=work,
                env=environment,
                start_new_session=True,
            )
            os.close(report_write)
            try:
                assert process.stdin
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
                line, ended = _read_line(report_read, process, start + timeout_s)
            finally:
                _kill_session(process)
        except (OSError, subprocess.SubprocessError) as error:
            return Run("sandbox-error", f"{type(error).__name__}: {error}")
        finally:
            os.close(report_read)
            shutil.rmtree(work, ignore_errors=True)
        output.seek(0)
        text = output.read(_OUTPUT).decode(errors="replace")
    return _judge(line, ended, nonce, text, time.monotonic() - start)


def _read_line(descriptor: int, process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """The report line, and whether the child ended (False: the deadline passed).

    An orphan may hold the pipe open, so its end is not awaited.
    """
    data = bytearray()
    os.set_blocking(descriptor, False)
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        ready, _, _ = select.select([descriptor], [], [], 0.0 if ended else min(0.1, max(0.0, deadline - time.monotonic())))
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            data += chunk
            if b"\n" in chunk or len(data) > _REPORT:
                return bytes(data).split(b"\n")[0], True
            if chunk:
                continue
            time.sleep(0.001)  # every writer is gone; the child ends now
        if ended:
            return bytes(data), True
    return bytes(data), False


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(line: bytes, ended: bool, nonce: str, output: str, seconds: float) -> Run:
    try:
        report = json.loads(line) if line else {}
    except ValueError:
        report = {}
    report = report if isinstance(report, dict) else {}
    if "fault" in report:
        return Run("sandbox-error", str(report["fault"]), seconds=seconds)
    if report.get("verdict") == nonce:
        return Run("passed", output=output, result=report.get("result"), seconds=seconds)
    if "error" in report:
        return Run("failed", str(report["error"]), output=output, seconds=seconds)
    if not ended:
        return Run("timeout", f"no verdict after {seconds:.1f} s", output=output, seconds=seconds)
    return Run("no-verdict", "the program ended before its tests did", output=output, seconds=seconds)


def _interpreter() -> str:
    """The real interpreter behind a virtual environment, which sees the standard library only."""
    return os.path.realpath(sys.executable)


@cache
def _system_paths() -> list[str]:
    """What a program may read besides its scratch space: system libraries and the interpreter's own files."""
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if prefix.startswith("/usr") else [*paths, f"{prefix}/bin", f"{prefix}/lib"]


@cache
def _packages() -> list[str]:
    """numpy, which contest solutions expect, and the libraries beside it."""
    spec = find_spec("numpy")
    if spec is None or spec.origin is None:
        raise QuantkitError("numpy is not installed", "reinstall quantkit")
    package = Path(spec.origin).parent
    return [str(path) for path in (package, package.with_name("numpy.libs")) if path.is_dir()]


def workers() -> int:
    """Programs to run beside each other: one per core this process may use, so that the wall clock stays fair."""
    return len(os.sched_getaffinity(0))
