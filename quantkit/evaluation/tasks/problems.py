"""A problem as the graders see it, and a grade as everything after them sees it."""

from dataclasses import dataclass, field
from typing import Any

# Reason code -> what it means. The first group counts as right.
RIGHT = {
    "right": "right, stated as asked",
    "right-loose": "right, but found only by the flexible reading",
    "passed": "all tests passed",
}
WRONG = {
    "wrong": "wrong, stated as asked",
    "wrong-loose": "wrong, found by the flexible reading",
    "not-integer": "the answer is not an integer literal",
    "ungradable": "the comparison did not end in time",
    "failed": "a test failed or the program raised",
    "timeout": "the program ran out of time",
    "no-verdict": "the program ended before its tests did",
}
MISSING = {
    "no-answer": "no answer in the reply",
    "no-code": "no program in the reply",
    "truncated": "cut by the token limit before an answer",
    "unfinished": "never left its reasoning",
    "context": "refused: the request did not fit the model's context",
    "filtered": "cut by the server's content filter",
}
EXCLUDED = {
    "error": "the request failed",
    "sandbox-error": "the sandbox failed",
}  # no verdict on the model: not in the score
REASONS = RIGHT | WRONG | MISSING | EXCLUDED


@dataclass(frozen=True)
class Problem:
    """One row of a task with the task's own field names. `gold` is the right answer in one line,
    for people to read."""

    id: str
    fields: dict[str, Any]
    gold: str = ""
    group: str = ""


@dataclass(frozen=True)
class Grade:
    """Verdict on one reply. `correct` is the flexible reading, `strict` wants the answer where the
    prompt asked for it.

    `measures`: other scores of a task by name, as (points, of how many); they are summed over
    replies.
    """

    reason: str
    correct: bool = False
    strict: bool = False
    answer: str | None = None
    detail: str = ""
    measures: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def excluded(self) -> bool:
        return self.reason in EXCLUDED
