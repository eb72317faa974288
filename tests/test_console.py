"""What the command line shows where nobody looks at a terminal."""

import os
import subprocess
import sys


def test_a_table_that_is_not_a_terminals_is_printed_in_full_width() -> None:
    words = " ".join(["word"] * 60)
    code = f"from quantkit.console import facts; facts('title', [('name', '{words}')])"
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert words in done.stdout, done.stderr
