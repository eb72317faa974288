"""The tests of a copy of the checkout in one process that stays: collected once, then run in forks
of it with a source changed in each.

A fork takes the changed source in by `graft` and runs tests until one fails. `Followed` first runs
every test with the sources as they are, which says how long each takes, which lines of the sources
it executes, and makes what tests share: then the tests that execute the changed lines run first,
the quickest at their head, and what survives and is no code of a function that was followed is run
again in a process that imports it anew.
"""

import ast
import functools
import gc
import linecache
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FunctionType, ModuleType

import torch

PATIENCE = 20.0
"""Seconds that any test may take, and ten times what it took before."""
LONGEST = 60.0
"""Seconds of a test that was not run before."""
NO_VERDICT = 77
"""How a fork ends that could not run its tests."""


class Warm:
    """A plugin of pytest whose loop runs `work` in place of the tests."""

    def __init__(self, folder, work):
        self.folder, self._work = folder, work
        self.items = []
        self.seconds = {}
        self._failed = ""
        self._stop_at_failure = False

    def pytest_runtestloop(self, session):
        self.items = list(session.items)
        self._run_first()
        self._stop_at_failure = True
        here = str(self.folder)
        self._modules = [
            one
            for one in gc.get_objects()
            if isinstance(one, ModuleType) and str(getattr(one, "__file__", "")).startswith(here)
        ]
        self._caches = [
            one
            for one in gc.get_objects()
            if isinstance(one, functools._lru_cache_wrapper)
            and _source(one.__wrapped__).startswith(here)
        ]
        gc.collect()
        gc.freeze()  # pages that a fork's collector would copy
        self._run_apart([item for item in self.items if item.nodeid not in self.seconds])
        self._work(self)
        return True

    def _run_first(self):
        """What is run in this process before it is forked."""

    def _run_apart(self, items):
        """What is run in a fork before those of mutants: of `items`, which did not run here."""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed = report.nodeid
            if self._stop_at_failure:
                assert "previous item was not torn down" not in report.longreprtext, (
                    "no fault of the mutant"
                )
                (self.folder / "failed").write_text(f"{report.nodeid}\n{report.longreprtext}")
                os._exit(1)

    def _run(self, item, after):
        """after: the next test. The session's fixtures outlive the last one too."""
        other = self.items[0] if item is not self.items[0] else self.items[-1]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after or other)

    def verdict(self, paths, items, limit=math.inf):
        """How tests end with the sources at `paths` taken in anew: empty where they pass, else
        which failed, or what else ended them. limit: seconds of a processor after which no other
        test begins; a test may take half of it."""
        child = os.fork()
        if child == 0:
            self._in_fork(paths, items, limit)
        _, status = os.waitpid(child, 0)
        _end_group(child)
        code = os.waitstatus_to_exitcode(status)
        assert code != NO_VERDICT, (self.folder / "last.log").read_text()[-3000:]
        if code in (0, 1):
            return (self.folder / "failed").read_text().partition("\n")[0] if code else ""
        return (
            "ran on"
            if code in (-signal.SIGALRM, -signal.SIGPROF)
            else f"signal {-code}"
            if code < 0
            else f"exit {code}"
        )

    def running(self):
        """The test that a fork ran last."""
        return (self.folder / "running").read_text()

    def costs(self):
        """Seconds of a processor that tests took which passed in a fork, as last seen."""
        path = self.folder / "costs"
        lines = path.read_text().splitlines() if path.exists() else []
        return {test: float(cost) for cost, _, test in (line.partition(" ") for line in lines)}

    def report(self):
        """Of the test that failed last, or what ended a fork before one did."""
        return (self.folder / "failed").read_text()[-6000:]

    def _in_fork(self, paths, items, limit):
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with (self.folder / "last.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        (self.folder / "failed").write_text("at import\n")
        try:
            for path in paths:
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)
                graft(str(self.folder / path), self._modules)
        except BaseException as error:
            (self.folder / "failed").write_text(f"at import: {error!r}\n")
            os._exit(1)
        try:
            for one in self._caches:
                one.cache_clear()
            # what the last test left set up but for the session's: of another folder, or of the
            # source as it was
            if items:
                items[0].session._setupstate.teardown_exact(items[0].session)  # type: ignore[arg-type]
            for item, after in zip(items, [*items[1:], None]):
                if sum(os.times()[:4]) > limit:
                    break
                (self.folder / "running").write_text(item.nodeid)
                if limit < math.inf:
                    signal.setitimer(signal.ITIMER_PROF, limit / 2)
                patience = PATIENCE if limit == math.inf else 4 * PATIENCE
                patience += 10 * self.seconds.get(item.nodeid, 0)
                signal.setitimer(signal.ITIMER_REAL, patience)
                began = sum(os.times()[:4])
                self._run(item, after)
                with (self.folder / "costs").open("a") as costs:
                    costs.write(f"{sum(os.times()[:4]) - began:.2f} {item.nodeid}\n")
        except BaseException:
            traceback.print_exc()
            os._exit(NO_VERDICT)
        os._exit(0)

    def cold_verdict(self, items):
        """The same in a process that imports everything anew."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *(item.nodeid for item in items),
        ]
        limit = 120 + 10 * sum(self.seconds[item.nodeid] for item in items)
        child = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return "failed anew" if child.wait(limit) else ""
        except subprocess.TimeoutExpired:
            return "ran on"
        finally:
            _end_group(child.pid)
            child.wait()


class Followed(Warm):
    """apart: files whose tests run in a fork even before there are mutants."""

    def __init__(self, folder, sources, apart, work):
        super().__init__(folder, work)
        self._apart = apart
        self._lines = {str(folder / path): set() for path in sources if path.endswith(".py")}
        self.touched = {}
        """By test and source: the lines that ran."""

    def _run_first(self):
        for item, after in zip(self.items, [*self.items[1:], None]):
            if item.nodeid.partition("::")[0] in self._apart:
                continue
            began = time.monotonic()
            for lines in self._lines.values():
                lines.clear()
            sys.settrace(self._trace)
            threading.settrace(self._trace)
            self._run(item, after)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid] = time.monotonic() - began
            self.touched[item.nodeid] = {
                path: frozenset(lines) for path, lines in self._lines.items() if lines
            }
            assert not self._failed, f"{self._failed} fails as it is"

    def _run_apart(self, items):
        if not items:
            return
        began = time.monotonic()
        self.seconds |= {item.nodeid: LONGEST for item in items}
        self.touched |= {item.nodeid: {} for item in items}
        failed = self.verdict((), items)
        assert not failed, f"{failed} fails as it is:\n{self.report()}"
        self.seconds |= {item.nodeid: time.monotonic() - began for item in items}

    def _trace(self, frame, event, _):
        lines = self._lines.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)

        def local(frame, event, _):
            lines.add(frame.f_lineno)
            return local

        return local

    def tests_of(self, mutant, area):
        """Of the area's tests, with the sources as they are: those that run the mutant's lines, or
        its file where those run at import or are not followed, or all; the quickest first, and then
        those that were not seen in the file. And whether its lines were followed."""
        path = str(self.folder / mutant.path)
        wanted = lines_of(mutant, Path(path).read_text())
        here = [item for item in self.items if area.has(item.nodeid, mutant.function)]
        by_file = [item for item in here if path in self.touched[item.nodeid] and not area.words]
        by_line = [item for item in by_file if self.touched[item.nodeid][path] & wanted]
        elsewhere = [
            item for item in here if by_file and item not in by_file
        ]  # may run it in processes of their own
        return self._quickest_first(by_line or by_file or here) + self._quickest_first(
            elsewhere
        ), bool(by_line)

    def _quickest_first(self, items):
        return sorted(items, key=lambda item: self.seconds[item.nodeid])


def _source(function):
    code = getattr(function, "__code__", None)
    return str(code.co_filename) if code else ""


def _end_group(leader):
    """End what a fork has left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def lines_of(mutant, source):
    """Its own lines and those of the innermost lambda or statement where it begins, of a compound
    one without its body."""
    if not mutant.path.endswith(".py"):
        return frozenset()
    start = mutant.start + len(mutant.old) - len(mutant.old.lstrip())
    at = (source.count("\n", 0, start) + 1, start - source.rfind("\n", 0, start) - 1)
    around = [
        one
        for one in ast.walk(ast.parse(source))
        if isinstance(one, (ast.stmt, ast.Lambda)) and _spans(one, at)
    ]
    inner = max(around, key=lambda one: (one.lineno, one.col_offset))
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) else inner.end_lineno
    return frozenset(range(inner.lineno, max(inner.lineno, last or 0) + 1)) | set(
        range(at[0], at[0] + mutant.old.strip().count("\n") + 1)
    )


def _spans(node, at):
    return (node.lineno, node.col_offset) <= at < (node.end_lineno or 0, node.end_col_offset or 0)


def graft(path, modules):
    """Take a changed source in where it is imported already. Functions and classes keep their
    identity and get the new code; other names get the new values, also where another of the modules
    has imported them, which is then taken in anew itself."""
    linecache.clearcache()
    left, done = [one for one in modules if one.__file__ == path], set()
    while left:
        module = left.pop()
        done.add(module)
        fresh = {name: value for name, value in vars(module).items() if name.startswith("__")}
        exec(compile(Path(str(module.__file__)).read_text(), str(module.__file__), "exec"), fresh)
        for name, new in fresh.items():
            old = vars(module).get(name)
            if name.startswith("__") or _same(old, new) or _grafted(old, new, module.__name__):
                continue
            setattr(module, name, new)
            for other in modules:
                if vars(other).get(name, module) is old:
                    setattr(other, name, new)
                    if other not in done and "/tests/" not in str(other.__file__):
                        left.append(other)


def _same(old, new):
    return old is new or (
        isinstance(new, (int, str, float, torch.dtype))
        and type(old) is type(new)
        and bool(old == new)
    )


def _grafted(old, new, module):
    """Whether `old`, defined in this module, has become what `new` is."""
    if type(old) is not type(new) or getattr(new, "__module__", None) != module:
        return False
    if isinstance(old, FunctionType):
        return _take_code(old, new)
    if isinstance(old, type):
        for name, value in vars(new).items():
            before = vars(old).get(name)
            inner = [getattr(one, "__func__", getattr(one, "fget", one)) for one in (before, value)]
            both = all(isinstance(one, FunctionType) for one in inner)
            if name in ("__dict__", "__weakref__", "__doc__", "_abc_impl") or (
                both and _take_code(*inner)
            ):
                continue
            setattr(old, name, value)
        return True
    if hasattr(old, "__wrapped__"):
        return _grafted(old.__wrapped__, new.__wrapped__, module)
    if (
        type(old).__name__ == "JITFunction"
    ):  # of Triton: a source and the names it sees, which are the new ones
        vars(old).update(vars(new))
        return True
    return False


def _take_code(old, new):
    code = new.__code__
    if code.co_freevars != old.__code__.co_freevars:
        return False
    wrapped = getattr(old, "__wrapped__", None)
    if wrapped is not None:
        return _take_code(wrapped, new.__wrapped__)  # type: ignore[attr-defined]
    old.__code__, old.__defaults__, old.__kwdefaults__ = code, new.__defaults__, new.__kwdefaults__
    return True
