"""HTML pages from Jinja2 templates. Text of files, models and servers is escaped, and characters
that a terminal would act on are written as escapes; templates mark plots as safe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.common.result import escape_text

Filters = Mapping[str, Callable[..., object]]
_NO_FILTERS: Filters = {}


_FOLDER = Path(__file__).parent
"""Of page.html.j2, which every page extends, and page.css, its style."""


def render_page(template: Path, filters: Filters = _NO_FILTERS, **values: Any) -> str:
    """The page of a template that extends page.html.j2."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, _FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return escape_text(environment.get_template(template.name).render(values))


def style_sheet() -> str:
    """What all pages share."""
    return (_FOLDER / "page.css").read_text(encoding="utf-8")
