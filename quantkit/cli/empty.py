"""Arguments as a shell leaves them: with nothing in them, of a variable that is not set, which is
refused and never taken for the default; and with a ~ that stays, as in --out=~/model, which is the
home folder and not one of this name."""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

_MAY_BE_EMPTY = {"prompt"}
"""Texts that a model reads."""


class FilledCommand(TyperCommand):
    """A command whose arguments all hold something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)
        rest = super().parse_args(ctx, args)
        values = self.make_parser(ctx).parse_args(typed)[
            0
        ]  # as they were typed: an empty path is read as the folder that one is in
        for one in self.params:
            if one.name not in _MAY_BE_EMPTY and values.get(one.name) == "":
                raise typer.BadParameter(
                    "it is empty: give it a value, or leave it out",
                    ctx=ctx,
                    param_hint=_as_typed(one),
                )
            value = ctx.params.get(one.name)
            if isinstance(value, Path) and value.parts[:1] == ("~",):
                ctx.params[one.name] = value.expanduser()
        return rest


def _as_typed(one: Any) -> str:
    """The option, or what the help calls the argument."""
    return str(one.opts[0] if one.opts[0].startswith("-") else one.metavar or one.name)
