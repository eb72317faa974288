"""YAML settings: for every reader a fault is one line with the file, the place in it and the
remedy."""

import time
from typing import Any

import hostile_yaml
import pytest
from refused import refused
from sample_sizes import sized

from quantkit import QuantkitError
from quantkit.calibrate.recipe import load_recipe
from quantkit.common.assets import asset
from quantkit.common.settings import Strict, read_yaml
from quantkit.evaluation.tasks.definitions import find_task

CPU_S = 10.0
READERS = (load_recipe, find_task)


class Part(Strict):
    size: int
    share: float = 0.5


FAULTS = {
    b"size: [1": "line 1: expected",
    b"a: 1\nsize: {": "line 2: ",
    b"size: many": "size: Input should be a valid integer",
    b"size: 1\nsise: 2": "sise: Extra inputs are not permitted",
    b"size: 1\nother: 2\nsize: 3": "line 3: size appears twice",
    b"size: 1\nshare: .inf": "share: Input should be a finite number",
    b"size: 1\nshare: .nan": "share: Input should be a finite number",
    b"{}": "size: Field required",
    b"": "Input should be a valid dictionary",
    b"- 1": "Input should be a valid dictionary",
    b"size: 2026-99-99": "month",
    b"size: '\xff'": "utf-8",
    b"size: '\x07'": "special characters are not allowed",
    b"size: !!python/object/apply:os.system ['true']": "line 1: could not determine a constructor",
    b"[" * 20_000: "recursion",
}


@pytest.mark.parametrize("content", FAULTS, ids=lambda content: repr(content[:20]))
def test_a_fault_is_reported_with_file_and_place(content, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(QuantkitError) as told:
        read_yaml(path, Part, "see the page")
    assert told.value.problem.startswith(f"{path} is not valid: ")
    assert FAULTS[content] in told.value.problem
    assert told.value.remedy == "see the page"


def test_faults_in_a_list_or_dict_name_their_place(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("- size: 1\n- size: x\n")
    with refused(r"not valid: 1\.size: "):
        read_yaml(path, tuple[Part, ...], "")
    path.write_text("one: {size: 1}\ntwo: {}\n")
    with refused(r"not valid: two\.size: "):
        read_yaml(path, dict[str, Part], "")


@pytest.mark.parametrize("read", READERS, ids=lambda read: str(read.__name__))
def test_every_reader_reports_faults_the_same_way(read, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("nothing: known\n")
    with refused(rf"{path} is not valid: \w+: "):
        read(str(path))


def test_a_recipe_of_before_is_told_todays_key(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("scheme: awq-w4a16\nexpert_damping: 0.1\n")
    with refused("expert_damping: .*; give damping"):
        load_recipe(str(path))


@pytest.mark.parametrize("name", hostile_yaml.FIXED)
def test_a_small_file_cannot_ask_for_much(tmp_path, name):
    path, started = tmp_path / "file.yaml", time.process_time()
    path.write_text(hostile_yaml.FIXED[name])
    with refused("is not valid: ") as fault:
        read_yaml(path, Part, "see the docs")
    assert str(fault.value).isprintable()
    assert time.process_time() - started < CPU_S


def test_a_shaken_file_is_read_or_refused(tmp_path):
    good, path = asset("recipes", "deploy", "vllm.yaml").read_text(), tmp_path / "file.yaml"
    refused = 0
    for seed in range(sized(30, 300)):
        path.write_text(hostile_yaml.shaken(good[:4000], seed))
        try:
            read_yaml(path, dict[str, Any], "see the docs")
        except QuantkitError:
            refused += 1
    assert refused > 10


def test_a_file_of_any_name_is_read_and_a_shipped_one_goes_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = load_recipe("rtn-w4a16")
    for name in ("mine.txt", "rtn-w4a16"):
        (tmp_path / name).write_text("{scheme: awq-w4a16, samples: 3}")
    assert load_recipe("mine.txt").samples == 3
    assert load_recipe("rtn-w4a16") == shipped
