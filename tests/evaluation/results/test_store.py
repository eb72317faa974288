from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.results.folder import ReplyJournal

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
    journal.add(("a", 0), ModelReply(0, "one"))
    journal.add(("a", 1), ModelReply(0, "two"))
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-9])
    again = ReplyJournal.of(tmp_path, "t", FACTS)
    assert set(again.kept) == {("a", 0)}
    again.add(("a", 1), ModelReply(0, "three"))
    assert ReplyJournal.of(tmp_path, "t", FACTS).kept["a", 1].text == "three"


def test_changed_facts_start_a_new_journal_and_are_named(tmp_path):
    ReplyJournal.of(tmp_path, "t", FACTS).add(("a", 0), ModelReply(0, "one"))
    changed = ReplyJournal.of(
        tmp_path, "t", FACTS | {"prompt": "other", "model": {"checkpoint": "b"}}
    )
    assert changed.kept == {}
    assert changed.changed == ["prompt", "model"]
    assert set(ReplyJournal.of(tmp_path, "t", FACTS).kept) == {("a", 0)}
    assert ReplyJournal.of(tmp_path, "t2", FACTS).changed == []
