"""What is said of an engine's loads is what the judge of loaders found."""

import re

from quantkit.engines import layouts as module
from quantkit.engines.layouts import (
    LayoutRun,
    cache_evidence,
    evidence,
    find_topology,
    layout_evidence,
    layout_runs,
    loader_results,
)
from quantkit.engines.profiles import find_engine


def test_every_result_is_of_a_rule():
    for one in loader_results():
        rules = [
            load
            for load in find_engine(one.engine).loads
            if (load.format, load.variant) == (one.format, one.variant)
        ]
        assert any(one.grid in load.grids and one.device in load.devices for load in rules), one


def test_evidence_is_loaded_if_all_loads_are_right_and_every_fault_is_found(monkeypatch):
    profile = find_engine("vllm-ascend")
    rules = [one for one in profile.loads if one.format == "modelslim" and "int8" in one.grids]
    about = {"engine": profile.engine, "format": "modelslim", "variant": rules[0].variant}
    found = next(one for one in loader_results() if about.items() <= vars(one).items())
    for changes, said in (
        ({}, "loaded by vllm-ascend 0.23.0 on a CPU, ranks 0 and 3 of 4"),
        ({"right": 3}, "by source"),
        ({"found": 2}, "by source"),
        ({"faults": 0, "found": 0}, "by source"),
        ({"loads": 0, "right": 0}, "by source"),
    ):
        counts = {"grid": "int8", "loads": 4, "right": 4, "faults": 3, "found": 3} | changes
        monkeypatch.setattr(
            module, "loader_results", lambda c=counts: (found.model_copy(update=c),)
        )
        assert evidence(profile, rules[0]) == said


def test_evidence_of_cache_scales(monkeypatch):
    ascend, results = find_engine("vllm-ascend"), loader_results()
    read = r"loaded by vllm-ascend 0.23.0 on a CPU, [\d-]{10} \(deepseek_v3, qwen3\)"
    assert re.fullmatch(read, cache_evidence(ascend, "int8"))
    assert cache_evidence(find_engine("sglang"), "int8") == "by source"
    unfound = tuple(one.model_copy(update={"found": 0}) for one in results)
    monkeypatch.setattr(module, "loader_results", lambda: unfound)
    assert cache_evidence(ascend, "int8") == "by source"


def test_every_run_is_of_a_layout():
    for run in layout_runs():
        find_topology(run.engine, name=run.layout)
        assert run.passed <= (run.equal > 0 and run.compared >= run.equal), run


def test_a_layout_counts_as_run_if_its_tokens_were_right(monkeypatch):
    about = {"engine": "vllm", "release": "1", "machine": "CPU", "layout": "one-box", "ranks": 2}
    about |= {"model": "m", "format": "awq", "compared": 9, "equal": 9, "passed": True}
    right = LayoutRun(**about)
    changes = {"format": "ct-w8a8", "passed": False}, {"guesses": 1, "machine": "H200"}
    runs = right, *(right.model_copy(update=one) for one in (*changes, {"format": "source"}))
    monkeypatch.setattr(module, "layout_runs", lambda: runs)
    assert layout_evidence("vllm", "cuda", "one-box") == "run on CPU, vllm 1"
    assert layout_evidence("vllm", "cuda", "one-box", guesses=2) == "run on H200, vllm 1"
    for other in ("vllm cuda two-boxes", "sglang cuda one-box", "vllm npu one-box"):
        assert layout_evidence(*other.split()) == "by source, not run"
