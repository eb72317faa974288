"""Replacing a directory: whatever moment a kill picks, one of the two is whole under its name."""

import json

import pytest
from refused import refused

from quantkit.checkpoint import output_dir

_STATE = ".quantkit"


def _directory(path, content, state):
    path.mkdir()
    (path / "config.json").write_text(content)
    (path / "manifest.json").write_text(
        json.dumps({"run": {}, "files": {"config.json": {"size": len(content)}}})
    )
    if state:
        (path / _STATE).mkdir()
        (path / _STATE / "journal-00000.jsonl").write_text("{}\n")
    return path


def _names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_the_new_takes_the_place_of_the_old(exchange, old, tmp_path, monkeypatch):
    partial = _directory(tmp_path / "out.partial", "new", state=True)
    if old:
        _directory(tmp_path / "out", "old", state=False)
    if not exchange:  # a file system that cannot
        monkeypatch.setattr(output_dir, "_exchange", lambda first, second: False)
    output_dir.replace_directory(partial, tmp_path / "out", _STATE)
    assert _names(tmp_path) == ["out"]
    assert _names(tmp_path / "out") == ["config.json", "manifest.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_exchange_is_one_step_here(tmp_path):
    """Names are swapped, both directories whole: what the kernel does, not two renames."""
    first = _directory(tmp_path / "a", "first", state=False)
    second = _directory(tmp_path / "b", "second", state=False)
    if not output_dir._exchange(first, second):
        pytest.skip("this file system cannot exchange two names")
    assert ((first / "config.json").read_text(), (second / "config.json").read_text()) == (
        "second",
        "first",
    )


def test_killed_after_the_exchange_the_old_one_is_cleared_up(tmp_path):
    out = _directory(tmp_path / "out", "new", state=True)
    (out / _STATE / "exchanging").touch()
    partial = _directory(tmp_path / "out.partial", "old", state=False)
    output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(tmp_path) == ["out"]
    assert _names(out) == ["config.json", "manifest.json"]


def test_killed_before_the_exchange_nothing_is_touched(tmp_path):
    out = _directory(tmp_path / "out", "old", state=False)
    partial = _directory(tmp_path / "out.partial", "new", state=True)
    (partial / _STATE / "exchanging").touch()
    output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(tmp_path) == ["out", "out.partial"]
    assert _names(partial) == [_STATE, "config.json", "manifest.json"]


def test_what_quantkit_did_not_write_stays(tmp_path):
    """Put there while the new one was made: told before anything changes; and put there while the
    old one was removed."""
    partial = _directory(tmp_path / "out.partial", "new", state=True)
    out = _directory(tmp_path / "out", "old", state=False)
    (out / "letters").write_text("dear")
    with refused("out holds letters, which quantkit did not write"):
        output_dir.replace_directory(partial, out, _STATE)
    assert (out / "config.json").read_text() == "old"
    output_dir._exchange(partial, out)
    (out / _STATE / "exchanging").touch()
    for _ in range(2):  # the next start tells the same
        with refused(r"out\.partial, which was replaced, holds letters"):
            output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(partial) == ["letters", "manifest.json"]
    assert (out / "config.json").read_text() == "new"
