"""The one exception users see: what is wrong, and what to do about it."""

_LONGEST = 1000
"""Characters of a problem or a remedy."""


class QuantkitError(Exception):
    """A fault in what was asked or given, told in one line.

    `problem` names the thing that is wrong (file, tensor, option); `remedy` says what to do. The
    command line prints both on one line and exits with 1; a traceback is shown with --debug only.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = _one_line(problem)
        self.remedy = _one_line(remedy)
        super().__init__(f"{self.problem}; {self.remedy}" if remedy else self.problem)


class UsageFault(QuantkitError):
    """An option has a value that is not known, or that what was given beside it cannot meet. The
    command line exits with 2."""


class Interrupted(KeyboardInterrupt):
    """Somebody stopped a run that can go on. `kept` says in words what is kept, and where."""

    def __init__(self, kept: str) -> None:
        self.kept = kept
        super().__init__(kept)


def _one_line(text: str) -> str:
    """Whatever a file or a server put into a message: no line breaks, nothing a terminal would
    obey, and not too long to read."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )
