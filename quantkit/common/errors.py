"""Errors shown to users: what is wrong, and what to do about it."""

from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 1000
"""Limit in characters of a problem or a remedy."""


class QuantkitError(Exception):
    """A fault in the input or the request, shown as one line.

    `problem` names the thing that is wrong (file, tensor, option); `remedy` says what to do. The
    command line prints both on one line and exits with 1; a traceback is shown with --debug only.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = _one_line(problem)
        self.remedy = _one_line(remedy)
        super().__init__(f"{self.problem}; {self.remedy}" if remedy else self.problem)


class UsageError(QuantkitError):
    """An option has an unknown value, or one that conflicts with another option. The command line
    exits with 2."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run that can be resumed. `kept` describes what is kept, and where."""

    def __init__(self, kept: str) -> None:
        self.kept = kept
        super().__init__(kept)


@contextmanager
def library_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn any exception of a library into a QuantkitError: `tokenizers` raises bare Exceptions, and
    its panics are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise QuantkitError(f"{problem}: {error}", remedy) from error


def _one_line(text: str) -> str:
    """Text of files or servers in a message: without line breaks and control characters, and of
    limited length."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )
