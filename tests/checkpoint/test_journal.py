"""The journal: what a kill may leave of it is either a whole line or none."""

import os

import pytest
from refused import refused

from quantkit.checkpoint.journal import (
    Journal,
    JournalEntry,
    JournalReader,
    check_unlocked,
    journal_files,
    lock_path,
    read_fingerprint,
)

_FIRST = JournalEntry("layer 0", ("a", "b"), "00ff", {"error": 0.25})
_SECOND = JournalEntry("layer 1", ("ü",), "11", {})


def _journal(tmp_path, rank=0):
    return Journal(tmp_path, rank, {"source": "s", "recipe": "r"})


def test_entries_and_fingerprint_read_back(tmp_path):
    journal = _journal(tmp_path)
    journal.append(_FIRST)
    journal.append(_SECOND)
    journal.close()
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST, "layer 1": _SECOND}
    assert read_fingerprint(journal.path) == {"source": "s", "recipe": "r"}


def test_what_a_power_failure_leaves_is_dropped(tmp_path):
    journal = _journal(tmp_path)
    journal.append(_FIRST)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b"\0" * 30 + b"\n" + b'{"unit": "x"')
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST}
    _journal(tmp_path).close()
    assert b"\0" not in journal.path.read_bytes()


@pytest.mark.parametrize("lost", [1, 5, 40])
def test_a_line_cut_short_is_dropped_and_written_over(tmp_path, lost):
    journal = _journal(tmp_path)
    journal.append(_FIRST)
    journal.append(_SECOND)
    journal.close()
    with journal.path.open("r+b") as file:
        file.truncate(journal.path.stat().st_size - lost)
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST}
    again = _journal(tmp_path)
    again.append(_SECOND)
    again.close()
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST, "layer 1": _SECOND}


def test_lines_are_read_as_they_come(tmp_path):
    """Also of a journal that begins later, and of a line that is half there the first time."""
    read, journal = JournalReader(tmp_path), _journal(tmp_path)
    assert read.read_new() == {}
    journal.append(_FIRST)
    assert read.read_new() == {"layer 0": _FIRST}
    other = _journal(tmp_path, 1)
    other.append(_SECOND)
    assert read.read_new() == {"layer 1": _SECOND}
    assert read.read_new() == {}
    journal.append(_SECOND)
    other.append(_FIRST)
    for one in (journal, other):
        one.close()
    line = journal.path.read_bytes().splitlines(keepends=True)[-1]
    with journal.path.open("r+b") as file:
        file.truncate(journal.path.stat().st_size - 7)
    assert read.read_new() == {"layer 0": _FIRST}
    with journal.path.open("ab") as file:
        file.write(line[-7:])
    assert read.read_new() == {"layer 1": _SECOND}
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST, "layer 1": _SECOND}


def test_of_a_unit_written_twice_the_last_counts(tmp_path):
    journal = _journal(tmp_path)
    journal.append(_FIRST)
    journal.append(JournalEntry("layer 0", ("a",), "22", {}))
    journal.close()
    assert JournalReader(tmp_path).read_new()["layer 0"].sha256 == "22"


def test_ranks_have_a_journal_each(tmp_path):
    for rank, entry in enumerate((_FIRST, _SECOND)):
        journal = _journal(tmp_path, rank)
        journal.append(entry)
        journal.close()
    assert len(journal_files(tmp_path)) == 2
    assert JournalReader(tmp_path).read_new().keys() == {"layer 0", "layer 1"}


def test_a_journal_in_use_is_refused(tmp_path):
    journal = _journal(tmp_path)
    for attempt in (
        lambda: check_unlocked(lock_path(tmp_path, 0), tmp_path),
        lambda: _journal(tmp_path),
    ):
        with refused(f"process {os.getpid()} on .* is writing"):
            attempt()
    check_unlocked(lock_path(tmp_path, 1), tmp_path)
    journal.close()
    assert not lock_path(tmp_path, 0).exists()
    _journal(tmp_path).close()
