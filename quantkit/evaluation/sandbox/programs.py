"""Run one program in a sandbox, with its judge in a second one."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from quantkit.evaluation.sandbox import cgroup
from quantkit.evaluation.sandbox.inside import messages
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
Cases = Sequence[tuple[list[Any], Any]]
"""Arguments of a call, and its result."""


@dataclass(frozen=True)
class ProgramRun:
    """Result of one program. `output` is a script's stdout. `sandbox-error`: no line of the
    program ran."""

    status: Status
    detail: str = ""
    output: str = ""


@dataclass(frozen=True)
class Program:
    """Source that runs part after part in one namespace, and the function it must define, at top
    level or in a class Solution."""

    parts: tuple[str, ...]
    entry_point: str


def run_function(
    program: Program,
    helpers: str = "",
    tests: str = "",
    *,
    cases: Cases = (),
    timeout_s: float | None = None,
) -> ProgramRun:
    """Passed if `tests`, which call the function by its name, return in the judge's process
    (`helpers` is trusted source that they use), and every call with a case's arguments returns the
    case's result, as JSON values, each within `timeout_s`."""
    attempt = partial(_run_judged, program, helpers, tests, cases, timeout_s or TIMEOUT_S)
    return _run_with_retries(attempt)


def run_script(source: str, stdin: str, *, timeout_s: float | None = None) -> ProgramRun:
    """Passed if `source`, run as a file, ended by itself, by sys.exit or by os._exit; its stdout
    is in `output`."""
    return _run_with_retries(partial(_run_script, source, stdin, timeout_s or TIMEOUT_S))


def _run_with_retries(attempt: Callable[[Level], ProgramRun]) -> ProgramRun:
    """Retry failures of the sandbox itself; finally report them as sandbox-error."""
    level, problem = active_level(), ""
    for number in range(_TRIES):
        time.sleep(number * _PAUSE_S)
        try:
            run = attempt(level)
            return replace(run, detail=_printable(run.detail))
        except (
            SandboxError,
            OSError,
        ) as fault:  # an OSError is a failure of this process: disk full, no descriptor left
            problem = str(fault)
    return ProgramRun("sandbox-error", _printable(problem))


def _from_first_line(follow: Callable[[], ProgramRun]) -> ProgramRun:
    """What `follow` finds of a program that has begun. Whatever goes wrong here then is the
    program's doing: it may name, fill and change what is looked at."""
    try:
        return follow()
    except LimitExceeded as fault:
        return ProgramRun("failed", str(fault))
    except Exception as fault:
        return ProgramRun("failed", f"it cannot be followed: {fault!r}")


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))


def _run_judged(
    program: Program, helpers: str, tests: str, cases: Cases, call_s: float, level: Level
) -> ProgramRun:
    """The judge starts first and waits; the program begins when both are isolated and the judge
    requests it."""
    request = {"helpers": helpers, "tests": tests, "cases": cases, "call_timeout_s": call_s}
    timeout_s = call_s * (1 + len(cases))
    with contextlib.ExitStack() as stack:
        pipes = [_pipe(stack) for _ in range(3)]
        (calls_in, calls), (replies, replies_out), (report, report_out) = pipes
        own = {"entry_point": program.entry_point}
        sandboxes = []
        for script, message, ends in (
            ("judge.py", request | own, (calls, replies, report_out)),
            ("candidate.py", own | {"parts": program.parts}, (calls_in, replies_out)),
        ):
            stdin = stack.enter_context(tempfile.TemporaryFile())  # readable by inheritance only
            stdin.write(json.dumps(message).encode())
            stdin.seek(0)
            keep = tuple(end.fileno() for end in ends)
            command = Command([f"{{inside}}/{script}", *map(str, keep)], stdin, keep=keep)
            sandbox = contextlib.closing(SandboxProcess(level, command, timeout_s))
            sandboxes.append(stack.enter_context(sandbox))
        for end in (calls_in, calls, replies, replies_out, report_out):
            end.close()
        for started in sandboxes:
            started.wait_started()

        def next_message() -> str | None:
            """None if none came within WATCH_S, "" after the judge has ended."""
            try:
                return messages.receive(report.fileno(), WATCH_S).decode()
            except TimeoutError:
                return None
            except messages.Closed:
                return ""

        ready = _wait(next_message, [], START_S)
        if ready != "ready":
            raise SandboxError(ready or "the judge did not start")

        def follow() -> ProgramRun:
            found = _wait(next_message, sandboxes, timeout_s)
            if found is None:
                return ProgramRun("timeout", f"no verdict after {timeout_s:.1f} s")
            if not found:
                return ProgramRun("no-verdict", "the judge ended before its tests did")
            return ProgramRun(*json.loads(found))

        return _from_first_line(follow)


def _run_script(source: str, stdin: str, timeout_s: float, level: Level) -> ProgramRun:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantkit-script-")))
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
        files, views, links = [], [], []
        for number, (name, mode) in enumerate(_STREAMS.items()):
            path = folder / name
            files.append(stack.enter_context(path.open(mode)))
            path.chmod(0o666)  # a program with its own uid opens /dev/stdout by name
            views.append((str(path), f"/dev/{name}", name != "stdin"))
            for place in ("/dev/fd", "/proc/self/fd"):
                links.append((f"{place}/{number}", f"/dev/{name}"))
        given, written, errors = files
        command = Command(
            ["main.py"],
            given,
            written,
            errors,
            files={"main.py": source},
            views=tuple(views),
            links=tuple(links),
        )
        sandbox = stack.enter_context(contextlib.closing(SandboxProcess(level, command, timeout_s)))
        sandbox.wait_started()

        def ended() -> int | None:
            if sandbox.exit_code is None:
                time.sleep(_POLL_S)
            return sandbox.exit_code

        def follow() -> ProgramRun:
            code = _wait(ended, [sandbox], timeout_s)
            # By the descriptors: the program may have taken away the right to open the files.
            text = os.pread(written.fileno(), OUTPUT, 0).decode(errors="replace")
            if code is None:
                return ProgramRun("timeout", f"still running after {timeout_s:.1f} s", text)
            if code < 0:
                return ProgramRun("failed", f"ended by signal {-code}", text)
            # sys.exit may give any code; inside/ending/sitecustomize.py writes exceptions down.
            end = os.fstat(errors.fileno()).st_size
            said = os.pread(errors.fileno(), _TAIL, max(0, end - _TAIL))
            _, uncaught, detail = said.rpartition(UNCAUGHT)
            if code and uncaught:
                return ProgramRun("failed", detail.decode(errors="replace")[:2000].strip(), text)
            return ProgramRun("passed", "", text)

        return _from_first_line(follow)


_STREAMS = {"stdin": "rb", "stdout": "w+b", "stderr": "w+b"}


class LimitExceeded(Exception):
    """The processes of a sandbox together exceed a limit."""


def _wait(
    poll: Callable[[], T | None], sandboxes: list[SandboxProcess], timeout_s: float
) -> T | None:
    """The first result of `poll` that is not None, or None after `timeout_s`. Raises
    LimitExceeded, also right after the result, since checks in between are rare on a busy
    machine."""
    deadline, watched = time.monotonic() + timeout_s, time.monotonic()
    while True:
        found, now = poll(), time.monotonic()
        is_over = found is not None or now >= deadline
        if is_over or now - watched > WATCH_S:
            watched = now
            for sandbox in sandboxes:
                if excess := sandbox.excess():
                    raise LimitExceeded(excess)
        if is_over:
            return found


def _printable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


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
    for number in range(_PROBES):
        time.sleep(number * _PROBE_PAUSE_S)
        try:
            run = _run_judged(_PROBE, "", "", [([1], 1)], TIMEOUT_S, "namespaces")
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
