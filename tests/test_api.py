"""The Python API: what `import quantkit` offers, and the page about it, whose code runs and prints
what the page shows."""

import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
import quantkit.quantization.run
from quantkit.common.options import read_options
from quantkit.executor.options import EngineOptions
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import SCHEMES, Scheme
from quantkit.planning.options import PlanOptions
from quantkit.quantization.mixed_precision import Mixture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FUNCTIONS = ("convert", "evaluate", "inspect", "perplexity", "plan", "quantize")


def of_page(text):
    """Each block of code on the page and what it is said to print."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    yield from zip((text for _, text in blocks[::2]), (text for _, text in blocks[1::2]))


def of_notebook(text):
    """Each cell of code and what it printed."""
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), "".join("".join(one["text"]) for one in cell["outputs"])


def assert_same(printed, shown):
    """Word for word; a decimal fraction, which rounding on another processor moves, to a
    quarter."""
    fraction = re.compile(r"\d+\.\d+")
    assert fraction.sub("#", printed) == fraction.sub("#", shown)
    assert [float(n) for n in fraction.findall(printed)] == pytest.approx(
        [float(n) for n in fraction.findall(shown)], rel=0.25
    )


@pytest.mark.parametrize(
    ("name", "pieces"), [("python.md", of_page), ("quickstart.ipynb", of_notebook)]
)
def test_a_page_prints_what_it_shows(name, pieces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code, shown in pieces((DOCS / name).read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), names)
        assert_same(out.getvalue(), shown)


@pytest.mark.parametrize(
    ("named", "loaded"),
    [
        ("", r"quantkit\.|torch|numpy"),
        (
            "; quantkit.quantize",
            r"quantkit\.(evaluation|executor\.server|engines)|fastapi|matplotlib",
        ),
    ],
)
def test_a_name_loads_what_it_needs_alone(named, loaded):
    """Heavy libraries neither way."""
    probe = f"import sys, quantkit{named}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    found = [name for name in done.stdout.split() if re.match(f"({loaded}|torch|numpy)", name)]
    assert found == []


def test_every_name_is_there():
    assert dir(quantkit) == sorted(quantkit.__all__)
    assert {*FUNCTIONS, "Engine"} < set(quantkit.__all__)
    for name in quantkit.__all__:
        assert getattr(quantkit, name) is not None
    assert all(inspect.isfunction(getattr(quantkit, name)) for name in FUNCTIONS)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        quantkit.quantise  # noqa: B018


def test_a_scheme_of_ones_own_needs_no_recipe():
    """And a model may be given by its path."""
    own = Scheme("my-w4", IntGrid(4, 64, True), 16, (), ("compressed-tensors",), "")
    plan = quantkit.plan(ROOT / "quantkit" / "builtin" / "tiny-r1", own)
    assert plan.scheme == "my-w4"
    assert plan.output_bytes < quantkit.plan("tiny-r1", SCHEMES["int8-a8w8c16"]).output_bytes


def test_the_scheme_may_be_the_recipes_or_a_mixtures(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = quantkit.quantize(tiny_checkpoint, recipe="rtn-w4a16").out
    assert out == Path(f"{tiny_checkpoint.name}-rtn-w4a16")
    for asked in ({}, {"mixture": Mixture(preset="experts-only")}):
        assert quantkit.plan(tiny_checkpoint, **asked).scheme == "awq-w4a16"
    pruned = quantkit.plan("tiny-r1", "rtn-w4a16", prune="25%").output_bytes
    assert pruned < quantkit.plan("tiny-r1", "rtn-w4a16").output_bytes


def test_options_are_keywords_or_a_value_or_both(tiny_checkpoint):
    by_keyword = quantkit.plan(tiny_checkpoint, "rtn-w4a16", devices="1x8GiB", context=128)
    value = PlanOptions(devices="1x8GiB", context=64)
    by_both = quantkit.plan(tiny_checkpoint, "rtn-w4a16", options=value, context=128)
    assert by_both.devices == by_keyword.devices
    kept = quantkit.plan(tiny_checkpoint, preset="experts-only")
    by_value = quantkit.plan(tiny_checkpoint, mixture=Mixture(preset="experts-only"))
    assert kept.output_bytes == by_value.output_bytes
    assert "    samples: Calibration sequences" in str(quantkit.quantize.__doc__)


@pytest.mark.parametrize(
    ("work", "name", "closest"),
    [
        (quantkit.plan, "sample", "samples"),
        (quantkit.quantize, "seeds", "seed"),
        (quantkit.evaluate, "repeat", "repeats"),
        (quantkit.perplexity, "seqlen", "seq_len"),
        (quantkit.Engine.load, "max_bach", "max_batch"),
    ],
)
def test_an_unknown_keyword_names_the_closest(work, name, closest):
    models = ("tiny-r1",) if work == quantkit.Engine.load else ("tiny-r1", "x")
    with pytest.raises(TypeError, match=f"argument '{name}'; did you mean '{closest}'"):
        work(*models, **{name: 1})
    with pytest.raises(TypeError, match=r"'qqqq'$"):
        read_options(PlanOptions, None, {"qqqq": 1})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prefill_tokens", "chunk_tokens"),
        ("num_drafts", "draft_length"),
        ("num_looked_up", "prompt_lookup"),
    ],
)
def test_an_old_name_works_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        options = read_options(EngineOptions, None, {old: 3})
    assert getattr(options, new) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("samples", value) for value in (0, -3, "many", 2.5)),
        *(("seq_len", 1), ("group_size", 0), ("prune", 1.5), ("keep", 3), ("ignore", "lm_head")),
        ("scheme", 4),
    ],
)
def test_values_that_no_recipe_can_have_are_named(tiny_checkpoint, tmp_path, name, value):
    given = {"scheme": "awq-w4a16", name: value}
    for work, out in ((quantkit.plan, ()), (quantkit.quantize, (tmp_path / "out",))):
        with pytest.raises(quantkit.QuantkitError, match=name):
            work(tiny_checkpoint, *out, **given)
    assert not list(tmp_path.iterdir())
