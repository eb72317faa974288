r"""Answers that may be any mathematics or a few words (MATH-500): a gold in LaTeX, an answer in LaTeX, and whether they say the same.

A gold that is a plain number is left to the number reader. Else the two are compared as text without typesetting, and then by math-verify.
"""

import re
from fractions import Fraction

from quantkit.evaluation.grading.answers import LONGEST as LONGEST_TEXT
from quantkit.evaluation.grading.answers import Extraction, last_box, last_statement
from quantkit.evaluation.grading.choices import read_choice
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, normalize, plain
from quantkit.evaluation.grading.values import read_value

_SHORT = 40  # characters of a reply that is nothing but its answer
LONGEST = 500  # characters of an answer that math-verify is asked about

_ABOUT = r"\\approx(?![a-z])|≈"
_OR = re.compile(r"(?i)\\text\s*\{\s*or\s*\}|\bor\b|\\pm|\\mp")
_AND = re.compile(r"(?i)(?:,\s*)?(?:\\text\s*\{\s*(?:,\s*)?and\s*\}|\band\b)")
_LABEL = re.compile(r"^[A-Za-z](?:_\{?\w+\}?|\([a-z]\))?\s*(?:=|\\in(?![a-z]))|^(?:\\text\s*\{[^{}]*\}|\\?angle\s*[A-Z]+|[A-Z]{1,3})\s*=")
_BASE = re.compile(r"^\d+\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\w+)\s*\}*$")
_INTRODUCTION = re.compile(r"(?i)^(?:(?:therefore|thus|hence|then|simply|clearly|equal to|given by|exactly|the|:)\s+)+")


def find_expression(text: str) -> Extraction:
    """The last box, else what the last sentence that states the answer says, as written."""
    text = normalize(text[-LONGEST_TEXT:])
    box = last_box(text)
    if box.open_box or box.found is not None:
        return box
    said = last_statement(text)
    if said is None and 0 < len(text.strip()) <= _SHORT and "\n" not in text.strip():
        return Extraction(text.strip(), "last")
    return Extraction(_expression_of(said), "phrase") if said is not None else Extraction(None)


def _expression_of(sentence: str) -> str:
    """The first piece of mathematics in a sentence, or the sentence up to its end."""
    sentence = _INTRODUCTION.sub("", sentence.strip())
    mathematics = re.match(r"[^$\\]{0,40}?(?:\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\])", sentence)
    if mathematics is not None and not re.search(r"(?i)\bnot\b|n't", sentence[: mathematics.start(mathematics.lastindex or 0)]):
        return next(part for part in mathematics.groups() if part)
    return re.split(r"\.(?:\s|$)|[。;]", sentence)[0]


def same_text(gold: str, answer: str) -> bool:
    """Whether the two are the same characters without typesetting, blanks, and the case of words."""
    return _normal(gold) == _normal(answer) != ""


def _normal(text: str) -> str:
    shown = plain(text.strip().strip("$")).replace(TEXT, "").replace(END_TEXT, "").rstrip(".")
    shown = re.sub(r"(?i)^\s*(?:an?|the)\s+(?=[a-z]{3})", "", shown)
    return re.sub(r"\s+", "", shown).lower()


def comparable(gold: str, answer: str) -> str | None:
    """The answer as math-verify shall see it, or None where it cannot be the gold: too long, or several where one is asked for."""
    answer = answer.strip().strip("$").strip().rstrip(".")
    answer = answer if re.search(_ABOUT, gold) else re.split(_ABOUT, answer)[0].strip() or answer
    if len(answer) > LONGEST or (_OR.search(answer) and not (_OR.search(gold) or "," in gold)):
        return None
    answer = _as_interval(answer) if _brackets(gold) else answer
    if not re.search(r"[=∈]|\\in(?![a-z])", gold):
        answer = _LABEL.sub("", answer).strip()
    if (ours := _brackets(answer)) and (asked := _brackets(gold)) and ours != asked:
        return None
    bases = [_BASE.search(text.strip().strip("$")) for text in (gold, answer)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return None
    answer = re.sub(r"(?<=[\d})])\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", "", answer) if "text" not in gold else answer
    if re.fullmatch(r"[A-Za-z\s\\{}']*", _normal(gold)) and "\\" not in _normal(gold):
        return None if len(_normal(gold)) > 1 else answer
    return _AND.sub(",", answer)


_INEQUALITY = re.compile(r"([^<>≤≥=]+?)\s*([<≤])\s*[a-z]\s*([<≤])\s*([^<>≤≥=]+)")


def _as_interval(answer: str) -> str:
    r"""0 < x \le 5 as (0, 5]; anything else as it is."""
    match = _INEQUALITY.fullmatch(re.sub(r"\\leq?(?:slant)?(?![a-z])", "≤", answer))
    if match is None:
        return answer
    return f"{'(' if match[2] == '<' else '['}{match[1]}, {match[4]}{')' if match[3] == '<' else ']'}"


def _brackets(text: str) -> str:
    """What a pair or an interval begins and ends with, such as `[)`: [2, 5) is not (2, 5), and a point is not an interval."""
    found = re.fullmatch(r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])", re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip())
    return found[1] + found[2] if found else ""


def same_short(gold: str, said: str) -> bool:
    """Whether `said` names the gold of a short answer: `(C)` in any dress, a number, or the same words."""
    said = _INTRODUCTION.sub("", said).strip().strip("\"'").rstrip(".")
    letter = re.fullmatch(r"\(([A-Z])\)", gold)
    if letter is not None:
        return read_choice(said, [f"option {number}" for number in range(26)]) == letter[1]
    number = read_value(gold)
    if isinstance(number, Fraction):
        return read_value(said) == number
    return _normal(gold) == _normal(said)
