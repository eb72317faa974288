"""Answers that are arbitrary mathematics or a few words (MATH-500): extraction and comparison with
a LaTeX gold.

A gold that is a plain number is left to the number reader. Else the two are compared as text
without typesetting, and then by math-verify.
"""

import re
from fractions import Fraction

from quantkit.evaluation.grading.answers import last_statement, prepare
from quantkit.evaluation.grading.boxes import Extraction, last_box
from quantkit.evaluation.grading.notation import intervals, latex
from quantkit.evaluation.grading.options import read_choice
from quantkit.evaluation.grading.prose import ASIDE
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain
from quantkit.evaluation.grading.values import read_value

_SHORT = 40  # characters of a reply that is nothing but its answer
LONGEST = 500  # characters of an answer that math-verify is asked about

_ABOUT = r"\\approx(?![a-z])|≈"
_OR = re.compile(r"(?i)\\text\s*\{\s*or\s*\}|\bor\b|\\pm|\\mp")
_AND = re.compile(r"(?i)(?:,\s*)?(?:\\text\s*\{\s*(?:,\s*)?and\s*\}|\band\b)")
# A name in front: anything without a number in it, or one letter with an index or an argument.
_LABEL = re.compile(
    r"^[A-Za-z](?:_\{?\w+\}?|\(\w\))?\s*(?:=|\\in(?![a-z]))|^[^=<>\d]{1,40}=|^(?:\\Pr|[PEV])\s*\([^()]{1,40}\)\s*="
)
# What is measured, after a number with a constant: 12π cm², 3√2 units, 12π 平方厘米.
_UNIT_BEHIND = re.compile(
    r"(?<=[\w})π²])\s*(?:(?<![A-Za-z])(?:(?:square|cubic|sq\.?|cu\.?)\s+)?(?:[kcm]?m|in|ft|yd|mi|units?|inch(?:es)?|f(?:ee|oo)t|yards?|miles?"
    r"|(?:centi|milli|kilo)?met(?:er|re)s?|radians?|rad|degrees?|seconds?|hours?|minutes?)(?:\s*(?:\^\s*\{?[23]\}?|[²³]|squared|cubed))?"
    r"|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+)\s*$"
)
_IN_DEGREES = re.compile(r"=\s*[\d.]+\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)$")
_BASE = re.compile(r"^(\d+)\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\w+)\s*\}*$")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_INTRODUCTION = re.compile(
    r"(?i)^(?:(?:therefore|thus|hence|then|simply|clearly|equal to|given by|exactly|the|:)\s+)+"
)


def find_expression(text: str) -> Extraction:
    """The last box, several of them where they are enumerated, else what the last sentence that
    states the answer says, as written; else what the last sentence says of its subject."""
    text = prepare(text)
    box = last_box(text)
    if box.open_box or box.found is not None:
        return Extraction(box.listed, "asked") if box.listed else box
    said = last_statement(text)
    if said is not None:
        return Extraction(_expression_of(said), "phrase")
    said = _conclusion(text)
    if said is None and 0 < len(text.strip()) <= _SHORT and "\n" not in text.strip():
        said = text.strip()
    return Extraction(said, "last") if said is not None else Extraction(None)


_ENDING = 2000  # characters at the end of a text that states no answer
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_HELD = "\x04(\\d+)\x04"  # a piece of mathematics while its sentence is read
_ENUMERATED = re.compile(rf"{_HELD}(?:\s*(?:,|,?\s*and|,?\s*or)\s*{_HELD})*")
_PREDICATE = re.compile(
    r"(?is).*(?:(?<![a-z])(?:is|are|was|were|equals?|be|becomes)(?![a-z])|[是为]|等于|:)\s*(?:equal to "
    r"|exactly |simply )?(\S.*)"
)
_UNSURE = re.compile(
    r"(?i)\b(?:not|neither|nor|cannot|either|maybe|perhaps|might|may|could|if|unless|whether|suppose|assume|let|unable|sorry)\b|n't\b|\?\W*$|不"
)


def _conclusion(text: str) -> str | None:
    """The predicate of the last sentence; without a verb the mathematics at its end, or bold
    text."""
    pieces: list[str] = []

    def hold(match: re.Match[str]) -> str:
        pieces.append(next(part for part in match.groups() if part is not None))
        return f"\x04{len(pieces) - 1}\x04"

    sentences = re.split(r"(?<=[.!?。])\s+|\n", _MATHEMATICS.sub(hold, text[-_ENDING:]))
    said = [part.strip() for part in sentences if re.search(r"\w", part) and not ASIDE.match(part)]
    if not said or _UNSURE.search(said[-1]):
        return None
    predicate = _PREDICATE.fullmatch(said[-1])
    found = _ENUMERATED.match(predicate[1].lstrip("* ")) if predicate else None
    if found is None and re.search(rf"{_HELD}[\s.!*。]*$", said[-1]):
        found = list(_ENUMERATED.finditer(said[-1]))[-1]
    if found is not None:
        return ", ".join(pieces[int(number)].strip() for number in re.findall(_HELD, found[0]))
    emphasized = re.findall(r"\*\*([^*]+)\*\*", said[-1])
    said_last = emphasized[-1] if emphasized else predicate[1] if predicate else said[-1]
    said_last = re.split(r",?\s+(?:since|because)\s", said_last)[0]
    shown = re.sub(_HELD, lambda match: f"${pieces[int(match[1])]}$", said_last).strip(" *_.!。")
    return shown if 0 < len(shown) <= _SHORT else None


def _expression_of(sentence: str) -> str:
    """The first piece of mathematics in a sentence, or the sentence up to its end."""
    sentence = _INTRODUCTION.sub("", sentence.strip())
    mathematics = re.match(r"[^$\\]{0,40}?(?:\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\])", sentence)
    if mathematics is not None and not re.search(
        r"(?i)\bnot\b|n't", sentence[: mathematics.start(mathematics.lastindex or 0)]
    ):
        return next(part for part in mathematics.groups() if part)
    return re.split(r"\.(?:\s|$)|[。;]", sentence)[0]


_NAMED = re.compile(
    r"(?:an?|the)?\s*([A-Za-z]{3,})\s+(?:function|number|triangle|curve|conic|sequence|series|value)s?"
)


def same_text(gold: str, answer: str) -> bool:
    """Whether the two are the same characters without typesetting, blanks, and the case of words;
    `an odd function` is odd."""
    named = _NAMED.fullmatch(answer.strip(" *.$"))
    return (
        _normal(gold) in (_normal(answer), _normal(named[1]) if named is not None else "")
        and _normal(gold) != ""
    )


def ends_with(gold: str, sentence: str) -> bool:
    """Whether a sentence that states nothing ends with a gold of words: `Therefore she faces
    east.`"""
    words = plain(gold).replace(TEXT, "").replace(END_TEXT, "").strip().lower()
    is_worded = re.fullmatch(r"[a-z]{3,}(?: \w+)?", words) is not None
    return (
        is_worded
        and re.search(rf"\b(?!than\b)\w+\s+{re.escape(words)}[\s.*!]*$", sentence.lower())
        is not None
        and not _UNSURE.search(sentence)
    )


def _normal(text: str) -> str:
    shown = plain(text.strip().strip("$")).replace(TEXT, "").replace(END_TEXT, "").rstrip(".")
    shown = re.sub(r"(?i)^\s*(?:an?|the)\s+(?=[a-z]{3})", "", shown)
    return re.sub(r"\s+", "", shown).lower()


def comparison_form(gold: str, answer: str) -> str | None:
    """The answer in the form that math-verify compares, or None where it cannot equal the gold:
    too long, or several where one is requested."""
    answer = answer.strip().strip("$").strip().rstrip(".。").lstrip("= ")
    answer = latex(
        _UNIT_BEHIND.sub("", answer) if not re.search(r"text|[\u3040-\u9fff]", gold) else answer
    )
    answer = answer if re.search(_ABOUT, gold) else re.split(_ABOUT, answer)[0].strip() or answer
    if len(answer) > LONGEST or (_OR.search(answer) and not (_OR.search(gold) or "," in gold)):
        return None
    answer = answer if re.search(r"=|circ", gold) else _IN_DEGREES.sub("", answer).strip()
    answer = intervals(answer) if _brackets(_LABEL.sub("", gold)) or "\\infty" in gold else answer
    if not re.search(r"[=∈]|\\in(?![a-z])", gold):
        answer = _LABEL.sub("", answer).strip()
    if (
        (ours := _brackets(answer))
        and (target := _brackets(_LABEL.sub("", gold)))
        and ours != target
    ):
        return None
    bases = [_BASE.search(text.strip().strip("$")) for text in (gold, answer)]
    if bases[0] and bases[1]:
        same = (
            bases[0][1] == bases[1][1]
            and len({_BASES.get(base[2], base[2]) for base in bases if base}) == 1
        )
        return gold if same else None
    answer = (
        re.sub(r"(?<=[\d})])\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", "", answer)
        if "text" not in gold
        else answer
    )
    if re.fullmatch(r"[A-Za-z\s\\{}']*", _normal(gold)) and "\\" not in _normal(gold):
        return None if len(_normal(gold)) > 1 else answer
    return _AND.sub(",", answer)


def _brackets(text: str) -> str:
    """What a pair or an interval begins and ends with, such as `[)`: [2, 5) is not (2, 5), and a
    point is not an interval."""
    found = re.fullmatch(
        r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])",
        re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip(),
    )
    return found[1] + found[2] if found else ""


def same_short(gold: str, said: str) -> bool:
    """Whether `said` names the gold of a short answer: `(C)` in any dress, a number, or the same
    words."""
    said = _INTRODUCTION.sub("", said).strip().strip("\"'").rstrip(".")
    letter = re.fullmatch(r"\(([A-Z])\)", gold)
    if letter is not None:
        return read_choice(said, [f"option {number}" for number in range(26)]) == letter[1]
    number = read_value(gold)
    if isinstance(number, Fraction):
        return read_value(said) == number
    return _normal(gold) == _normal(said)
