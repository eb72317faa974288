"""Clauses and numbers of a sentence: the grammatical role of each number, independent of the
question."""

import re
from dataclasses import dataclass
from fractions import Fraction

from quantkit.evaluation.grading.quantities import begin_quantity
from quantkit.evaluation.grading.units import SIGNS, is_unit
from quantkit.evaluation.grading.values import CHANGES

ONES = "one|two|three|four|five|six|seven|eight|nine"
BELOW_TWENTY = rf"{ONES}|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
SPOKEN = rf"(?:{BELOW_TWENTY}|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:[- ](?:{ONES}))?)"
"""A number in English words."""
_NUMBER = re.compile(
    rf"(?<![A-Za-z\d.,^{{_])(?:(?<![\d)%]\s)(?<![\d)%])-(?=[{SIGNS}.\d]))?[{SIGNS}]?\s?"
    r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d[\d.,]*\d|/\d)?(?!\d)(?<!,)"
    rf"|(?<![\w-])(?i:{SPOKEN}(?:\s+(?:dozen|hundred|thousand|million))?|(?:a|half "
    r"a)\s+dozen)(?![\w-])"
    r"(?!\s+(?:of\s+(?:the|them|these|which)|by|another)\b)"
)


CONCLUDES = (
    r"(?:so|thus|hence|therefore|leaving|making|giving|totall?ing|for(?=\s+a\b|\s+[$]\d)|(?:which|that)\s+(?:is|leaves|makes|gives|means|brings|comes)"
    r"|(?:with|for|,)?\s*a\s+(?:grand\s+)?total\s+of)\b"
)
CONDITIONS = (
    r"(?:because|since|when|after|before|if|as|given|once|although|though|where|with(?!\s+an?\s)|attained|achieved|instead\s+of"
    r"|rather\s+than|of\s+(?:which|whom))\b"
)
_BOUNDARY = re.compile(
    rf"(?i)[;:—\n。、]|\((?=[^\d)]*[a-z]{{2}})|,(?!\d{{3}}(?!\d))|(?<=\w)\.\s|(?<![\w-])(?:{CONCLUDES}|{CONDITIONS}|(?:and|which|but|then|while|whereas)\b)"
    r"|(?<=\w)\s(?=(?:he|she|they|it|we)\s+(?!an?\b))"
)
_OPERATOR_BEHIND = re.compile(
    r"%?(?:\s+(?!(?:and|while|with|so|then|is|are)\b)[A-Za-z'/]+){0,6}?(?:\s*\([^()]*\)|\))?"
    r"(?:\s*(?:[-+*×·÷=^](?!\s*[A-Za-z]{3})|/(?!\s*[A-Za-z])|x(?=\s*[$\d]))"
    r"|\s+(?:times(?=\s+(?:[$\d]|[a-z]+\s+(?:is|equals|makes)\b))|divided|multiplied|minus|plus)\b)"
)
_OPERATOR_BEFORE = re.compile(
    r"(?:\d\(|[+*/×·÷]|[\w)]\s*-|\d\s*x|\b(?:times|divided\s+by|multiplied\s+by|minus|plus))\s*[($]*$"
)
_RESULT = re.compile(
    r"\d(?:[\w\s%.,$)]|/(?=[a-z])){0,40}?(?:[-+*/×·÷]|\bx|%\s+of|(?<=\d)\()\s?[$(]*\.?\d(?:(?!\b(?:while|with|where|so|then)\b)[^=;])*=\s*$"
)
_COMPARED = re.compile(
    r"\s+(?:[a-z]+\s+){0,2}?(?:more|fewer|less|[a-z]{3,}er)\s+(?:[a-z]+\s+){0,2}?than\b"
)
_ATTACHED = re.compile(
    r"[^\W\d_]+|[²³!^√]|\s+(?:squared|cubed|factorial)\b|(?P<factor>\s+times\s+(?:as|the|more)\b)"
)
_JOINS = re.compile(r"(?i)^[\s,;]*(?:and|but|or)\b|\b(?:all\s+but|other|more\s+than)\b")
# What takes its object after a preposition: is left with 6, adds up to 12, drops by 50 to 350,
# works out at 45.
TAKES = re.compile(
    r"(?i)\b(?:(?:left|leav(?:es|ing)|end(?:s|ed|ing)?\s+up)(?:\s+[a-z]+)?\s+with|(?:add|sum|amount|come|total|lead|rise|rose|drop|fall|fell"
    r"|increase|decrease|reduce|grow|grew|go|goes|went|down)(?:s|ed|es|ped)?(?:\s+[a-z]+)?(?:\s+(?:from|by)\s+[$]?\d[\d.,]*)?(?:\s+(?:up|down))?\s+to"
    r"|works?\s+out\s+at)\s+$|,\s+for\s+$"
)
# Words that end what is counted: prepositions, verbs, what is said of the whole.
_NO_NOUN = (
    r"(?:of|in|on|at|for|from|and|is|are|was|were|to|per|each|every|a|an|by|with|than|if|that|who|will|it|he|she|they|we|you|has|have|had"
    r"|left|remain\w*|more|[a-z]+ed|own|let|stay|go|went|like|prefer|make|need|wins?|now|then|today|total|altogether|together)\b"
)
_NEXT_WORDS = re.compile(rf"(?:[\s-]+(?!{_NO_NOUN})[^\W\d_]+){{0,4}}")


@dataclass(frozen=True)
class Number:
    """A number of a sentence, where it is, and what counts for it in addition to the words around
    it."""

    sentence: str
    start: int
    end: int
    value: Fraction

    @property
    def before(self) -> str:
        return self.sentence[: self.start]

    @property
    def is_result(self) -> bool:
        """Whether a calculation of numbers comes out at it."""
        return self.before.rstrip().endswith("=") and _RESULT.search(self.before) is not None

    @property
    def is_operand(self) -> bool:
        """Whether it is part of a calculation, not its result."""
        if _OPERATOR_BEHIND.match(self.sentence, self.end):
            return True
        return not self.is_result and _OPERATOR_BEFORE.search(self.before) is not None

    @property
    def counted(self) -> list[str]:
        """The words after it that say what it counts."""
        next_words = _NEXT_WORDS.match(self.sentence, self.end)
        return re.findall(r"[^\W\d_]+", next_words[0]) if next_words is not None else []

    def is_another(self, clause: int, compares: bool) -> bool:
        """Whether the words around it make it another number: half of 12, 12 squared, 12x, 4 times
        as many; `clause`: where it begins.

        Nor is it one that compares (4 years older than), unless that is asked for.
        """
        attached = _ATTACHED.match(self.sentence, self.end)
        if attached is not None and (attached["factor"] or not is_unit(attached[0], letters=True)):
            return True
        if not compares and _COMPARED.match(self.sentence, self.end):
            return True
        return (
            not self.is_result
            and CHANGES.search(_JOINS.sub("", self.sentence[clause : self.start])[-30:]) is not None
        )


def numbers_of(sentence: str) -> list[Number]:
    found: list[Number] = []
    for match in _NUMBER.finditer(sentence):
        start = match.end() - len(match[0].lstrip())
        quantity = begin_quantity(sentence[start:]) if not found or start >= found[-1].end else None
        if quantity is not None:
            found.append(
                Number(sentence, start, max(start + quantity.end, match.end()), quantity.value)
            )
    return found


def clauses_of(sentence: str, numbers: list["Number"]) -> list[tuple[int, int]]:
    """Where clauses begin and end. A pronoun begins one only where a number comes before it: after
    5 days | he spends."""
    starts = [0]
    for match in _BOUNDARY.finditer(sentence):
        if any(number.start < match.start() < number.end for number in numbers) or TAKES.search(
            sentence[: match.end()] + " "
        ):
            continue  # seven and a half; leaving him with 9
        if match[0].strip() or re.search(r"\d", sentence[starts[-1] : match.start()]):
            starts.append(match.start())
    return [(start, end) for start, end in zip(starts, [*starts[1:], len(sentence)]) if end > start]
