"""How a command reads its arguments and how it is stopped: Ctrl-C and SIGTERM end it with one line
that says what is stored, where, and which command resumes it."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand

from quantkit.cli.console import notify
from quantkit.common.errors import Interrupted
from quantkit.common.model_files import FOLLOW_LINKS

_MAY_BE_EMPTY = {"prompt"}


class Stopped(Exception):
    """A command was stopped. stored: what it leaves; empty if nothing. number: of the signal."""

    def __init__(self, stored: str, number: int) -> None:
        self.stored, self.exit_code = stored, 128 + number
        self.name = "interrupted" if number == signal.SIGINT else "terminated"
        super().__init__(self.name)

    def message(self) -> tuple[str, str]:
        """What happened, and what to do."""
        if not self.stored:
            return self.name, ""
        return f"{self.name}: {self.stored}", f"to resume: {_command(sys.argv[1:])}"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


@contextmanager
def stoppable(stored: Callable[[], str] = str) -> Iterator[None]:
    """Raise Stopped if the block is stopped; `stored` says what is stored, unless the exception
    does."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated) or isinstance(stop.__cause__, _Terminated)
        text = stop.kept if isinstance(stop, Interrupted) else stored()
        raise Stopped(text, signal.SIGTERM if terminated else signal.SIGINT) from stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _command(arguments: list[str]) -> str:
    """The command line as typed, without the API key."""
    shown = list(arguments)
    for place, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            shown[place] = "--api-key=..."
        elif place and arguments[place - 1] == "--api-key":
            shown[place] = "..."
    links = ["--follow-links"] if os.environ.get(FOLLOW_LINKS) == "1" else []
    return shlex.join(["quantkit", *shown, *links])


class Command(TyperCommand):
    """A command that can be stopped anywhere, as while it loads a model.

    It refuses an empty argument, as an unset shell variable gives, instead of using the default. It
    expands a ~ that the shell left, as in --out=~/model. It renames flags of the previous version.
    """

    def invoke(self, ctx: Any) -> Any:
        with stoppable():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self._renamed(args)
        typed = list(args)
        rest = super().parse_args(ctx, args)
        # Before conversion: an empty path would become the working directory.
        values = self.make_parser(ctx).parse_args(typed)[0]
        for one in self.params:
            variable = one.envvar if isinstance(one.envvar, str) else ""
            unset = values.get(one.name) is None and os.environ.get(variable) == ""
            if one.name not in _MAY_BE_EMPTY and (unset or values.get(one.name) == ""):
                raise typer.BadParameter(
                    "it is empty: give it a value, or leave it out",
                    ctx=ctx,
                    param_hint=variable if unset else _as_typed(one),
                )
            value = ctx.params.get(one.name)
            if isinstance(value, Path) and value.parts[:1] == ("~",):
                ctx.params[one.name] = value.expanduser()
        return rest

    def _renamed(self, args: list[str]) -> list[str]:
        new_names = getattr(self.callback, "renamed", {})
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            if name in new_names:
                notify(f"{name} is now {new_names[name]}; the old name will be removed")
                word = f"{new_names[name]}{equals}{value}"
            words.append(word)
        return words


def _as_typed(one: Any) -> str:
    """The option, or the argument's name in the help."""
    return str(one.opts[0] if one.opts[0].startswith("-") else one.metavar or one.name)
