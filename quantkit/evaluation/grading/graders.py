r"""From a reply to a grade: the reasoning is cut off first, then the task's grader reads what is left.

Answers are read in this order: the last balanced \boxed{} (or `ANSWER: X`), a strict number reader, math-verify on the box content in a
killable process, and only for the flexible score a stated answer or the last number in the text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading import answers, programs, reasoning
from quantkit.evaluation.grading.math_equal import MathJudge
from quantkit.evaluation.tasks.problems import Grade, Problem


@dataclass(frozen=True)
class Grader:
    """`gold` reads the right answer from a row's fields; `read` grades the text after the reasoning (second argument: was it cut short?).

    `votes`: answers can be compared, so a majority over repeats means something. `runs_code`: needs consent.
    """

    gold: Callable[[dict[str, Any]], str]
    read: Callable[[Problem, str, bool, MathJudge], Grade]
    votes: bool = True
    runs_code: bool = False


def grade(grader: Grader, problem: Problem, completion: ModelReply, thinking_expected: bool, judge: MathJudge) -> Grade:
    if completion.error is not None:
        return Grade("error", detail=completion.error)
    reply = reasoning.split(completion, thinking_expected)
    if not reply.finished:
        return Grade("unfinished")
    return grader.read(problem, reply.answer, completion.finish_reason == "length", judge)


def _number_gold(fields: dict[str, Any]) -> str:
    """The value after `####`, or inside a box, or the field itself."""
    text = str(fields["answer"]).rpartition("####")[2].strip()
    box = answers.last_box(text).text
    text = box if box is not None else text
    number = answers.parse_number(text)
    return text if number is None else answers.canonical(number)


def _integer_gold(fields: dict[str, Any]) -> str:
    gold = _number_gold(fields)
    if not re.fullmatch(r"-?\d+", gold):
        raise QuantkitError(f"the right answer {fields['answer']!r} is not an integer", "use grader: number")
    return gold


def _missing(found: answers.Extraction, text: str, cut: bool) -> Grade | None:
    """A reply that the token limit cut counts only with a complete box: its last number may be any number of the reasoning."""
    if found.open_box or (cut and found.found != "asked"):
        return Grade("truncated")
    if found.text is None:
        return Grade("no-answer", detail="" if text.strip() else "empty reply")
    return None


def _verdict(correct: bool, found: answers.Extraction, answer: str | None) -> Grade:
    strict = found.found == "asked"
    reason = ("right" if correct else "wrong") + ("" if strict else "-loose")
    return Grade(reason, correct, correct and strict, answer)


def _read_integer(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    found = answers.find_number(answers.normalize(text))
    if (missing := _missing(found, text, cut)) is not None:
        return missing
    assert found.text is not None
    number = answers.parse_number(found.text)
    if number is None or number != number.to_integral_value():
        return Grade("not-integer", answer=found.text)
    return _verdict(number == Decimal(problem.gold), found, answers.canonical(number))


def _read_number(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    found = answers.find_number(answers.normalize(text))
    if (missing := _missing(found, text, cut)) is not None:
        return missing
    assert found.text is not None
    number, gold = answers.parse_number(found.text), answers.parse_number(problem.gold)
    if number is not None and gold is not None:
        return _verdict(number == gold, found, answers.canonical(number))
    equal = judge.equal(problem.gold, found.text)
    if equal is None:
        return Grade("ungradable", answer=found.text)
    return _verdict(equal, found, problem.gold if equal else found.text)


def _read_choice(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    letters = answers.LETTERS[: len(problem.fields["options"])]
    found = answers.find_choice(text, letters)
    return _missing(found, text, cut) or _verdict(found.text == problem.gold, found, found.text)


def _read_gsm8k_filters(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    """lm-evaluation-harness' two filters for gsm8k: the first `#### N`, and the last thing that looks like a number; compared as text."""
    gold = _as_lm_eval_compares(str(problem.fields["answer"]))
    strict = re.search(r"#### (\-?[0-9\.\,]+)", text)
    loose = [first or second for first, second in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    if strict is not None and _as_lm_eval_compares(strict[1]) == gold:
        loose_right = bool(loose) and _as_lm_eval_compares(loose[-1]) == gold
        return Grade("right" if loose_right else "wrong-loose", loose_right, True, strict[1])
    if not loose:
        return Grade("truncated" if cut else "no-answer")
    correct = _as_lm_eval_compares(loose[-1]) == gold
    return Grade("right-loose" if correct else "wrong-loose", correct, False, loose[-1])


def _as_lm_eval_compares(text: str) -> str:
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.strip().lower()


def _read_tests(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    return programs.grade_with_tests(problem, text)


def _read_contest(problem: Problem, text: str, cut: bool, judge: MathJudge) -> Grade:
    return programs.grade_contest(problem, text)


GRADERS: dict[str, Grader] = {
    "integer": Grader(_integer_gold, _read_integer),
    "number": Grader(_number_gold, _read_number),
    "choice": Grader(lambda fields: str(fields["answer"]).strip().upper(), _read_choice),
    "gsm8k-filters": Grader(_number_gold, _read_gsm8k_filters),
    "python-tests": Grader(lambda fields: f"passes the tests of {fields['entry_point']}", _read_tests, votes=False, runs_code=True),
    "contest-tests": Grader(lambda fields: "passes every public and private test", _read_contest, votes=False, runs_code=True),
}


def find_grader(name: str) -> Grader:
    if name not in GRADERS:
        raise QuantkitError(f"grader {name!r} is not known", f"choose one of {', '.join(GRADERS)}")
    return GRADERS[name]
