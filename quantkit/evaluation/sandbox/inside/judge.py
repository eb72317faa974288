"""The trusted side: runs the tests. The function under test is a proxy that sends its arguments to
the other process.

    python judge.py CALLS REPLIES REPORT < request

REPORT gets the message "ready" once the tests are prepared, before the first line of the program
runs, then status and detail as JSON. From "ready" on every failure is the program's.

The proxy's return values are built by values.loads, so their equality, length and truth are
Python's own. Arguments are copies: the program cannot change what a test compares with.
"""

import builtins
import contextlib
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import messages
import values


class ProgramFault(BaseException):
    """The program ended early, or replied with something that is not a value: status and detail. A
    BaseException, so that tests that catch Exception do not pass."""


class Candidate:
    """Calls of the function, one message each way."""

    def __init__(self, calls: int, replies: int, timeout_s: float) -> None:
        self._calls, self._replies, self._timeout_s = calls, replies, timeout_s
        self.fault: ProgramFault | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.ask(values.dumps([arguments, named]))

    def ask(self, message: bytes) -> Any:
        """An empty message lets the program define its names. Raises the program's exception."""
        try:
            messages.send(self._calls, message)
            reply = messages.receive(self._replies, self._timeout_s)
            kind, value = reply[:1], values.loads(reply[1:])
            if kind == b"e":
                names, text = value
                names, text = [str(name) for name in names], str(text)
        except (messages.Closed, BrokenPipeError):
            raise self._fail("no-verdict", "the program ended before its tests did") from None
        except TimeoutError:
            raise self._fail("timeout", f"no answer after {self._timeout_s:g} s") from None
        except (ValueError, TypeError) as error:
            raise self._fail("failed", f"the answer cannot be read: {error}") from None
        if kind == b"v":
            return value
        if kind == b"e":
            raise self._to_exception(names, text)
        raise self._fail("failed", f"the function returned {value}")

    def _fail(self, status: str, detail: str) -> ProgramFault:
        self.fault = ProgramFault(status, detail)
        return self.fault

    def _to_exception(self, names: list[str], text: str) -> BaseException:
        """The program's exception as the nearest builtin one, so that tests may expect it;
        SystemExit and the like end the tests."""
        detail = f"{names[0] if names else 'an exception'}: {text}"
        for name in names:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                if kind in (StopIteration, StopAsyncIteration):
                    kind = RuntimeError  # as PEP 479: in map(candidate, ...) it would end the loop
                try:
                    error = kind(text)
                except TypeError:  # Unicode errors need five arguments
                    error = Exception(text)
                error.of_candidate = detail  # type: ignore[attr-defined]
                return error
        return self._fail("failed", detail)


def tests_of(request: dict[str, Any], candidate: Candidate) -> Callable[[], None]:
    """The tests' code after the prompt's helpers, with `entry_point` bound to the candidate; or
    calls with expected results, compared as JSON values."""
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(request["helpers"], "<prompt>", "exec", dont_inherit=True), space)
    tests = compile(request["tests"], "<tests>", "exec", dont_inherit=True)

    def run() -> None:
        space[request["entry_point"]] = candidate
        exec(tests, space)
        for number, (arguments, expected) in enumerate(request["cases"], start=1):
            try:
                got = candidate(*arguments)
            except BaseException as error:
                error.add_note(f"test {number}")
                raise
            with contextlib.suppress(
                TypeError, ValueError
            ):  # without a JSON form it stays as it is
                got = json.loads(json.dumps(got))
            if got != expected:
                detail = f"test {number}: got {shown(got)}, expected {shown(expected)}"
                raise ProgramFault("failed", detail)

    return run


def shown(value: Any) -> str:
    try:
        return repr(json.dumps(value)[:200])
    except (TypeError, ValueError):
        return repr(value)[:200]


def verdict(run: Callable[[], None], candidate: Candidate) -> tuple[str, str]:
    try:
        candidate.ask(b"")
        run()
        if candidate.fault is None:
            return "passed", ""
        raise candidate.fault
    except BaseException as error:
        status, detail = "failed", f"{type(error).__name__}: {error}"
        if isinstance(error, ProgramFault):
            status, detail = error.args
        detail = getattr(error, "of_candidate", detail)
        return status, ": ".join([*getattr(error, "__notes__", []), detail])[:2000]


def main() -> None:
    calls, replies, report = map(int, sys.argv[1:4])
    request = json.loads(sys.stdin.buffer.read())
    sys.setrecursionlimit(10_000)
    candidate = Candidate(calls, replies, request["call_timeout_s"])
    try:
        run = tests_of(request, candidate)
    except BaseException as error:
        detail = f"the tests cannot be prepared: {type(error).__name__}: {error}"
        messages.send(report, detail.encode(errors="backslashreplace"))
        return
    messages.send(report, b"ready")
    try:
        found = verdict(run, candidate)
    except BaseException as error:  # formatting the failure failed
        found = "failed", type(error).__name__
    messages.send(report, json.dumps(found).encode())
    # wait to be killed: the caller checks the memory of both processes first
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
