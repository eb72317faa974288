"""Results show themselves: as text, as a table in a notebook, and never as markup or control
characters of what they hold."""

import warnings
from dataclasses import dataclass, replace

import pytest
from refused import refused

from quantkit.common.plots import layer_plot
from quantkit.common.result import Result
from quantkit.common.sizes import byte_unit, format_bytes, format_duration, parse_bytes
from quantkit.evaluation.distance.quality import Quality


@dataclass(frozen=True, repr=False)
class Named(Result):
    name: str

    @property
    def heading(self):
        return f"about {self.name}"

    def facts(self):
        return [("name", self.name), ("letters, at most", "7")]


def test_a_result_is_lines_of_text_and_a_table():
    assert repr(Named("a")) == "about a\n  name              a\n  letters, at most  7"
    assert "<caption>about a</caption>" in Named("a")._repr_html_()


def test_a_notebook_shows_plots():
    """Of the layers; of a text without a baseline there is nothing to plot."""
    alone = Quality(ppl=3.0, tokens=10, documents=2)
    beside = replace(alone, baseline_ppl=2.9, kl=0.01, top1_agree=0.9, layer_errors=[0.01, 0.02])
    assert "<svg" not in alone._repr_html_()
    assert beside._repr_html_().count("<svg") == 1
    assert "KL from the baseline" in repr(beside)


def test_values_are_neither_markup_nor_obeyed():
    hostile = Named("<script>\x1b[31m\n\u202e&")
    assert repr(hostile).count("\n") == 2
    for shown in (repr(hostile), hostile._repr_html_()):
        assert not set("\x1b\u202e") & set(shown)
    assert "<script>" not in hostile._repr_html_()


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1000, "1.00 kB"),
        (15_921_628, "15.9 MB"),
        (688.6e9, "688.6 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_have_a_unit_that_fits(count, shown):
    assert format_bytes(count) == shown


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 2**34), ("1.5TiB", 3 * 2**39), ("500kB", 500_000), ("16gb", 16e9)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16", "GiB", "-1GiB", "0GB", "16 gigabytes", ""])
def test_what_is_no_size_is_refused(text):
    with refused("is not a size"):
        parse_bytes(text)


def test_a_table_of_sizes_has_one_unit():
    assert byte_unit(15_921_628) == (1e6, "MB")
    assert byte_unit(999) == (1, "B")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_spans_have_two_units(seconds, shown):
    assert format_duration(seconds) == shown


def test_layers_that_lost_nothing_are_drawn_without_a_word():
    """As where a budget kept every linear in 16 bits: matplotlib warned of a logarithm of
    nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "layer" in layer_plot({0: 0.0, 1: 0.0}, "error", log=True)
        assert "layer" in layer_plot({0: 0.0, 1: 0.1}, "error", log=True)
