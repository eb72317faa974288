"""Return values of the Python API, displayed as lines of text or, in a notebook, as a table."""

import html
import math
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pandas import DataFrame

JsonObject = dict[str, Any]
"""An object of JSON, by field."""


class Result(ABC):
    """Base of result dataclasses, which are declared with `repr=False`. A subclass defines
    `heading` and `facts`."""

    _repr_indent: ClassVar[str] = "  "

    @property
    @abstractmethod
    def heading(self) -> str:
        """One line that names the subject of the result."""

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Names and values to display, most important first."""

    def rows(self) -> list[JsonObject]:
        """What `to_pandas` has a row for each, by column."""
        return [{"name": name, "value": value} for name, value in self.facts()]

    def to_pandas(self) -> "DataFrame":
        """`rows` as a data frame."""
        from pandas import DataFrame

        return DataFrame(self.rows())

    def pictures(self) -> list[str]:
        """Plots that a notebook shows below the facts, as SVG."""
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


def finite(value: Any) -> Any:
    """`value` for JSON, which lacks NaN and infinities: they become None."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, bidirectional controls, and lone surrogates."""


def escape_text(text: str) -> str:
    """`text` with the characters that a terminal would act on replaced by escapes."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """`escape_text`, with line feeds and tabs escaped too."""
    return escape_text(text).replace("\n", "\\n").replace("\t", "\\t")
