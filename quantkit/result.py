"""What a function of the Python API returns: a value that shows itself, as lines of text or, in a notebook, as a table."""

import html
import re
from typing import ClassVar

_UNSEEN = re.compile(r"[^\S ]|[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What would break a line or be obeyed by a terminal: values hold names of files and texts of models."""


class Result:
    """Base of result dataclasses, which are made with `repr=False`. A subclass says its `heading` and its `facts`."""

    _repr_indent: ClassVar[str] = "  "

    @property
    def heading(self) -> str:
        """What the result is of, in a line."""
        raise NotImplementedError

    def facts(self) -> list[tuple[str, str]]:
        """Names and values for people, most important first."""
        raise NotImplementedError

    def pictures(self) -> list[str]:
        """Plots to look at beside the facts, as SVG; a notebook shows them."""
        return []

    def __repr__(self) -> str:
        rows = [(_line(name), _line(value)) for name, value in self.facts()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([_line(self.heading), *(f"{self._repr_indent}{name:<{width}}  {value}".rstrip() for name, value in rows)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;white-space:pre">{html.escape(_line(name))}</th>'
            f'<td style="text-align:left">{html.escape(_line(value))}</td></tr>'
            for name, value in self.facts()
        )
        plots = "".join(f'<div style="max-width:36em">{picture}</div>' for picture in self.pictures())
        return f"<table><caption>{html.escape(_line(self.heading))}</caption>{rows}</table>{plots}"


def _line(text: str) -> str:
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)
