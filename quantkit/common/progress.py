"""Progress of long work: the events that progress bars, logs and reports are made from, the
estimate of the time left, a one-line display, and the seconds and memory of a run over its restarts.

    with ProgressLine("quantizing") as line:
        line.show(0.25, "layers.7.attend")      # quantizing: 25 %, 3 min left, layers.7.attend
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from pydantic import BaseModel, Field, ValidationError

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_text
from quantkit.common.sizes import format_duration


@dataclass(frozen=True)
class Progress:
    """Work done so far, in bytes of source weights.

    phase: the current phase, in one or two words. unit: the current work unit, such as
    layers.3.experts.17. share: completed share of the expected run time, 0 to 1, from which the
    remaining time is estimated; if every byte takes equally long, the share of the bytes. error:
    mean relative output error of the linears quantized so far. memory: resident bytes of this
    process.
    """

    phase: str
    unit: str
    done_bytes: int
    total_bytes: int
    error: float
    memory: int
    share: float
    found: bool = False
    """The increase of `share` was done by an earlier run."""
    expected: float | None = None
    """Seconds of the whole run, estimated before it."""


@dataclass(frozen=True)
class Note:
    """Something worth a line in the log: a fallback, an expert with few tokens, a unit that an
    earlier run finished."""

    text: str


Event = Progress | Note
OnEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Event handler that ignores every event."""


class TimeLeft:
    """Estimated seconds left, from the completed share of the work and the clock.

    The speed is the mean so far. The first steps say little about it because caches and compilers
    warm up, so the `expected` seconds for the whole work, if given, count as much as _TRUSTED of
    the work measured at that speed. Work done by an earlier run does not count.
    """

    _TRUSTED = 0.15

    def __init__(
        self, expected: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected, self._clock = expected, clock
        self._start, self._first = clock(), 0.0
        self._last, self._share = self._start, 0.0

    def at(self, share: float, *, found: bool = False) -> None:
        """Record that `share` of the work is complete; found: the increase was done by an earlier
        run."""
        if found:
            self._first += max(share - self._share, 0.0)
        if share > self._share:
            self._last, self._share = self._clock(), share

    @property
    def seconds(self) -> float | None:
        """None until there is something to estimate from."""
        done, elapsed = self._share - self._first, self._last - self._start
        if self._expected is not None:
            done, elapsed = done + self._TRUSTED, elapsed + self._TRUSTED * self._expected
        if done <= 0 or elapsed <= 0:
            return None
        left = (1 - self._share) * elapsed / done
        return max(left - (self._clock() - self._last), left / 2)


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    if (
        sys.platform == "linux"
    ):  # getrusage includes the parent's memory at the time it started this process
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_REDRAWN_S, _FIRST_LINE_S, _LINES_S = 0.2, 10.0, 30.0


class ProgressLine:
    """A status line, rewritten in place in a notebook or a terminal, else printed as a new line now
    and then.

    name: of the work. expected: estimated seconds, if known. stream: terminal or file; None is
    stderr.
    """

    def __init__(
        self,
        name: str,
        *,
        expected: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._name, self._clock, self._left = name, clock, TimeLeft(expected, clock)
        self._stream = stream if stream is not None else sys.stderr
        self._begun, self._shown, self._line = clock(), 0.0, ""
        self._handle: Any = None
        self._notebook = stream is None and in_notebook()
        self._waits = _REDRAWN_S if self._notebook or self._stream.isatty() else _FIRST_LINE_S

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Print how long the work took, if anything was printed before."""
        if self._line:
            ended = "" if error is None else "stopped after "
            self._put(
                f"{self._name}: {ended}{format_duration(self._clock() - self._begun)}", last=True
            )

    def show(self, share: float, note: str = "", *, found: bool = False) -> None:
        """share: of the work that is done, 0 to 1; found: the increase was done by an earlier
        run."""
        self._left.at(share, found=found)
        now = self._clock()
        if now - max(self._shown, self._begun) < self._waits:
            return
        self._shown, self._waits = now, _REDRAWN_S if self._waits == _REDRAWN_S else _LINES_S
        left = self._left.seconds
        estimate = "" if left is None else f", {format_duration(left)} left"
        self._put(f"{self._name}: {share:.0%}{estimate}{', ' + note if note else ''}")

    def _put(self, line: str, *, last: bool = False) -> None:
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        self._line = shown
        if self._notebook:
            self._put_in_notebook(shown)
        elif self._stream.isatty():
            print(f"\r\x1b[K{shown}", end="\n" if last else "", file=self._stream, flush=True)
        else:
            print(shown, file=self._stream, flush=True)

    def _put_in_notebook(self, line: str) -> None:
        """Updates a plain-text display in place, without widgets."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive session."""
    return in_notebook() or hasattr(sys, "ps1")


_WRITTEN_S = 5.0
"""Between two writes of a run's file."""


class _File(BaseModel):
    run: dict[str, str]
    seconds: float = Field(ge=0, allow_inf_nan=False)
    peak_memory: int = Field(ge=0)


class RunUsage:
    """Seconds and peak memory of a run over all its restarts, in a file next to the journal. A run
    that is killed loses what it used since the file was last written, some seconds.

    start: of this process's part, by time.perf_counter. run: identifies the run; what the file
    says of another one does not count."""

    def __init__(self, path: Path, start: float, run: dict[str, str]) -> None:
        self._path, self._start, self._written, self._run = path, start, start, run
        self._seconds, self._peak, self._fault = 0.0, 0, ""
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = _File.model_validate_json(read_text(self._path))
        except (QuantkitError, ValidationError):
            self._fault = f"{self._path} cannot be read: time and memory count from here on"
        else:
            if found.run == self._run:
                self._seconds, self._peak = found.seconds, found.peak_memory

    @property
    def seconds(self) -> float:
        return self._seconds + time.perf_counter() - self._start

    @property
    def peak_memory(self) -> int:
        return max(self._peak, peak_memory())

    def listener(self, on_event: OnEvent, expected: float | None = None) -> OnEvent:
        """`on_event`, and the file now and then. A file that cannot be read is a note. expected:
        seconds of the whole run."""
        if self._fault:
            on_event(Note(self._fault))

        def listen(event: Event) -> None:
            if time.perf_counter() - self._written > _WRITTEN_S:
                self._written = time.perf_counter()
                file = _File(run=self._run, seconds=self.seconds, peak_memory=self.peak_memory)
                write_atomic(self._path, file.model_dump_json())
            on_event(replace(event, expected=expected) if isinstance(event, Progress) else event)

        return listen
