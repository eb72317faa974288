"""Grade a reply: strip the reasoning, then apply the task's grader to the rest."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading import (
    answers,
    expressions,
    instructions,
    math_equal,
    programs,
    reasoning,
)
from quantkit.evaluation.grading.answers import Extraction, last_box
from quantkit.evaluation.grading.calls import floats_for_integers, read_calls, same_calls
from quantkit.evaluation.grading.choices import LETTERS, NOTHING, find_choice
from quantkit.evaluation.grading.numbers import canonical, numbers, read_value
from quantkit.evaluation.grading.typesetting import plain
from quantkit.evaluation.tasks.definitions import Grade, Problem

Read = Callable[[Problem, str, bool], Grade]


@dataclass(frozen=True)
class Grader:
    """`gold` reads the right answer from a row's fields; `read` grades the text after the reasoning
    (second argument: was it cut short?).

    `votes`: answers can be compared, so a majority over repeats means something. `runs_code`: needs
    consent. `judged`: a model grades, which --judge names.
    """

    gold: Callable[[JsonObject], str]
    read: Read
    votes: bool = True
    runs_code: bool = False
    judged: bool = False


_ENDED = {
    "context": "context",
    "content_filter": "filtered",
}  # finish reasons that leave no answer to read


def grade(
    grader: Grader,
    problem: Problem,
    completion: ModelReply,
    thinking_expected: bool,
) -> Grade:
    if completion.error is not None:
        return Grade("error", detail=completion.error)
    if completion.finish_reason in _ENDED:
        return Grade(
            _ENDED[completion.finish_reason],
            detail=completion.refusal or "",
            measures=_nothing(grader, problem),
        )
    answer = reasoning.answer_of(completion, thinking_expected)
    if answer is None:
        return Grade("unfinished", measures=_nothing(grader, problem))
    return grader.read(problem, answer, completion.finish_reason == "length")


def _nothing(grader: Grader, problem: Problem) -> dict[str, tuple[int, int]]:
    """The measures of a reply without an answer."""
    return grader.read(problem, "", False).measures


def _answer_field(fields: JsonObject) -> str:
    return str(fields["answer"]).strip()


def _number_gold(fields: JsonObject) -> str:
    """The value after `####`, or inside a box, or the field itself."""
    text = str(fields["answer"]).rpartition("####")[2].strip()
    text = last_box(text).text or text
    if text.lower() in ("", "nan", "none", "null"):
        raise QuantkitError(
            f"the right answer {fields['answer']!r} is none, and every reply would be wrong",
            "mend the row, or leave it out",
        )
    number = read_value(text)
    return canonical(number) if isinstance(number, Fraction) else text


def _integer_gold(fields: JsonObject) -> str:
    gold = _number_gold(fields)
    if not re.fullmatch(r"-?\d+", gold):
        raise QuantkitError(
            f"the right answer {fields['answer']!r} is not an integer", "use grader: number"
        )
    return gold


# ------------------------------------------------------------------------------------- one answer

Outcome = tuple[bool | str, str | None]
"""Whether an answer is right, or another reason; and the answer as it is shown and votes."""


def _one_answer(
    find: Callable[[Problem, str], Extraction], compare: Callable[[Problem, Extraction], Outcome]
) -> Read:
    """Grades replies that state one answer."""

    def read(problem: Problem, text: str, cut: bool) -> Grade:
        found = find(problem, text)
        is_asked = found.found == "asked"
        # Of a reply that was cut only a complete box counts: its last number may be any of the
        # reasoning's.
        if found.open_box or (cut and not is_asked):
            return Grade("truncated")
        if found.text is None:
            return Grade("no-answer", detail="" if text.strip() else "empty reply")
        outcome, answer = compare(problem, found)
        if isinstance(outcome, str):
            return Grade(outcome, answer)
        return Grade(("right" if outcome else "wrong") + ("" if is_asked else "-loose"), answer)

    return read


def _plain_verdict(correct: bool, answer: str | None) -> Grade:
    return Grade("right" if correct else "wrong", answer)


def _nothing_said(cut: bool) -> Grade:
    return Grade("truncated" if cut else "no-answer")


def _compare_integer(problem: Problem, found: Extraction) -> Outcome:
    value = found.value
    if value is None or (
        isinstance(value, Fraction) and (value.denominator != 1 or _is_percent(found.text))
    ):
        return "not-integer", found.text
    return _compare_number(problem, found)


def _is_percent(text: str | None) -> bool:
    return any(number.percent for number in numbers(plain(text or "")))


def _compare_number(problem: Problem, found: Extraction) -> Outcome:
    value = found.value
    if not isinstance(value, Fraction):
        return _by_math(problem, found, value)
    gold = read_value(problem.gold)
    is_share = isinstance(gold, Fraction) and gold.denominator != 1 and _is_percent(found.text)
    correct = value == gold or (is_share and value == 100 * Fraction(gold or 0))
    return correct, problem.gold if is_share else canonical(value)


def _by_math(problem: Problem, found: Extraction, answer: str | None) -> Outcome:
    """answer: LaTeX; None where it cannot be right."""
    equal = math_equal.equal(problem.gold, answer) if answer else False
    if equal is None:
        return "ungradable", found.text
    return equal, problem.gold if equal else found.text


def _is_number(problem: Problem) -> bool:
    return isinstance(read_value(problem.gold), Fraction) and "text" not in problem.gold


def _find_expression(problem: Problem, text: str) -> Extraction:
    find = answers.find_number if _is_number(problem) else expressions.find_expression
    return find(text)


def _compare_expression(problem: Problem, found: Extraction) -> Outcome:
    """MATH-500: a gold that is a number is read as one; any other is compared as text and by
    math-verify."""
    if _is_number(problem):
        return _compare_number(problem, found)
    assert found.text is not None
    if expressions.same_text(problem.gold, found.text):
        return True, problem.gold
    return _by_math(problem, found, expressions.comparison_form(problem.gold, found.text))


def _choice_gold(fields: JsonObject) -> str:
    """The letter of the right option; MMLU gives its index from 0."""
    answer = str(fields["answer"]).strip().upper()
    letters = LETTERS[: len(fields["options"])]
    letter = letters[int(answer)] if answer.isdecimal() and int(answer) < len(letters) else answer
    if letter not in letters or len(letter) != 1:
        raise QuantkitError(
            f"the right answer {fields['answer']!r} is none of {len(letters)} options",
            "look at the data file",
        )
    return letter


def _find_choice(problem: Problem, text: str) -> Extraction:
    return find_choice(text, [str(option) for option in problem.fields["options"]])


def _compare_choice(problem: Problem, found: Extraction) -> Outcome:
    return found.text == problem.gold, None if found.text == NOTHING else found.text


def _find_short(problem: Problem, text: str) -> Extraction:
    """BIG-Bench Hard: an option's letter in brackets, a number, or a few words, stated as its
    prompts ask for it; else the last line."""
    found = expressions.find_expression(text)
    if found.text is None and not found.open_box and text.strip():
        return Extraction(text.strip().split("\n")[-1], "last")
    return replace(found, found="asked") if found.found == "phrase" else found


def _compare_short(problem: Problem, found: Extraction) -> Outcome:
    return expressions.same_short(problem.gold, found.text or ""), found.text


# ------------------------------------------------------------------------------------- other kinds


def _read_retrieval(problem: Problem, text: str, cut: bool) -> Grade:
    """The asked-for number is in the reply, and no other of its length."""
    named = set(re.findall(rf"(?<!\d)\d{{{len(problem.gold)}}}(?!\d)", text))
    if not named:
        return _nothing_said(cut)
    return _plain_verdict(named == {problem.gold}, ", ".join(sorted(named)))


def _read_instructions(problem: Problem, text: str, cut: bool) -> Grade:
    """IFEval: right if every instruction is followed, strictly; the loose reading and the single
    instructions are measures in addition."""
    ids = problem.fields["instructions"]
    given = [
        {name: value for name, value in one.items() if value is not None}
        for one in problem.fields["parameters"]
    ]
    measures, strict = {}, list[bool]()
    for name in ("loose", "strict"):
        strict = instructions.check_instructions(text, ids, given, loose=name == "loose")
        measures[f"prompt_{name}"] = (int(all(strict)), 1)
        measures[f"instruction_{name}"] = (sum(strict), len(ids))
    missed = ", ".join(name for name, follows in zip(ids, strict) if not follows)
    reason = "right" if all(strict) else "wrong" if text.strip() else "no-answer"
    detail = f"not followed: {missed}" if missed else ""
    return Grade(reason, detail=detail, measures=measures)


def _read_gsm8k_filters(problem: Problem, text: str, cut: bool) -> Grade:
    """lm-evaluation-harness' two filters for gsm8k: the first `#### N`, and the last thing that
    looks like a number; compared as text."""
    gold = _as_lm_eval_compares(str(problem.fields["answer"]))
    strict = re.search(r"#### (\-?[0-9\.\,]+)", text)
    loose = [first or second for first, second in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    if strict is not None and _as_lm_eval_compares(strict[1]) == gold:
        loose_right = bool(loose) and _as_lm_eval_compares(loose[-1]) == gold
        reason = "right" if loose_right else "wrong-loose"
        return Grade(reason, strict[1], strictly_right=True)
    if not loose:
        return _nothing_said(cut)
    correct = _as_lm_eval_compares(loose[-1]) == gold
    return Grade("right-loose" if correct else "wrong-loose", loose[-1])


def _read_last_number(problem: Problem, text: str, cut: bool) -> Grade:
    """evalscope 1.0.1's grader of gsm8k: the last thing that looks like a number, compared as
    text with the row's answer."""
    found = [first or second for first, second in re.findall(r"(-?[0-9.,]{2,})|(-?[0-9]+)", text)]
    if not found:
        return _nothing_said(cut)
    answer = found[-1].replace(",", "").strip().strip(".")
    gold = str(problem.fields["answer"]).rpartition("####")[2].strip()
    return _plain_verdict(answer == gold, answer)


def _as_lm_eval_compares(text: str) -> str:
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.strip().lower()


def _read_calls(problem: Problem, text: str, cut: bool) -> Grade:
    calls = read_calls(text)
    possible = problem.fields["ground_truth"] or []
    if calls is None and (possible or not text.strip()):
        return _nothing_said(cut)
    shown = json.dumps(calls, default=str) if calls is not None else None
    untyped = floats_for_integers(calls or [], problem.fields["functions"])
    return _plain_verdict(same_calls(calls or [], possible) and not untyped, shown)


_JUDGED = """\
Compare an answer to a question with the answer that is known to be right.

Question: {question}
Right answer: {gold}
Given answer: {answer}

Reply with one letter. A: the given answer contains the right answer and contradicts it nowhere; \
case, word order, spelling of names and further true facts do not matter, and a number must agree to \
its last digit. B: it contradicts the right answer, even with reservations. C: it neither contains \
nor contradicts it."""


def judged_by(ask: Callable[[str], str]) -> Grader:
    """SimpleQA: a model, from prompt to reply, says whether the answer is right, wrong, or not
    attempted."""

    def read(problem: Problem, text: str, cut: bool) -> Grade:
        if not text.strip():
            return Grade("truncated" if cut else "no-answer", detail="empty reply")
        question = problem.fields["problem"]
        said = ask(_JUDGED.format(question=question, gold=problem.gold, answer=text))
        answer = reasoning.answer_of(ModelReply(0, said), False) or ""
        letter = re.search(r"\b[ABC]\b", answer)
        if letter is None:
            return Grade("error", detail=f"the judge replied {said[:100]!r}")
        reason = {"A": "right", "B": "wrong", "C": "no-answer"}[letter[0]]
        return Grade(reason, text.strip()[:200])

    return Grader(_answer_field, read, votes=False, judged=True)


def _nobody(text: str) -> str:
    raise QuantkitError("no model judges", "name its server with --judge")


def _program(passes: str, graded: Callable[[Problem, str], Grade]) -> Grader:
    return Grader(
        lambda fields: f"passes {passes.format_map(fields)}",
        lambda problem, text, cut: graded(problem, text),
        votes=False,
        runs_code=True,
    )


GRADERS: dict[str, Grader] = {
    "integer": Grader(
        _integer_gold,
        _one_answer(lambda problem, text: answers.find_number(text, False), _compare_integer),
    ),
    "number": Grader(
        _number_gold, _one_answer(lambda problem, text: answers.find_number(text), _compare_number)
    ),
    "expression": Grader(_answer_field, _one_answer(_find_expression, _compare_expression)),
    "choice": Grader(_choice_gold, _one_answer(_find_choice, _compare_choice)),
    "short": Grader(_answer_field, _one_answer(_find_short, _compare_short)),
    "instructions": Grader(instructions.check_row, _read_instructions, votes=False),
    "retrieval": Grader(_answer_field, _read_retrieval),
    "gsm8k-filters": Grader(_number_gold, _read_gsm8k_filters),
    "last-number": Grader(_number_gold, _read_last_number),
    "python-tests": _program("the tests of {entry_point}", programs.grade_with_tests),
    "asserts": _program("its assertions", programs.grade_with_asserts),
    "calls": Grader(lambda fields: json.dumps(fields["ground_truth"] or []), _read_calls),
    "judged": judged_by(_nobody),
    "contest-tests": _program("every public and private test", programs.grade_contest),
}


def find_grader(name: str) -> Grader:
    if name not in GRADERS:
        raise QuantkitError(f"grader {name!r} is not known", f"choose one of {', '.join(GRADERS)}")
    return GRADERS[name]
