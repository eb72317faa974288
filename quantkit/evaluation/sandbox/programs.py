"""Run one program in a sandbox, with its judge in a second one."""

import contextlib
import json
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from quantkit.evaluation.sandbox import cgroup
from quantkit.evaluation.sandbox.inside.ending.sitecustomize import UNCAUGHT
from quantkit.evaluation.sandbox.inside.isolation import NO_NAMESPACES
from quantkit.evaluation.sandbox.process import (
    OUTPUT,
    START_S,
    WATCH_S,
    Command,
    Level,
    SandboxError,
    SandboxProcess,
)

Status = Literal["passed", "failed", "timeout", "no-verdict", "sandbox-error"]

TIMEOUT_S = 10.0
_TRIES, _PAUSE_S, _POLL_S = 3, 0.3, 0.005
_TAIL = 1 << 16  # bytes of stderr searched for an exception
T = TypeVar("T")


@dataclass(frozen=True)
class ProgramRun:
    """Result of one program. `output` is a script's stdout. `sandbox-error`: no line of the
    program ran."""

    status: Status
    detail: str = ""
    output: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Program:
    """Source that runs part after part in one namespace, and the function it must define, at top
    level or in a class Solution."""

    parts: tuple[str, ...]
    entry_point: str


def run_tests(
    program: Program,
    helpers: str,
    tests: str,
    *,
    timeout_s: float | None = None,
    level: Level | None = None,
) -> ProgramRun:
    """Passed if `tests`, which call the function by its name, return in the judge's process;
    `helpers` is trusted source that they use."""
    request = _check_request(program, helpers, tests)
    return _run_with_retries(
        lambda level: _run_judged(program, request, timeout_s or TIMEOUT_S, level), level
    )


def _check_request(program: Program, helpers: str, tests: str) -> dict[str, Any]:
    return {
        "kind": "check",
        "helpers": helpers,
        "tests": tests,
        "entry_point": program.entry_point,
        "call_timeout_s": None,
    }


def run_calls(
    program: Program,
    cases: list[tuple[list[Any], Any]],
    *,
    timeout_s: float,
    level: Level | None = None,
) -> ProgramRun:
    """Passed if every call of the function with a case's arguments returns the case's result, as
    JSON values, each within `timeout_s`."""
    request = {"kind": "cases", "cases": cases, "call_timeout_s": timeout_s}
    return _run_with_retries(
        lambda level: _run_judged(program, request, timeout_s * (len(cases) + 1), level), level
    )


def run_script(
    source: str, stdin: str, *, timeout_s: float | None = None, level: Level | None = None
) -> ProgramRun:
    """Passed if `source`, run as a file, ended by itself, by sys.exit or by os._exit; its stdout
    is in `output`."""
    return _run_with_retries(
        lambda level: _run_script(source, stdin, timeout_s or TIMEOUT_S, level), level
    )


def _run_with_retries(attempt: Callable[[Level], ProgramRun], level: Level | None) -> ProgramRun:
    """Retry failures of the sandbox itself; finally report them as sandbox-error."""
    level = level or active_level()
    problem = ""
    for number in range(_TRIES):
        time.sleep(number * _PAUSE_S)
        try:
            return attempt(level)
        except (
            SandboxError,
            OSError,
        ) as fault:  # an OSError is a failure of this process: disk full, no descriptor left
            problem = str(fault)
    return ProgramRun("sandbox-error", problem)


def _from_first_line(follow: Callable[[float], ProgramRun]) -> ProgramRun:
    """What `follow`, given the time of the start, finds of a program that has begun. Whatever goes
    wrong here then is the program's doing: it may name, fill and change what is looked at."""
    start = time.monotonic()
    try:
        return follow(start)
    except Exception as fault:
        detail = (
            str(fault) if isinstance(fault, LimitExceeded) else f"it cannot be followed: {fault!r}"
        )
        return ProgramRun("failed", _printable(detail), seconds=time.monotonic() - start)


def _run_judged(
    program: Program, request: dict[str, Any], timeout_s: float, level: Level
) -> ProgramRun:
    """The judge starts first and waits; the program begins when both are isolated and the judge
    requests it."""
    with contextlib.ExitStack() as stack:
        calls, replies, report = (stack.enter_context(_Pipe()) for _ in range(3))
        sandboxes = []
        for script, message, keep in (
            ("judge.py", request, (calls.write, replies.read, report.write)),
            (
                "candidate.py",
                {"parts": program.parts, "entry_point": program.entry_point},
                (calls.read, replies.write),
            ),
        ):
            stdin = stack.enter_context(_anonymous_file(json.dumps(message).encode()))
            command = Command([f"{{inside}}/{script}", *map(str, keep)], stdin, keep=keep)
            sandboxes.append(
                stack.enter_context(contextlib.closing(SandboxProcess(level, command, timeout_s)))
            )
        for pipe in (calls, replies):
            pipe.close()
        report.close_write()
        for sandbox in sandboxes:
            sandbox.wait_started()
        lines = _Lines(report.read)
        ready = _wait(lines.next, [], START_S)
        if ready != b"ready":
            fault = json.loads(ready)["fault"] if ready else "the judge did not start"
            raise SandboxError(_printable(fault))
        return _from_first_line(
            lambda start: _verdict(
                _wait(lines.next, sandboxes, timeout_s), time.monotonic() - start
            )
        )


def _verdict(line: bytes | None, seconds: float) -> ProgramRun:
    if line is None:
        return ProgramRun("timeout", f"no verdict after {seconds:.1f} s", seconds=seconds)
    if not line:
        return ProgramRun("no-verdict", "the judge ended before its tests did", seconds=seconds)
    verdict = json.loads(line)
    return ProgramRun(verdict["status"], _printable(verdict["detail"]), seconds=seconds)


def _run_script(source: str, stdin: str, timeout_s: float, level: Level) -> ProgramRun:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantkit-script-")))
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
        given, out, verdict = (
            stack.enter_context((folder / name).open(mode)) for name, mode in _STREAMS.items()
        )
        for name in _STREAMS:
            (folder / name).chmod(0o666)  # a program with its own uid opens /dev/stdout by name
        views = tuple((str(folder / name), f"/dev/{name}", name != "stdin") for name in _STREAMS)
        links = tuple(
            (f"{place}/{number}", f"/dev/{name}")
            for place in ("/dev/fd", "/proc/self/fd")
            for number, name in enumerate(_STREAMS)
        )
        command = Command(
            ["main.py"], given, out, verdict, files={"main.py": source}, views=views, links=links
        )
        sandbox = stack.enter_context(contextlib.closing(SandboxProcess(level, command, timeout_s)))
        sandbox.wait_started()

        def follow(start: float) -> ProgramRun:
            code = _wait(lambda: _poll_exit(sandbox), [sandbox], timeout_s)
            seconds = time.monotonic() - start
            # By the descriptors: the program may have taken away the right to open the files.
            text = os.pread(out.fileno(), OUTPUT, 0).decode(errors="replace")
            if code is None:
                return ProgramRun("timeout", f"still running after {seconds:.1f} s", text, seconds)
            size = os.fstat(verdict.fileno()).st_size
            if problem := _problem(code, os.pread(verdict.fileno(), _TAIL, max(0, size - _TAIL))):
                return ProgramRun("failed", problem, text, seconds)
            return ProgramRun("passed", "", text, seconds)

        return _from_first_line(follow)


_STREAMS = {"stdin": "rb", "stdout": "w+b", "stderr": "w+b"}


def _problem(code: int, errors: bytes) -> str:
    """A failed end of a script: a signal, or an uncaught exception, which
    inside/ending/sitecustomize.py writes down. sys.exit may give any code."""
    if code < 0:
        return f"ended by signal {-code}"
    _, uncaught, detail = errors.rpartition(UNCAUGHT)
    return _printable(detail.decode(errors="replace"))[:2000].strip() if code and uncaught else ""


class LimitExceeded(Exception):
    """The processes of a sandbox together exceed a limit."""


def _wait(
    poll: Callable[[], T | None], sandboxes: list[SandboxProcess], timeout_s: float
) -> T | None:
    """The first result of `poll` that is not None, or None after `timeout_s`. Raises
    LimitExceeded, also right after the result, since checks in between are rare on a busy
    machine."""
    deadline, watched = time.monotonic() + timeout_s, time.monotonic()
    while (found := poll()) is None and time.monotonic() < deadline:
        if time.monotonic() - watched > WATCH_S:
            watched = time.monotonic()
            _check_limits(sandboxes)
    _check_limits(sandboxes)
    return found


def _check_limits(sandboxes: list[SandboxProcess]) -> None:
    for sandbox in sandboxes:
        if excess := sandbox.excess():
            raise LimitExceeded(excess)


def _poll_exit(sandbox: SandboxProcess) -> int | None:
    if sandbox.exit_code is None:
        time.sleep(_POLL_S)
    return sandbox.exit_code


class _Lines:
    """Lines of the judge's report as they come; b"" after the judge has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._data = descriptor, b""

    def next(self) -> bytes | None:
        """The next line, or None if none came within WATCH_S."""
        while b"\n" not in self._data and select.select([self._descriptor], [], [], WATCH_S)[0]:
            chunk = os.read(self._descriptor, 1 << 16)
            self._data += chunk
            if not chunk:
                return b""
        line, newline, rest = self._data.partition(b"\n")
        if not newline:
            return None
        self._data = rest
        return line


def _printable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


@contextlib.contextmanager
def _anonymous_file(data: bytes) -> Iterator[IO[bytes]]:
    """A file without a name, readable only by inheritance."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file


class _Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._open = {self.read, self.write}

    def __enter__(self) -> "_Pipe":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def close_write(self) -> None:
        self._open.discard(self.write)
        os.close(self.write)


_PROBES, _PROBE_PAUSE_S = 5, 0.4
_PROBE = Program(("def f(x): return x",), "f")


@dataclass(frozen=True)
class IsolationLevel:
    """The strongest level available on this machine, and why not a stronger one."""

    level: Level
    reason: str = ""

    def __str__(self) -> str:
        if self.level == "rlimits":
            return (
                "programs run in a sandbox of level rlimits, with this user's rights to files "
                f"and processes ({self.reason})"
            )
        memory = "by a cgroup" if cgroup.usable() else "by watching"
        return (
            "programs run in a sandbox of level namespaces: no files, no network, system "
            f"calls filtered, memory held {memory}"
        )


@cache
def find_level() -> IsolationLevel:
    """Runs a trivial program in namespaces, with retries, since a busy machine may fail; falls
    back to rlimits."""
    reason = ""
    request = _check_request(_PROBE, "", "assert f((1, 'a')) == (1, 'a')")
    for number in range(_PROBES):
        time.sleep(number * _PROBE_PAUSE_S)
        try:
            run = _run_judged(_PROBE, request, TIMEOUT_S, "namespaces")
        except (SandboxError, OSError) as fault:
            reason = str(fault)
            if NO_NAMESPACES in reason:
                break
            continue
        if run.status == "passed":
            return IsolationLevel("namespaces")
        reason = f"{run.status}: {run.detail}"
    return IsolationLevel("rlimits", reason)


def active_level() -> Level:
    return find_level().level


def workers() -> int:
    """Programs to run in parallel: one per CPU that this process may use, so that wall-clock
    limits stay fair."""
    return len(os.sched_getaffinity(0))
