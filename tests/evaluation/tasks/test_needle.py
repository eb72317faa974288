"""Texts with hidden numbers, counted by real tokenizers."""

import re

import pytest
from commands import typed
from graded import graded

from quantkit.evaluation.grading.graders import find_grader
from quantkit.evaluation.tasks.data import problems, read_rows
from quantkit.evaluation.tasks.definitions import find_setting, find_task
from quantkit.evaluation.tasks.needle import KINDS, NEEDLES, needle_rows


def words(text):
    return len(text.split())


def test_a_text_is_as_long_as_asked_and_made_from_the_seed_alone():
    rows = list(needle_rows(words, [300, 3000], list(KINDS), 4, 0))
    assert len(rows) == 2 * len(KINDS) * 4
    assert rows == list(needle_rows(words, [300, 3000], list(KINDS), 4, 0))
    assert rows != list(needle_rows(words, [300, 3000], list(KINDS), 4, 1))
    assert len({row["problem"] for row in rows}) == len(rows)
    for row in rows:
        assert row["length"] - 20 < row["tokens"] == words(row["problem"]) <= row["length"]


def test_the_asked_for_number_stands_once_at_its_depth_among_as_many_as_the_kind_says():
    for row in needle_rows(words, [2000], list(KINDS), 5, 3):
        text = row["problem"]
        assert text.count(row["answer"]) == 1
        assert abs(text.index(row["answer"]) / len(text) - row["depth"]) < 0.05
        hidden = text.count("The number of ")
        assert hidden == {"single": 1, "multikey": NEEDLES}.get(row["kind"], hidden)
        assert hidden > 200 or row["kind"] != "keys"


def test_the_command_makes_what_the_task_reads(tmp_path):
    made = typed(f"needle tiny-r1 --out {tmp_path}/needle/test.jsonl --lengths 512,4k --count 2")
    assert made.code == 0, made.err
    setting = find_setting(find_task("needle"), "r1", repeats=1)
    rows = read_rows("needle", setting.task.data, tmp_path).rows
    groups = {
        problem.group for problem in problems(setting, find_grader(setting.grader).gold, rows)
    }
    assert groups == {f"{length} {kind}" for length in (512, 4096) for kind in KINDS}
    assert 4096 - 60 < rows[-1]["tokens"] <= 4096
    assert setting.generation.temperature == 0


@pytest.mark.parametrize("name", ["my texts/needle.jsonl", "needle/test.jsonl", "texts.jsonl"])
def test_the_command_that_it_prints_finds_the_texts(name, tmp_path):
    made = typed(f"needle tiny-r1 --lengths 512 --count 1 --out '{tmp_path / name}'")
    assert made.code == 0, made.err
    printed = re.search(r"quantkit (eval MODEL .+)$", made.err, re.MULTILINE)
    if name == "texts.jsonl":  # the task reads no file of that name
        assert printed is None
        return
    assert printed is not None, made.err
    line = printed[1].replace("MODEL", "tiny-r1")
    done = typed(f"{line} --limit 1 --max-tokens 2 --repeats 1")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("1234567", "right"),
        ("1234567 or 7654321", "wrong"),
        ("7654321", "wrong"),
        ("I forgot.", "no-answer"),
    ],
)
def test_retrieval(reply, reason):
    assert graded("retrieval", {"answer": "1234567"}, reply).reason == reason
