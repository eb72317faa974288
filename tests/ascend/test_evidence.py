"""docs/lab/ascend.md's table of what was proven is what evidence.yaml has tests for, and those tests are
there."""

import ast
import functools
import re
from pathlib import Path

import yaml
from quantkit_kernels.torch_npu.rules import RULES

from quantkit.common.assets import asset

TESTS = Path(__file__).parents[1]
EVIDENCE = yaml.safe_load(Path(__file__).with_name("evidence.yaml").read_text())
"""By the row, for each part of its last column: files and tests in them."""


@functools.cache
def table():
    """Columns of the page's table by the first."""
    page = asset("docs", "lab", "ascend.md").read_text()
    lines = (
        page.partition("| operator | backend | runs on | proven |\n")[2]
        .partition("\n\n")[0]
        .splitlines()[1:]
    )
    cells = [[one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(len(row) == 4 for row in cells)
    assert len({row[0] for row in cells}) == len(cells)
    return {row[0]: row for row in cells}


@functools.cache
def names_in(file):
    return {
        one.name
        for one in ast.parse((TESTS / file).read_text()).body
        if isinstance(one, ast.FunctionDef)
    }


def test_every_row_has_its_evidence():
    assert list(table()) == list(EVIDENCE)
    for name, row in table().items():
        parts = row[3].split("; ")
        assert len(parts) == len(EVIDENCE[name]), f"{name}: {parts}"
        for part, tests in zip(parts, EVIDENCE[name]):
            assert (not tests) == bool(re.search(r"\b(?:never|not)\b", part)), f"{name}: {part}"


def test_the_tests_are_there():
    for name, parts in EVIDENCE.items():
        for file, tests in ((file, tests) for part in parts for file, tests in part.items()):
            lacking = set(tests) - names_in(file)
            assert not lacking, f"{name}: {file} has no {lacking}"


def test_what_has_rules_and_schemas():
    """A row says so of the operators that it names: all of them, and no operator is without a
    row."""
    named = {
        name: set(re.findall(r"`(npu_\w+)`", row[2]))
        for name, row in table().items()
        if row[1] == "torch_npu"
    }
    for name, operators in named.items():
        assert operators <= RULES.keys(), name
        assert bool(operators) == table()[name][3].startswith("rules; schema, shape"), name
    prefetched = {"npu_prefetch"}
    assert set().union(*named.values()) | prefetched == RULES.keys()
