"""Plots without a display or global state, as inline SVG for self-contained pages, drawn in the
page's own text colour."""

import importlib.util
import io
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

from quantkit.common.errors import QuantkitError

OURS, THEIRS, GREY = "#1f5fa8", "#c7761a", "#888888"


def check_drawable() -> None:
    """Raises QuantkitError where the package that draws is missing: a run asks before its work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise QuantkitError(
            "matplotlib is not installed, and a report has pictures", "pip install matplotlib"
        )


def draw(width: float, height: float) -> tuple["Axes", "Plot"]:
    """One pair of axes in a figure of `width` x `height` inches. A page is 5 inches wide on a
    telephone: then letters of 8 points are of 8 pixels."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes, Plot(figure)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"\^\{(-?\d+)\}")


@cache
def _powers() -> "type[LogFormatter]":
    """A formatter for logarithmic axes that writes 10⁻³ in Unicode characters. matplotlib's own
    typesets every label as mathematics, which takes a third of the time of a report."""
    from matplotlib.ticker import LogFormatterSciNotation

    class Powers(LogFormatterSciNotation):
        def __call__(self, x: float, pos: int | None = None) -> str:
            text = (
                super()
                .__call__(x, pos)
                .removeprefix(r"$\mathdefault{")
                .removesuffix("}$")
                .replace(r"\times", "×")
            )
            return _POWER.sub(lambda power: power[1].translate(_RAISED), text)

    return Powers


def label_axes(axes: "Axes", x: str, y: str) -> None:
    """Label both axes; call it after the scales are set. An x axis of layers, experts or groups
    gets integer ticks."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() in ("log", "symlog"):
            axis.set_major_formatter(_powers()())
        if axis.get_scale() == "log":
            axis.set_minor_formatter(_powers()(labelOnlyBase=False))
    if x.startswith(("layer", "experts", "groups")):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)


def layer_plot(layers: Mapping[int, float], title: str, *, log: bool) -> str:
    """One value per layer, as SVG; an empty string if there are none."""
    if not layers:
        return ""
    axes, plot = draw(5.0, 2.6)
    numbers = sorted(layers)
    axes.plot(numbers, [layers[number] for number in numbers], marker="o", markersize=3, color=OURS)
    if log and any(layers.values()):
        axes.set_yscale("log")
    label_axes(axes, "layer", title)
    return plot.svg()


class Plot:
    def __init__(self, figure: "Figure") -> None:
        self.figure = figure

    def svg(self) -> str:
        """The <svg> element alone: no XML header, fixed size or background, and ids that are unique
        across the plots of a page. Black becomes the surrounding text colour."""
        import matplotlib
        from matplotlib.text import Text

        text = io.StringIO()
        for label in self.figure.findobj(Text):
            assert isinstance(label, Text)
            label.set_parse_math(False)
        with matplotlib.rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "quantkit",
                "font.family": "sans-serif",
                "text.parse_math": False,  # names of models and modules are text
            }
        ):
            self.figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        body = text.getvalue()
        body = (
            body[body.index("<svg") :]
            .replace("#000000", "currentColor")
            .replace(OURS, f"var(--ours, {OURS})")
            .replace(THEIRS, f"var(--theirs, {THEIRS})")
            .replace("<svg", '<svg fill="currentColor"', 1)
        )
        return re.sub(
            r'(<svg[^>]*?) width="[^"]*"',
            r"\1",
            re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1),
            count=1,
        )
