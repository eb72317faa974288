"""Templates of this room's pages, rendered: self-contained HTML with one look, light and dark."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: str, **values: object) -> str:
    """The page from a template beside this file. Text is escaped; plots are marked safe where they
    are."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["points"] = points
    environment.filters["signed"] = signed
    environment.filters["colour"] = {
        "held": "held",
        "lost": "lost",
        "cannot tell": "tell",
    }.__getitem__
    return environment.get_template(template).render(values)


def points(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{100 * share:.1f}"


def signed(share: Any) -> str:
    """A difference in points."""
    return f"{100 * share:+.1f}"
