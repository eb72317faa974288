"""Ticks of logarithmic axes are matplotlib's own, in characters instead of mathematics."""

import re
import warnings

import pytest
from matplotlib.ticker import LogFormatterSciNotation

from quantkit.common.plots import draw, label_axes, layer_plot

RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@pytest.mark.parametrize(
    ("scale", "low", "high"),
    [("log", 1e-5, 30), ("log", 2e-3, 7e-3), ("log", 0.5, 2000), ("symlog", 0, 4e4)],
)
def test_powers_are_those_of_matplotlib(scale, low, high):
    """Over many decades, within one, where the ticks between powers have labels, and from zero
    on."""
    axes, plot = draw(7.0, 2.2)
    axes.set_yscale(scale)
    axes.set_ylim(low, high)
    label_axes(axes, "layer", "error")
    own = [LogFormatterSciNotation(), LogFormatterSciNotation(labelOnlyBase=False)]
    own[1].set_axis(axes.yaxis)
    expected = own[1].format_ticks(axes.yaxis.get_minorticklocs()) if scale == "log" else []
    own[0].set_axis(axes.yaxis)
    expected += own[0].format_ticks(axes.yaxis.get_majorticklocs())
    got = [
        label.get_text()
        for minor in (True, False)
        for label in axes.yaxis.get_ticklabels(minor=minor)
    ]
    said = {
        re.sub(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda power: "10^{" + power[1].translate(RAISED) + "}", text)
        for text in got
        if text
    }
    plain = {
        text.replace("$\\mathdefault{", "").replace("}$", "").replace("\\times", "×")
        for text in expected
        if text
    }
    assert said == plain
    assert any("×" in text for text in got) == (scale == "log" and high / low < 10), (
        "between powers only within a decade"
    )
    assert "10" in plot.svg()
    assert not any("$" in text for text in got)


def test_layers_that_lost_nothing_are_drawn_without_a_word():
    """As where a budget kept every linear in 16 bits: matplotlib warned of a logarithm of
    nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "layer" in layer_plot({0: 0.0, 1: 0.0}, "error", log=True)
        assert "layer" in layer_plot({0: 0.0, 1: 0.1}, "error", log=True)
