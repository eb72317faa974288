"""What a function of the Python API returns: a value that shows itself, as lines of text or, in a
notebook, as a table."""

import html
from abc import ABC, abstractmethod
from typing import ClassVar

from quantkit.common.escape import one_line


class Result(ABC):
    """Base of result dataclasses, which are made with `repr=False`. A subclass says its `heading`
    and its `facts`."""

    _repr_indent: ClassVar[str] = "  "

    @property
    @abstractmethod
    def heading(self) -> str:
        """What the result is of, in a line."""

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Names and values for people, most important first."""

    def pictures(self) -> list[str]:
        """Plots to look at beside the facts, as SVG; a notebook shows them."""
        return []

    def __repr__(self) -> str:
        rows = [(one_line(name), one_line(value)) for name, value in self.facts()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(
            [
                one_line(self.heading),
                *(f"{self._repr_indent}{name:<{width}}  {value}".rstrip() for name, value in rows),
            ]
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;white-space:pre">{html.escape(one_line(name))}</th>'
            f'<td style="text-align:left">{html.escape(one_line(value))}</td></tr>'
            for name, value in self.facts()
        )
        plots = "".join(
            f'<div style="max-width:36em">{picture}</div>' for picture in self.pictures()
        )
        return (
            f"<table><caption>{html.escape(one_line(self.heading))}</caption>{rows}</table>{plots}"
        )
