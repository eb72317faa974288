"""The table of operators and backends says what `prepare` then does."""

import importlib.util
import sys

import pytest
import torch
from quantkit_kernels import (
    BACKENDS,
    OPERATORS,
    ExpertsBuilder,
    Gating,
    backends,
    prefer,
    prepare,
    table,
)
from quantkit_kernels.backends import serving_gates, why_unusable
from quantkit_kernels.cuda.experts.experts import CudaExpertsLayout
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.samples import random_weight
from quantkit_kernels.triton.experts import TritonExpertsLayout


def test_table_has_every_pair_once_and_a_reason_for_every_refusal():
    rows = table("cpu")
    assert [(row.operator, row.backend) for row in rows] == [
        (operator, backend) for operator in OPERATORS for backend in BACKENDS
    ]
    for row in rows:
        assert row.usable or row.reason, row
    assert all(row.usable for row in rows if row.backend == "reference")


def test_auto_never_expands_a_quantized_weight():
    rng = torch.Generator().manual_seed(9)
    for grid in ("int4-asym-128", "int8", "fp4"):
        linear = prepare(random_weight(grid, 64, 128, rng))
        assert linear.backend != "expanded"
        assert linear.nbytes < 1.2 * 64 * 128
    assert prepare(random_weight("dense", 64, 128, rng)).backend == "expanded"


def test_a_backend_asked_for_serves_what_it_has_and_others_the_rest():
    taken = {row.operator: row.backend for row in table("cpu", "expanded") if row.taken}
    assert taken["linear_int4"] == "expanded"
    assert taken["mla_prepare"] == "reference"
    assert list(taken) == list(OPERATORS)
    assert {row.operator: row.backend for row in table("cpu") if row.taken}[
        "linear_dense"
    ] == "expanded"
    with pytest.raises(ValueError, match="'fast' is not known"):
        table("cpu", "fast")


def test_what_is_preferred_is_what_auto_takes_until_it_is_no_more():
    device = torch.device("cpu")
    weight = random_weight("int8", 32, 128, torch.Generator().manual_seed(0))
    before = prepare(weight).backend
    prefer("reference", device)
    try:
        assert prepare(weight).backend == "reference"
        assert prepare(weight, backend="expanded").backend == "expanded"
    finally:
        prefer("auto", device)
    assert prepare(weight).backend == before
    for wrong, why in (("cuda", "cuda runs nothing on cpu"), ("fast", "is not known")):
        with pytest.raises(ValueError, match=why):
            prefer(wrong, device)
        assert prepare(weight).backend == before


@pytest.fixture
def a_triton(tmp_path, monkeypatch):
    """Makes a module `triton` with this text the one that is imported, or none."""
    from quantkit_kernels import triton
    from quantkit_kernels.triton import first_use

    def install(text):
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        if text is None:
            monkeypatch.setitem(sys.modules, "triton", None)
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        else:
            (tmp_path / "triton.py").write_text(text)
            monkeypatch.syspath_prepend(tmp_path)
        triton._why_no_triton.cache_clear()
        first_use.why_not_started.cache_clear()

    yield install
    for name in ("triton", "triton.runtime"):
        sys.modules.pop(name, None)
    triton._why_no_triton.cache_clear()
    first_use.why_not_started.cache_clear()


DRIVER = """
import subprocess, sys, types
__version__ = "3.10.0+git1"
class Driver:
    @property
    def active(self):
        {start}
runtime = types.ModuleType("triton.runtime")
runtime.driver = Driver()
sys.modules["triton.runtime"] = runtime
"""


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (
            "raise RuntimeError('Failed to find C compiler. Please specify via CC')",
            "Failed to find C compiler",
        ),
        ("subprocess.run(['false'], check=True)", "returned non-zero exit status 1"),
        ("open('/nonexistent/gcc')", "No such file or directory"),
        ("return types.SimpleNamespace(get_current_target=lambda: 'sm_86')", "None"),
        (None, "triton is not installed: pip install triton"),
        ("__version__ = '3.1.0'", "triton 3.1.0 is too old, 3.6 or newer is needed"),
        (
            "raise ImportError('libtriton.so: wrong ELF class\\nand more')",
            "triton is installed and cannot be imported: libtriton.so: wrong ELF class",
        ),
    ],
)
def test_a_machine_on_which_triton_does_not_run_is_told_what_it_lacks(
    start, reason, a_triton, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    whole = start is None or start.startswith(("__version__", "raise Import"))
    a_triton(start if whole else DRIVER.replace("{start}", start))
    found = str(why_unusable("linear_int4", "triton", torch.device("cuda")))
    assert reason in found
    assert whole or found == "None" or found.endswith("install gcc and python3-dev")


def on_hopper(monkeypatch, *usable):
    """A GPU that is not here, on which these backends run everything."""
    monkeypatch.setattr(
        backends,
        "why_unusable",
        lambda operator, name, *others: None if name in usable else "not here",
    )
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("grid", "asked", "usable", "taken"),
    [
        ("fp4", "auto", ("cuda", "triton", "reference"), "triton"),
        ("fp4", "cuda", ("cuda", "triton", "reference"), "triton"),
        ("fp4", "reference", ("cuda", "triton", "reference"), "reference"),
        ("fp4", "auto", ("cuda", "reference"), "cuda"),
        ("dense", "auto", ("triton", "expanded", "reference"), "expanded"),
    ],
)
def test_gates_that_are_no_silu_go_to_who_has_kernels_for_them(
    grid, asked, usable, taken, monkeypatch
):
    """Triton's linears of 16 bits serve many shapes, its kernels of a layer know silu alone."""
    device = on_hopper(monkeypatch, *usable)
    assert serving_gates(grid, False, asked, device) == taken
    if "cuda" in usable and asked == "auto":
        assert serving_gates(grid, True, asked, device) == "cuda"  # it clamps
    prefer(asked if asked in usable else "auto", device)
    try:
        assert serving_gates(grid, False, "auto", device) == taken
    finally:
        prefer("auto", device)


class Told(Gating):
    """Computes something else than its numbers say."""


@pytest.mark.parametrize(
    ("gating", "grid", "layout"),
    [
        (Gating(limit=7.0), "fp4", CudaExpertsLayout),
        (Gating(1.702, 7.0, 1.0), "fp4", TritonExpertsLayout),
        (Told(), "fp4", LoopLayout),
        (Gating(limit=7.0), "fp4-w4a4", LoopLayout),
        (Gating(limit=7.0), "dense", LoopLayout),
    ],
)
def test_a_layer_takes_the_layout_of_its_gate(gating, grid, layout, monkeypatch):
    device = on_hopper(monkeypatch, "cuda", "triton", "reference")
    weight = random_weight(grid, 64, 64, torch.Generator().manual_seed(0))
    monkeypatch.setattr("quantkit_kernels.triton.announce", lambda device: None)
    assert (
        type(ExpertsBuilder(2, device=device, gating=gating)._begin(weight, weight, False))
        is layout
    )
