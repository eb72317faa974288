"""The journal: what a kill may leave of it is either a whole line or none."""

import os

import pytest

from quantkit.checkpoint.journal import (
    Journal,
    JournalEntry,
    JournalReader,
    read_fingerprint,
)

_FIRST = JournalEntry("layer 0", ("a", "b"), "00ff", {"error": 0.25})
_SECOND = JournalEntry("layer 1", ("ü",), "11", {})


def _journal(tmp_path, rank=0):
    return Journal(tmp_path, rank, {"source": "s", "recipe": "r"})


def _write(tmp_path, *entries):
    """The file of a journal that was closed."""
    journal = _journal(tmp_path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    return journal.path


def test_entries_and_fingerprint_read_back(tmp_path):
    path = _write(tmp_path, _FIRST, _SECOND)
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST, "layer 1": _SECOND}
    assert read_fingerprint(path) == {"source": "s", "recipe": "r"}


def test_what_a_power_failure_leaves_is_dropped(tmp_path):
    path = _write(tmp_path, _FIRST)
    with path.open("ab") as file:
        file.write(b"\0" * 30 + b"\n" + b'{"unit": "x"')
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST}
    _write(tmp_path)
    assert b"\0" not in path.read_bytes()


@pytest.mark.parametrize("lost", [1, 40])
def test_a_line_cut_short_is_dropped_and_written_over(tmp_path, lost):
    path = _write(tmp_path, _FIRST, _SECOND)
    os.truncate(path, path.stat().st_size - lost)
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST}
    _write(tmp_path, _SECOND)
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
    os.truncate(journal.path, journal.path.stat().st_size - 7)
    assert read.read_new() == {"layer 0": _FIRST}
    with journal.path.open("ab") as file:
        file.write(line[-7:])
    assert read.read_new() == {"layer 1": _SECOND}
    assert JournalReader(tmp_path).read_new() == {"layer 0": _FIRST, "layer 1": _SECOND}


def test_of_a_unit_written_twice_the_last_counts(tmp_path):
    _write(tmp_path, _FIRST, JournalEntry("layer 0", ("a",), "22", {}))
    assert JournalReader(tmp_path).read_new()["layer 0"].sha256 == "22"
