"""HTML pages from Jinja2 templates. Text of files, models and servers is escaped, and characters
that a terminal would act on are written as escapes; templates mark plots as safe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.common.result import escape_text

Filters = Mapping[str, Callable[..., object]]
_NO_FILTERS: Filters = {}


def render_page(template: Path | str, filters: Filters = _NO_FILTERS, **values: Any) -> str:
    """template: a file, or the text of a template without blocks of others."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = template.parent if isinstance(template, Path) else None
    environment = Environment(
        loader=None if folder is None else FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    found = (
        environment.get_template(template.name)
        if isinstance(template, Path)
        else environment.from_string(template)
    )
    return escape_text(found.render(values))
