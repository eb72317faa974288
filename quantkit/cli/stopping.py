"""Being stopped: Ctrl-C and SIGTERM end a command with one line: what is kept, where something is,
and the command that goes on."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from quantkit.cli.empty import FilledCommand
from quantkit.common.errors import Interrupted


class Stopped(Exception):
    """A command was told to stop. kept: what it leaves, in words; empty if nothing. signal: by
    what."""

    def __init__(self, kept: str, number: int) -> None:
        self.kept, self.exit_code = kept, 128 + number
        self.name = "interrupted" if number == signal.SIGINT else "terminated"
        super().__init__(self.name)

    def told(self) -> tuple[str, str]:
        """What happened, and what to do."""
        if not self.kept:
            return self.name, ""
        return f"{self.name}: {self.kept}", f"this goes on: {_command(sys.argv[1:])}"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which takes the way of Ctrl-C."""


@contextmanager
def stoppable(kept: Callable[[], str] = str) -> Iterator[None]:
    """Raise Stopped where the block is stopped. `kept` is asked then, if what was raised does not
    say it."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated) or isinstance(stop.__cause__, _Terminated)
        said = stop.kept if isinstance(stop, Interrupted) else kept()
        raise Stopped(said, signal.SIGTERM if terminated else signal.SIGINT) from stop
    finally:
        signal.signal(signal.SIGTERM, before)


class StoppableCommand(FilledCommand):
    """A command that ends so wherever it is stopped, as while it loads a model; inside, `stoppable`
    says what is kept."""

    def invoke(self, ctx: Any) -> Any:
        with stoppable():
            return super().invoke(ctx)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _command(arguments: list[str]) -> str:
    """What was typed, less a key that must not be printed."""
    shown = list(arguments)
    for place, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            shown[place] = "--api-key=..."
        elif place and arguments[place - 1] == "--api-key":
            shown[place] = "..."
    return shlex.join(["quantkit", *shown])
