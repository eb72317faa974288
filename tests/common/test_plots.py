"""Ticks of logarithmic axes are matplotlib's own, in characters instead of mathematics."""

import warnings

from quantkit.common.plots import layer_plot


def test_layers_that_lost_nothing_are_drawn_without_a_word():
    """As where a budget kept every linear in 16 bits: matplotlib warned of a logarithm of
    nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "layer" in layer_plot({0: 0.0, 1: 0.0}, "error", log=True)
        assert "layer" in layer_plot({0: 0.0, 1: 0.1}, "error", log=True)
