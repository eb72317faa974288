"""What is said of an engine's loads is what the judge of loaders found."""

import re
from dataclasses import dataclass

import pytest

from quantkit.engines import layouts as module
from quantkit.engines.layouts import (
    LayoutRun,
    LoaderResult,
    cache_evidence,
    evidence,
    find_topology,
    layout_evidence,
    layout_runs,
    loader_results,
)
from quantkit.engines.profiles import EngineProfile, LoadRule, find_engine


@dataclass(frozen=True)
class Rule:
    profile: EngineProfile
    load: LoadRule


@pytest.fixture
def int8():
    profile = find_engine("vllm-ascend")
    return Rule(
        profile,
        next(load for load in profile.loads if load.format == "modelslim" and "int8" in load.grids),
    )


def test_every_result_is_of_a_rule():
    for one in loader_results():
        rules = [
            load
            for load in find_engine(one.engine).loads
            if (load.format, load.variant) == (one.format, one.variant)
        ]
        assert any(one.grid in load.grids and one.device in load.devices for load in rules), one


def test_evidence_is_loaded_if_all_loads_are_right_and_every_fault_is_found(int8, monkeypatch):
    found = next(
        one
        for one in loader_results()
        if (one.engine, one.format, one.grid) == ("vllm-ascend", "modelslim", "int8")
    )

    def said(**changes):
        monkeypatch.setattr(
            module,
            "loader_results",
            lambda: (
                LoaderResult(
                    **{
                        **found.model_dump(),
                        "loads": 4,
                        "right": 4,
                        "faults": 3,
                        "found": 3,
                        **changes,
                    }
                ),
            ),
        )
        return evidence(int8.profile, int8.load)

    assert said() == "loaded by vllm-ascend 0.23.0 on a CPU, ranks 0 and 3 of 4"
    assert said(right=3) == "by source"
    assert said(found=2) == "by source"
    assert said(faults=0, found=0) == "by source"
    assert said(loads=0, right=0) == "by source"


def test_evidence_of_cache_scales(monkeypatch):
    ascend = find_engine("vllm-ascend")
    read = cache_evidence(ascend, "int8")
    assert re.fullmatch(
        r"loaded by vllm-ascend 0.23.0 on a CPU, [\d-]{10} \(deepseek_v3, qwen3\)", read
    )
    assert cache_evidence(find_engine("sglang"), "int8") == "by source"
    monkeypatch.setattr(
        module,
        "loader_results",
        lambda: tuple(one.model_copy(update={"found": 0}) for one in loader_results()),
    )
    assert cache_evidence(ascend, "int8") == "by source"


def test_a_run_counts_for_more():
    profile = find_engine("vllm")
    awq = next(load for load in profile.loads if load.format == "awq" and "cuda" in load.devices)
    assert evidence(profile, awq) == "run on H200, vLLM 0.22.1, 2026-11-21"


def test_every_run_is_of_a_layout():
    for run in layout_runs():
        find_topology(run.engine, name=run.layout)
        assert run.passed <= (run.equal > 0 and run.compared >= run.equal), run


def test_a_layout_counts_as_run_if_its_tokens_were_right(monkeypatch):
    right = LayoutRun(
        engine="vllm",
        release="1",
        machine="CPU",
        layout="one-box",
        ranks=2,
        model="m",
        format="awq",
        compared=9,
        equal=9,
        passed=True,
    )
    wrong = right.model_copy(update={"format": "ct-w8a8", "passed": False})
    guessed = right.model_copy(update={"guesses": 1, "machine": "H200"})
    monkeypatch.setattr(
        module,
        "layout_runs",
        lambda: (right, wrong, guessed, right.model_copy(update={"format": "source"})),
    )
    assert layout_evidence("vllm", "cuda", "one-box") == "run on CPU, vllm 1"
    assert layout_evidence("vllm", "cuda", "one-box", guesses=2) == "run on H200, vllm 1"
    assert (
        layout_evidence("vllm", "cuda", "two-boxes")
        == layout_evidence("sglang", "cuda", "one-box")
        == "by source, not run"
    )
    assert layout_evidence("vllm", "npu", "one-box") == "by source, not run", (
        "the commands of another kind of device are others"
    )
