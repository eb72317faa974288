"""What the command line shows where nobody looks at a terminal."""

import os
import subprocess
import sys

import pytest


def test_a_table_that_is_not_a_terminals_has_100_columns():
    words = " ".join(["word"] * 60)
    code = f"from quantkit.cli.console import facts; facts('title', [('name', '{words}')])"
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.count("word") == 60, done.stderr
    assert max(map(len, done.stdout.splitlines())) == 100


def _shell(line, folder):
    python = f"{sys.executable} -m quantkit"
    return subprocess.run(
        ["bash", "-c", line.replace("quantkit", python, 1)],
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("quantkit --version >&-", 0, ""),
        ("quantkit --version <&- >&- 2>&-", 0, ""),
        ("quantkit --version > /dev/full", 1, "error: the output: No space left on device"),
        (
            "quantkit compare nowhere nothing --json > /dev/full",
            1,
            "error: nowhere holds no results",
        ),
        (
            "mkdir gone; cd gone; rmdir ../gone; quantkit plan tiny-r1 --scheme rtn-w4a16",
            1,
            "error: the working folder was removed",
        ),
        ("quantkit serve tiny-r1 --port 99999", 2, "error: Invalid value for '--port'"),
    ],
)
def test_streams_and_folders_that_are_not_there(line, code, said, tmp_path):
    ended = _shell(line, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith(said)
    assert len(ended.stderr.splitlines()) <= 1
