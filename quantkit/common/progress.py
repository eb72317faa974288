"""What a run tells while it works: small values that a progress bar, a log and a report are made
from."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """Work done so far, in bytes of source weights; time left is estimated from these.

    phase: what is being done, in a word or two. unit: the part in work, such as
    layers.3.experts.17. share: of the run's expected time that is behind it, 0 to 1, so that the
    rest can be told from the clock; where every byte takes as long, that of the bytes.
    error: mean relative output error of the linears quantized so far. memory: resident bytes of
    this process.
    """

    phase: str
    unit: str
    done_bytes: int
    total_bytes: int
    error: float
    memory: int
    share: float
    found: bool = False
    """What was added to `share` was done by an earlier run."""


@dataclass(frozen=True)
class Note:
    """Something worth a line in the log: a fallback, a starved expert, a unit found finished."""

    text: str


Event = Progress | Note
OnEvent = Callable[[Event], None]


def silent(event: Event) -> None:
    """For callers who do not listen."""


class TimeLeft:
    """Seconds that work still takes, from the share of it that is done and the clock.

    The pace is the mean so far. Of the first steps it says little, as caches and compilers warm up,
    so `expected` seconds for the whole count too, where they are given, as much as if _TRUSTED of
    the work had been seen to take its share of them. What was there before, as in a run that goes
    on, says nothing of the pace.
    """

    _TRUSTED = 0.15

    def __init__(
        self, expected: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected, self._clock = expected, clock
        self._start, self._first = clock(), 0.0
        self._last, self._share = self._start, 0.0

    def at(self, share: float, *, found: bool = False) -> None:
        """So much of the work is behind; found: what was added was there before."""
        if found:
            self._first += max(share - self._share, 0.0)
        if share > self._share:
            self._last, self._share = self._clock(), share

    @property
    def seconds(self) -> float | None:
        """None before anything can be said."""
        seen, took = self._share - self._first, self._last - self._start
        if self._expected is not None:
            seen, took = seen + self._TRUSTED, took + self._TRUSTED * self._expected
        if seen <= 0 or took <= 0:
            return None
        left = (1 - self._share) * took / seen
        return max(left - (self._clock() - self._last), left / 2)


def peak_memory() -> int:
    """The most resident bytes that this process had."""
    if (
        sys.platform == "linux"
    ):  # getrusage counts what the parent held, too, when it started this process
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
