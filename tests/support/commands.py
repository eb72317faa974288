"""Commands as a user types them, run in this process: importing torch for each would take longer
than the command."""

import contextlib
import io
import json
import shlex
import sys
import warnings
from dataclasses import dataclass
from unittest.mock import patch

from quantkit.cli import main


@dataclass(frozen=True)
class Answer:
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self):
        """The line that says what is wrong."""
        return next(line for line in self.err.splitlines() if line.startswith("error: "))

    @property
    def errors(self):
        """Lines on stderr that are not empty."""
        return sum(bool(line.strip()) for line in self.err.splitlines())

    @property
    def json(self):
        """The one object on stdout."""
        return json.loads(self.out)


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["quantkit", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert "--debug" not in err.getvalue(), err.getvalue()  # a fault that has no words of its own
    return Answer(code, out.getvalue(), err.getvalue())


def typed(line):
    """A command as it is typed in a shell: words between spaces, quotes where one has spaces."""
    return command(*shlex.split(line))
