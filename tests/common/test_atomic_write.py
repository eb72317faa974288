"""Files that appear whole or not at all, and commands that say before their work that theirs could
not be written."""

import resource
from contextlib import contextmanager

import pytest
from commands import command
from refused import refused

from quantkit.common.atomic_write import check_writable, write_atomic

TOO_LONG = "x" * 256
"""One character more than a name may have."""


@contextmanager
def _room_for(size):
    """No file may grow beyond `size` bytes: as on a disk that fills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_old_file_stays_and_no_partial_file_remains(tmp_path):
    path = tmp_path / "results.json"
    write_atomic(path, "before")
    with _room_for(100), refused(r"cannot write .*results\.json: File too large; fix that"):
        write_atomic(path, "after" * 1000)
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]


def test_a_file_that_could_not_be_written_is_reported_before(tmp_path):
    check_writable(tmp_path / "c.json", "--out")
    assert not list(tmp_path.iterdir())
    for path, said in (
        (tmp_path, f"{tmp_path} is a directory; give --out the name of a file"),
        (tmp_path / "no" / "c.json", "there is no folder"),
        (tmp_path / TOO_LONG, "File name too long"),
    ):
        with refused(said):
            check_writable(path, "--out")
    with _room_for(0), refused("File too large"):
        check_writable(tmp_path / "c.json", "--out")
    assert not list(tmp_path.iterdir())


MODEL, ROWS = "checkpoint.hub.builtin_model", "evaluation.tasks.needle.needle_rows"


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (MODEL, "check tiny-r1 --report"),
        (MODEL, "run tiny-r1 --prompt 1 --count-experts"),
        (MODEL, "ppl tiny-r1 --text TEXT --count-experts"),
        (ROWS, "needle tiny-r1 --lengths 512 --out"),
    ],
)
def test_commands_refuse_first(tmp_path, work, line, monkeypatch):
    monkeypatch.setattr(f"quantkit.{work}", lambda *_: pytest.fail("work began"))
    answer = command(*line.split(), str(tmp_path / TOO_LONG))
    assert (answer.code, answer.out) == (1, "")
    assert f"cannot write {tmp_path}" in answer.error
    assert "File name too long" in answer.error


def test_findings_are_reported_where_the_page_cannot_be_written(tmp_path):
    report = tmp_path / "report.html"
    with _room_for(200):  # enough for the look beforehand
        answer = command("check", "tiny-r1", "--depth", "headers", "--report", str(report))
    assert answer.code == 1
    assert answer.out.startswith("good: tiny-r1")
    assert f"cannot write {report}" in answer.err
    assert not list(tmp_path.iterdir())
