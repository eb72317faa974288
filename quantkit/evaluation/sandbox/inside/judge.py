"""The trusted side: runs the tests. The function under test is a proxy that sends its arguments to
the other process.

    python judge.py CALLS REPLIES REPORT < request

REPORT gets "ready" once the tests are prepared, before the first line of the program runs, then one
JSON object with status and detail. From "ready" on every failure is the program's.

The proxy's return values are built by values.loads, so their equality, length and truth are
Python's own. Arguments are copies: the program cannot change what a test compares with.
"""

import builtins
import contextlib
import json
import os
import signal
import sys
from typing import Any

import messages
import values


class ProgramFault(BaseException):
    """The program ended early, or replied with something that is not a value. A BaseException,
    so that tests that catch Exception do not pass."""

    def __init__(self, status: str, detail: str) -> None:
        self.status, self.detail = status, detail
        super().__init__(detail)


class Candidate:
    """Calls of the function, one message each way."""

    def __init__(self, calls: int, replies: int, timeout_s: float | None) -> None:
        self._calls, self._replies, self._timeout_s = calls, replies, timeout_s
        self.fault: ProgramFault | None = None

    def load(self) -> None:
        """Let the program define its names. Raises the program's exception."""
        self._ask(b"")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask(values.dumps([arguments, named]))

    def _ask(self, message: bytes) -> Any:
        kind, value = self._exchange(message)
        if kind == b"v":
            return value
        if kind == b"e":
            raise self._to_exception(*value)
        raise self._fail("failed", f"the function returned {value}")

    def _exchange(self, message: bytes) -> tuple[bytes, Any]:
        try:
            messages.send(self._calls, message)
            reply = messages.receive(self._replies, self._timeout_s)
            kind, value = reply[:1], values.loads(reply[1:])
            if kind == b"e":
                names, text = value
                value = [str(name) for name in names], str(text)
        except (messages.Closed, BrokenPipeError):
            raise self._fail("no-verdict", "the program ended before its tests did") from None
        except TimeoutError:
            raise self._fail("timeout", f"no answer after {self._timeout_s:g} s") from None
        except (ValueError, TypeError) as error:
            raise self._fail("failed", f"the answer cannot be read: {error}") from None
        return kind, value

    def _fail(self, status: str, detail: str) -> ProgramFault:
        self.fault = ProgramFault(status, detail)
        return self.fault

    def _to_exception(self, names: list[str], text: str) -> BaseException:
        """The program's exception as the nearest builtin one, so that tests may expect it;
        SystemExit and the like end the tests."""
        for name in names:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                if kind in (StopIteration, StopAsyncIteration):
                    kind = RuntimeError  # as PEP 479: in map(candidate, ...) it would end the loop
                error = _make_exception(kind, text)
                error.of_candidate = f"{names[0]}: {text}"  # type: ignore[attr-defined]
                return error
        return self._fail("failed", f"{names[0] if names else 'an exception'}: {text}")


def _make_exception(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # Unicode errors need five arguments
        return Exception(text)


def check(request: dict[str, Any], candidate: Candidate) -> Any:
    """Run the tests' code after the prompt's helpers, with `entry_point` bound to the candidate."""
    space: dict[str, Any] = {"__name__": "tests"}
    if request["helpers"]:
        exec(compile(request["helpers"], "<prompt>", "exec", dont_inherit=True), space)
    tests = compile(request["tests"], "<tests>", "exec", dont_inherit=True)

    def run() -> None:
        space[request["entry_point"]] = candidate
        exec(tests, space)

    return run


def cases(request: dict[str, Any], candidate: Candidate) -> Any:
    """Calls with expected results, compared as JSON values."""

    def run() -> None:
        for number, (arguments, expected) in enumerate(request["cases"], start=1):
            try:
                got = candidate(*arguments)
            except BaseException as error:
                error.add_note(f"test {number}")
                raise
            with contextlib.suppress(
                TypeError, ValueError
            ):  # a value without a JSON form is compared as it is
                got = json.loads(json.dumps(got))
            if got != expected:
                raise ProgramFault(
                    "failed", f"test {number}: got {shown(got)}, expected {shown(expected)}"
                )

    return run


def shown(value: Any) -> str:
    try:
        return repr(json.dumps(value)[:200])
    except (TypeError, ValueError):
        return repr(value)[:200]


def verdict(run: Any, candidate: Candidate) -> tuple[str, str]:
    try:
        candidate.load()
        run()
    except ProgramFault as fault:
        return fault.status, with_notes(fault, fault.detail)
    except BaseException as error:
        return "failed", with_notes(
            error, getattr(error, "of_candidate", None) or f"{type(error).__name__}: {error}"
        )
    if candidate.fault is not None:
        return candidate.fault.status, candidate.fault.detail
    return "passed", ""


def with_notes(error: BaseException, detail: str) -> str:
    return ": ".join([*getattr(error, "__notes__", []), detail])[:2000]


def main() -> None:
    calls, replies, report = map(int, sys.argv[1:4])
    request = json.loads(sys.stdin.buffer.read())
    sys.setrecursionlimit(10_000)
    candidate = Candidate(calls, replies, request["call_timeout_s"])
    try:
        run = {"check": check, "cases": cases}[request["kind"]](request, candidate)
    except BaseException as error:
        os.write(
            report,
            json.dumps(
                {"fault": f"the tests cannot be prepared: {type(error).__name__}: {error}"}
            ).encode()
            + b"\n",
        )
        os._exit(0)
    os.write(report, b"ready\n")
    try:
        status, detail = verdict(run, candidate)
    except BaseException as error:  # formatting the failure failed
        status, detail = "failed", type(error).__name__
    os.write(report, json.dumps({"status": status, "detail": detail}).encode() + b"\n")
    # wait to be killed: the caller checks the memory of both processes first
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
