"""How far long work is, in one line, wherever somebody looks: rewritten in place in a notebook or a
terminal, else a new line now and then.

with Meter("quantizing") as meter:
    meter.show(0.25, "layers.7.attend")      # quantizing: 25 %, 3 min left, layers.7.attend
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from quantkit.common.progress import TimeLeft
from quantkit.common.sizes import span

_REDRAWN_S, _FIRST_LINE_S, _LINES_S = 0.2, 10.0, 30.0


class Meter:
    """name: of the work. expected: seconds that it should take, where that is known. stream: of a
    terminal or a file; None is stderr."""

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

    def __enter__(self) -> "Meter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last line says how long it took, where any was shown."""
        if self._line:
            ended = "" if error is None else "stopped after "
            self._put(f"{self._name}: {ended}{span(self._clock() - self._begun)}", last=True)

    def show(self, share: float, note: str = "", *, found: bool = False) -> None:
        """share: of the work that is done, 0 to 1; found: what was added to it was there before."""
        self._left.at(share, found=found)
        now = self._clock()
        if now - max(self._shown, self._begun) < self._waits:
            return
        self._shown, self._waits = now, _REDRAWN_S if self._waits == _REDRAWN_S else _LINES_S
        left = self._left.seconds
        told = "" if left is None else f", {span(left)} left"
        self._put(f"{self._name}: {share:.0%}{told}{', ' + note if note else ''}")

    def _put(self, line: str, *, last: bool = False) -> None:
        shown = (
            line
            if line.isprintable()
            else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        )
        self._line = shown
        if self._notebook:
            self._put_in_notebook(shown)
        elif self._stream.isatty():
            print(f"\r\x1b[K{shown}", end="\n" if last else "", file=self._stream, flush=True)
        else:
            print(shown, file=self._stream, flush=True)

    def _put_in_notebook(self, line: str) -> None:
        """As plain text that is replaced, which needs no widgets."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)


def in_notebook() -> bool:
    """Whether this process answers a notebook, and not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def somebody_looks() -> bool:
    """Whether this is a notebook or an interactive session."""
    return in_notebook() or hasattr(sys, "ps1")
