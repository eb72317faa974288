"""The one exception users see: what is wrong, and what to do about it."""


class QuantkitError(Exception):
    """A fault in what was asked or given, told in one line.

    `problem` names the thing that is wrong (file, tensor, option); `remedy` says what to do. The command line prints
    both on one line and exits with 1; a traceback is shown with --debug only.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class Interrupted(KeyboardInterrupt):
    """Somebody stopped a run that can go on. `kept` says in words what is kept, and where."""

    def __init__(self, kept: str) -> None:
        self.kept = kept
        super().__init__(kept)
