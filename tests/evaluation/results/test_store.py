import os

import pytest

from quantkit.cli import console
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.results.folder import ReplyJournal
from quantkit.evaluation.results.published import (
    published_speeds,
    published_speeds_for,
)

FACTS = {
    "task": "t",
    "protocol": "r1",
    "prompt": "p",
    "system": None,
    "data": "d",
    "shots": None,
    "seed": 0,
    "generation": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 64, "stop": []},
    "model": {"checkpoint": "a"},
}


def test_replies_come_back_and_failures_do_not(tmp_path):
    journal = ReplyJournal.of(tmp_path, "t", FACTS)
    reply = ModelReply(3, "６ \n</think>\u2028", "length", 5, 7, 1.5, True, None)
    journal.add(("a", 0), reply)
    journal.add(("a", 1), ModelReply(4, error="HTTP 500"))
    again = ReplyJournal.of(tmp_path, "t", FACTS)
    assert set(again.kept) == {("a", 0)}
    assert again.kept["a", 0] == ModelReply(-1, reply.text, "length", 5, 7, 1.5, True, None)
    assert again.changed == []


def test_a_line_cut_by_a_kill_is_dropped_and_the_next_starts_clean(tmp_path):
    journal = ReplyJournal.of(tmp_path, "t", FACTS)
    for repeat in range(2):
        journal.add(("a", repeat), ModelReply(0, "one"))
    os.truncate(journal.path, journal.path.stat().st_size - 9)
    again = ReplyJournal.of(tmp_path, "t", FACTS)
    assert set(again.kept) == {("a", 0)}
    again.add(("a", 1), ModelReply(0, "three"))
    assert ReplyJournal.of(tmp_path, "t", FACTS).kept["a", 1].text == "three"


def test_speeds_stand_under_what_they_are_of(capsys):
    tables = published_speeds()
    awq = next(table for table in tables if table["name"] == "r1-0528-w4a16-910b1")
    assert {"input_len": 128, "concurrency": 1, "tpot_ms": 22.8}.items() <= awq["rows"][0].items()
    assert not [row for table in tables for row in table["rows"] if None in row.values()]
    console.show_published([awq])
    shown = capsys.readouterr().out
    assert "22.8" in shown
    assert "910B1" in shown


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("deepseek-r1-0528-awq-w4a16", 2),
        ("deepseek-ai/DeepSeek-R1", 2),
        ("DeepSeek-R1-Distill-Qwen-7B", 0),
        ("DeepSeek-R1-Zero", 0),
        ("tiny-r1", 0),
    ],
)
def test_speeds_are_shown_beside_the_model_that_they_are_of(model, count):
    assert len(published_speeds_for(model)) == count
