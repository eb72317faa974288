"""Select the number of a sentence that answers the question.

Of a sentence with several numbers (`Tom is 5 now, and in 10 years he will be 15`) the question says
which one is meant. Every number gets points for what the question asks (its unit, the words around
it) and loses some for being a circumstance: what the question itself gives, what a preposition
governs, what an `if` or `after` says. The right answer is not known here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quantkit.evaluation.grading.clauses import (
    CONCLUDES,
    CONDITIONS,
    SPOKEN,
    TAKES,
    Number,
    clauses_of,
    numbers_of,
)
from quantkit.evaluation.grading.question import NEGATED, QuestionTarget, read_question, stem, stems
from quantkit.evaluation.grading.units import SIGNS

_UNSURE = re.compile(
    r"(?i)\b(?:or|maybe|perhaps|possibly|might|either|neither|depending|otherwise|unless|no|cannot|wait|hmm|nor|suppose|assume|assuming"
    r"|between|about|approximately|exceed\w*|at\s+(?:least|most)|(?<!add )(?<!adds )(?<!adding "
    r")(?<!sum )(?<!sums )up\s+to|wrong"
    rf"|fail(?:s|ed)?|incorrect)\b|\bnot\s+[$]?-?\d|[?≈<>≤≥≠±≡]|(?:\d|(?<![a-z]){SPOKEN})\s*\(\s*\d"
)
_BOUND = re.compile(
    r"(?i)\s+(?:up\s+to|at\s+most|less\s+than|not\s+exceeding|below)\s+(?P<number>\d[\d,]*)(?!\d|\.\d)"
)
_CONDITION, _CONCLUSION = (re.compile(rf"(?i)^[\s,;]*{words}") for words in (CONDITIONS, CONCLUDES))
_REASON = re.compile(r"(?i)^[\s,;]*(?:because|since|as)\b")
_LABEL = re.compile(r"(?<![\w+*/-])(?<![+*/-]\s)(?P<label>[A-Za-z])\s*=\s*$")
_GOVERNED = re.compile(
    r"(?i)\b(?:in|for|at|of|with|within|during|by|every|each|per|the|those|these|all|only\s+from|from|out\s+of|on|original|instead\s+of|his|her|their"
    r"|its|another|to|to\s+(?!(?:get|obtain|give|make|have|find)\b)[a-z]+|selling|buying|other)\s+$"
)
_NAMED = re.compile(r"([A-Za-z]{2,})(?:\s*[:=]|\s+(?:is|of|was|are))?\s+$")  # has area 42
_DONE = {
    "pay",
    "earn",
    "sell",
    "buy",
    "give",
    "eat",
    "drive",
    "run",
    "save",
}  # verbs, which name no number
_AMOUNT_OF = re.compile(r"(?i)(?P<noun>[a-z]+)\s+of\s+$")
_PART_OF = re.compile(r"\s+of\s+(?:(?:the|its|these|those|all|his|her|their)\s+)*\d")
_PRONOUN = re.compile(
    r"(?i)^\W*(?:(?:and|so|now|later|in\s+\d+\s+\w+)\W+)*(?:she|he|it|they|this|that|who|which|we|i)\b"
)
_NOW, _FIRST = (
    re.compile(rf"(?i)\b(?:{words})\b")
    for words in (
        r"now|currently|presently|today",
        r"originally|initially|at\s+first|first|started|began|used\s+to",
    )
)
_IS_RATE = re.compile(
    r"(?i)\s+(?:[a-z]+\s+){0,2}?(?:per|an?|each|every)\s+[a-z]+|\s*[a-z]+/[a-z]|\s*(?:mph|kmh)\b"
)


@dataclass
class _Tally:
    """What speaks for a number of a sentence: all `points`, and how many of them are the question's
    `words`, or its `kind`.

    `is_concluded`: it is computed there, or follows a word like `so`. `is_given`: by the
    question.
    """

    points: int
    words: int
    kind: int
    is_concluded: bool
    is_given: bool

    @property
    def evidence(self) -> int:
        return self.words + max(self.kind, 0)


def _is_governed(number: Number, target: QuestionTarget) -> bool:
    """Whether a preposition makes the number a circumstance: in 8 hours, at $30; not of what is
    asked for: an income of $1250."""
    amount = _AMOUNT_OF.search(number.before)
    if amount is not None and stem(amount["noun"]) in (target.words - set(target.counted)) | {
        "total",
        "averag",
        "earn",
    }:
        return False
    if (
        _PART_OF.match(number.sentence, number.end)
        or number.is_result
        or TAKES.search(number.before)
    ):
        return False
    if target.when or (target.kind == "/" and _IS_RATE.match(number.sentence, number.end)):
        return False
    return _GOVERNED.search(number.before) is not None


def _tallies(sentence: str, target: QuestionTarget) -> dict[Fraction, _Tally]:
    """Evidence for each number of a sentence that is not part of a calculation.

    Words of a clause without a number of its own (`In 10 years, ...`) count for the next ones; so
    do those that a pronoun takes up.
    """
    found: dict[Fraction, _Tally] = {}
    matched, waiting, nouns = frozenset[str](), frozenset[str](), list[str]()
    stated = numbers_of(sentence)
    for start, end in clauses_of(sentence, stated):
        clause = sentence[start:end]
        numbers = [number for number in stated if start <= number.start < end]
        is_condition = _CONDITION.match(clause) is not None and not target.when
        own = stems(clause) & target.words
        if all(number.is_operand or _is_governed(number, target) for number in numbers):
            is_new = numbers or clause.startswith((";", "\n"))
            waiting = waiting if numbers and is_condition else own if is_new else waiting | own
            here = own
        else:
            here = matched = own | waiting | (matched if _PRONOUN.match(clause) else frozenset())
        for number in numbers:
            if (
                number.is_operand
                or number.is_another(start, target.compares)
                or stem(sentence[number.start : number.end]) in target.words
            ):
                continue  # the last: all four of these
            nouns = [stem(word) for word in number.counted] or nouns
            tally = _tally(number, clause, here, nouns, target)
            if number.value not in found or found[number.value].points < tally.points:
                found[number.value] = tally
    return found


def _tally(
    number: Number, clause: str, here: frozenset[str], nouns: list[str], target: QuestionTarget
) -> _Tally:
    """What speaks for a number: `here`, the question's words around it; `nouns`, what it or the
    number before it counts."""
    implied_by_kind = {
        noun
        for noun in target.counted
        if number.counted and (noun in nouns or noun == target.counted[-1])
    }
    words = (
        min(len(here - implied_by_kind), 3)
        + len(here & {"total", "left"})
        + bool(here & target.circumstances)
    )
    kind = _of_kind(number, nouns, target)
    is_given = number.value in target.given and not number.is_result
    is_of_the_rest = "left" in stems(clause) - target.words
    is_concluded = not is_given and not is_of_the_rest and _CONCLUSION.match(clause) is not None
    points = (
        words
        + kind
        + _context_points(clause, target)
        + _own_points(number, target)
        - (is_given and not here & target.circumstances)
        + 2 * is_concluded
    )
    if (
        _CONDITION.match(clause)
        and not target.when
        and not (number.is_result and not _REASON.match(clause))
    ):
        points -= 2
    return _Tally(points, words, kind, is_concluded or number.is_result, is_given)


def _context_points(clause: str, target: QuestionTarget) -> int:
    """Points for a clause's numbers independent of the question's words: another time, a
    negation."""
    points = -(
        (target.another_time and _NOW.search(clause) is not None)
        or (_FIRST.search(clause) is not None and "first" not in target.literal_words)
    )
    points -= 2 * ("left" in stems(clause) - target.words)
    return points - 2 * ((NEGATED.search(clause) is not None) != target.denied)


def _of_kind(number: Number, nouns: list[str], target: QuestionTarget) -> int:
    """Whether the number counts what the question counts; without a noun it counts the same as the
    number before it."""
    after_number = number.sentence[number.end :]
    written = number.sentence[number.start : number.end]
    is_money = re.search(rf"[{SIGNS}]", written) is not None or not {"dollar", "cent"}.isdisjoint(
        nouns
    )
    is_share = "%" in written or "percent" in written
    if target.kind in ("$", "%"):
        of_kind = is_share if target.kind == "%" else is_money
        return 2 if of_kind else -2 if nouns or is_money or is_share else 0
    if is_money or is_share:
        return -2
    points = int(target.kind == "/" and _IS_RATE.match(after_number) is not None)
    if target.counted and nouns:
        points += (2 if target.counted[-1] in nouns else -1) + len(
            set(target.counted[:-1]) & set(nouns)
        )
    return points


def _own_points(number: Number, target: QuestionTarget) -> int:
    """Whether the number is computed, governed by a preposition, or the value of a letter."""
    points = (
        int(number.is_result)
        - 2 * _is_governed(number, target)
        + (TAKES.search(number.before) is not None)
    )
    named = _NAMED.search(number.before)
    points += named is not None and stem(named[1]) in target.words - _DONE - set(target.counted)
    label = _LABEL.search(number.before)
    if label is not None:
        points += 1 if target.words == {label["label"].lower()} else -2
    return points


MARGIN = 2
LONGEST = 600
"""Characters of a sentence that is looked at."""


def find_better_number(
    sentences: Sequence[str], question: str, said: Fraction | None
) -> Fraction | None:
    """The number that answers the question clearly better than `said`, which the grammar of the
    last sentence says; None where none does.

    It is in the last sentence, or in the lines of the list that ends there, or in the sentence
    before where the last one has nothing of what is asked. What is unsure, denies or compares is
    left to its grammar.
    """
    target = read_question(question)
    if target is None or not sentences:
        return None
    listed = next(
        (n for n, line in enumerate(reversed(sentences)) if not _ITEM.match(line)), len(sentences)
    )
    last = _weigh("; ".join(sentences[-max(listed, 1) :]), target)
    if last is None:
        return None
    if (said is None or said in target.given) and not any(
        tally.evidence for tally in last.values()
    ):
        new = [
            value
            for value, tally in last.items()
            if not tally.is_given
            and tally.points > -MARGIN
            and (said is not None or tally.is_concluded)
        ]
        return new[0] if len(new) == 1 else None
    is_afterthought = (
        listed < 2
        and len(sentences) > 1
        and not re.search(rf"(?i)=|\b{CONCLUDES}|\bnow\b", sentences[-1])
    )
    before = _weigh(sentences[-2], target) if is_afterthought else None
    if before and not any(
        tally.words or (tally.kind > 0 and target.counted) for tally in last.values()
    ):
        first = _first(before, None)
        return (
            first
            if first is not None and before[first].words and before[first].evidence > MARGIN
            else None
        )
    if (
        said is not None and said not in last and said not in target.given
    ):  # grammar has read more than a number
        return None
    return _first(last, said)


_ITEM = re.compile(r"[^\d:]{1,40}:[^\d:]{0,3}\d[^:]{0,40}$")


def _weigh(sentence: str, target: QuestionTarget) -> dict[Fraction, _Tally] | None:
    """Evidence for the numbers of a sentence; None where it is too long or unsure."""
    sentence = _BOUND.sub(
        lambda match: (
            "" if Fraction(match["number"].replace(",", "")) in target.given else match[0]
        ),
        sentence,
    )
    if len(sentence) > LONGEST or any(
        match[0].lower() not in target.literal_words for match in _UNSURE.finditer(sentence)
    ):
        return None
    return _tallies(sentence, target)


def _first(tallies: dict[Fraction, _Tally], said: Fraction | None) -> Fraction | None:
    """The number that leads, alone, and by the margin: before `said` or, where nothing is said,
    before all others."""
    if not tallies:
        return None
    first, *others = sorted(tallies, key=lambda value: -tallies[value].points)
    best, runner_up = tallies[first], tallies[others[0]].points if others else -2 * MARGIN
    before = tallies.get(said) if said is not None else None
    is_concluded = (
        before is not None and before.is_concluded and before.kind > -2
    )  # else it is of another kind
    is_firm = (
        before is not None
        and not before.is_given
        and (is_concluded or best.evidence <= before.evidence)
    )
    margin = MARGIN if is_firm else 1
    leads = (
        best.points > runner_up and best.points >= (before.points if before else runner_up) + margin
    )
    return first if leads and best.evidence and first != said else None
