r"""Answers that are arbitrary mathematics or a few words (MATH-500): extraction and comparison with
a LaTeX gold.

A gold that is a plain number is left to the number reader. Else the two are compared as text
without typesetting, and then by math-verify, which is given LaTeX for what is written otherwise
(`2√5`, `x²`, `sqrt(5)`, `x < 2 or x > 3`).
"""

import re
from fractions import Fraction

from quantkit.evaluation.grading.answers import (
    Extraction,
    first_of,
    last_box,
    last_statement,
    prepare,
)
from quantkit.evaluation.grading.choices import read_choice
from quantkit.evaluation.grading.numbers import NAMES, read_value
from quantkit.evaluation.grading.typesetting import HIGH, VULGAR, over_to_frac, words

_SHORT = 40  # characters of a reply that is nothing but its answer
LONGEST = 500  # characters of an answer that math-verify is asked about
_ENDING = 2000  # characters at the end of a text that states no answer

_INTRODUCTION = re.compile(
    r"(?i)^(?:(?:therefore|thus|hence|then|simply|clearly|equal to|given by|exactly|the|:)\s+)+"
)
_MATH = r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]"
_FIRST_MATH = re.compile(rf"[^$\\]{{0,40}}?(?:{_MATH})", re.DOTALL)
_LAST_MATH = re.compile(rf"(?:{_MATH}|\*\*([^*\n]+)\*\*)[\s.!*。]*$", re.DOTALL)
_PREDICATE = re.compile(r"(?is).*(?:(?<![a-z])(?:is|are|equals?)(?![a-z])|[是为:])\s*(\S[^\n]*)$")
_JOINED = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*(?:\\text\{and\})?\s*")
_UNSURE = re.compile(
    r"(?i)\b(?:not|neither|nor|cannot|either|maybe|perhaps|might|if|unless|whether|suppose"
    r"|assume|let|unable|sorry)\b|n't\b|\?\W*$|不"
)


def find_expression(text: str) -> Extraction:
    """The last box, several of them where they are enumerated; else what the last statement of the
    answer says, as written; else the mathematics or bold text that the last sentence ends with."""
    return first_of(last_box, _stated, _last, text=prepare(text))


def _stated(text: str) -> Extraction:
    said = last_statement(text)
    if not said:
        return Extraction(None) if said is None else Extraction("", "phrase")
    said = _INTRODUCTION.sub("", said)
    mathematics = _FIRST_MATH.match(said)
    if mathematics is not None and not _UNSURE.search(
        said[: mathematics.start(mathematics.lastindex or 0)]
    ):
        return Extraction(mathematics[mathematics.lastindex or 0], "phrase")
    return Extraction(re.split(r"\.(?:\s|$)|[。;]", said.strip("*_ "))[0], "phrase")


def _last(text: str) -> Extraction:
    lines = [line for line in text[-_ENDING:].split("\n") if line.strip(" $")]
    sentence = re.split(r"(?<=[.!?。])\s+", lines[-1])[-1] if lines else ""
    if not sentence or _UNSURE.search(sentence):
        return Extraction(None)
    pieces = list(re.finditer(_MATH, sentence))
    first = len(pieces) - 1
    while first > 0 and _JOINED.fullmatch(sentence, pieces[first - 1].end(), pieces[first].start()):
        first -= 1
    found = _LAST_MATH.search(text[-_ENDING:]) or _PREDICATE.fullmatch(sentence)
    said = found[found.lastindex or 0] if found else sentence if len(lines) == 1 else ""
    if found is not None and 0 <= first < len(pieces) - 1:
        said = ", ".join(piece[piece.lastindex or 0] for piece in pieces[first:])
    said = said.strip(" *_.!。")
    return Extraction(said, "last") if 0 < len(said) <= _SHORT else Extraction(None)


_NAMED = re.compile(
    r"(?i)(?:an?|the)?\s*([a-z]{3,})(?:\s+(?:function|number|triangle|curve|conic|sequence"
    r"|series|value)s?)?"
)


def same_text(gold: str, answer: str) -> bool:
    """Whether the two are the same characters without typesetting, blanks, and the case of words;
    `an odd function` is odd."""
    shown = words(answer).strip(" *.$")
    named = _NAMED.fullmatch(shown)
    target = _normal(gold)
    if re.fullmatch(r"\d+_\d+", target) and "_" not in answer:  # a number whose base was given
        target = target.partition("_")[0]
    return target != "" and target in (_normal(answer), named[1].lower() if named else "")


def ends_with(gold: str, sentence: str) -> bool:
    """Whether a sentence ends with a gold of words: `Therefore she faces east.`"""
    target = words(gold).strip().lower()
    return target.isalpha() and len(target) > 2 and sentence.lower().split()[-1:] == [target]


def _normal(text: str) -> str:
    shown = re.sub(r"[\s{}]+", "", words(text.strip().strip("$")).rstrip(".")).lower()
    return re.sub(r"(?<=\d_)[a-z]+", lambda match: str(NAMES.get(match[0], match[0])), shown)


_ABOUT = re.compile(r"\\approx(?![a-z])|≈")
_OR = re.compile(r"(?i)\\text\s*\{\s*or\s*\}|\bor\b|\\pm|\\mp|±")
_AND = re.compile(r"(?i)(?:,\s*)?(?:\\text\s*\{\s*(?:,\s*)?and\s*\}|\band\b)")
# A name in front: anything without a number in it, or one letter with an index or an argument.
_LABEL = re.compile(
    r"^(?:\\Pr|[PEV])\s*\([^()]{1,40}\)\s*=|^[A-Za-z](?:_\{?\w+\}?|\(\w\))?\s*(?:="
    r"|\\in(?![a-z]))|^[^=<>\d]{1,40}="
)
# What is measured, after a number with a constant: 12π cm², 3√2 units.
_UNIT = re.compile(
    r"(?<=[\w})π²])\s*(?:\\(?:text|mathrm)\s*\{[^{}]*\}|(?<![A-Za-z])(?:(?:square|cubic|sq\.?"
    r"|cu\.?)\s+)?(?:[kcm]?m|in|ft|units?|inch(?:es)?|f(?:ee|oo)t|miles?"
    r"|met(?:er|re)s?|radians?|degrees?|hours?))(?:\s*(?:\^\s*\{?[23]\}?|[²³]))?\s*$"
)
_ENDS = re.compile(r"(?:\\left)?([(\[])[^()\[\]]*,[^()\[\]]*([)\]])")


def comparison_form(gold: str, answer: str) -> str | None:
    """The answer in the form that math-verify compares, or None where it cannot equal the gold: too
    long, words, or several where one is asked for."""
    answer = answer.strip().strip("$").strip().rstrip(".。").lstrip("= ")
    if len(answer) > LONGEST or (
        _OR.search(answer) and not (_OR.search(gold) or "," in gold or "infty" in gold)
    ):
        return None
    if "_" in gold or re.fullmatch(r"[A-Za-z][A-Za-z' ]{2,}", words(gold)):
        return None  # a number in a base, words: equal as text or not at all
    units = [set(re.findall(r"[a-z]{3,}", words(text).lower())) for text in (gold, answer)]
    known = {other[:3] for other in units[0]}
    if "text" in gold and all(units) and not any(unit[:3] in known for unit in units[1]):
        return None  # hours are not minutes
    answer = latex(answer if re.search(r"text|mathrm", gold) else _UNIT.sub("", answer))
    answer = answer if _ABOUT.search(gold) else _ABOUT.split(answer)[0].strip() or answer
    target = _LABEL.sub("", gold)
    answer = intervals(answer) if _ends(target) or "\\infty" in gold else answer
    if not re.search(r"[=∈]|\\in(?![a-z])", gold):
        answer = _LABEL.sub("", answer).strip()
    # [2, 5) is not (2, 5), and a point is not an interval.
    if _ends(answer) and _ends(target) and _ends(answer) != _ends(target):
        return None
    return _AND.sub(",", answer)


def _ends(text: str) -> tuple[str, ...]:
    found = _ENDS.fullmatch(re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip())
    return found.groups() if found else ()


def same_short(gold: str, said: str) -> bool:
    """Whether `said` names the gold of a short answer: `(C)` in any dress, a number, or the same
    words."""
    said = _INTRODUCTION.sub("", said).strip().strip("\"'").rstrip(".")
    if re.fullmatch(r"\([A-Z]\)", gold):
        return read_choice(said, [f"option {number}" for number in range(26)]) == gold[1]
    number = read_value(gold)
    return (
        read_value(said) == number
        if isinstance(number, Fraction)
        else _normal(gold) == _normal(said)
    )


# ---------------------------------------------------------------------------------- plain text as LaTeX

_SYMBOLS = "π pi ∞ infty ∪ cup ∩ cap ≤ le ≥ ge ≠ ne ∈ in ± pm · cdot × times θ theta"
_CHARACTERS = {
    ord(c): rf"\{name} " for c, name in zip(_SYMBOLS.split()[::2], _SYMBOLS.split()[1::2])
}
_CHARACTERS |= {ord("÷"): "/", ord("°"): r"^\circ "}
_CHARACTERS |= {
    ord(c): r"\frac{{{}}}{{{}}}".format(*value.split("/")) for c, value in VULGAR.items()
}
_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt(?=\())\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_NAMES = re.compile(
    r"(?<![A-Za-z\\{])(pi(?![A-Za-z])|(?:sin|cos|tan|ln|log)(?=\s*\(|\s+[a-z\d\\](?![a-z])))"
)
_SIZES = re.compile(r"\\(?:[bB]igg?[lrm]?|left|right|displaystyle|textstyle)(?![A-Za-z])")
_PRODUCT = re.compile(r"(?<=[\w)])\s*\*\s*(?=[\w(\\])")


def latex(text: str) -> str:
    """`text` in LaTeX: characters, roots, powers and stars of plain text as commands, without
    commands of size."""
    text = over_to_frac(_NAMES.sub(r"\\\1 ", _SIZES.sub("", text)))
    text = _ROOT.sub(
        lambda match: rf"\sqrt{{{match[1] or match[2]}}}", _PRODUCT.sub(r" \\cdot ", text)
    )
    return _POWER.sub(lambda match: f"^{{{match[0].translate(HIGH)}}}", text).translate(_CHARACTERS)


_UNION = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z])|\\cup(?![a-z]))\s*")
_RELATIONS = (
    (re.compile(r"\\leq?(?:slant)?(?![a-z])|<="), "≤"),
    (re.compile(r"\\geq?(?:slant)?(?![a-z])|>="), "≥"),
)
_SIDE = r"[^<>≤≥=,]+?"
_RANGE = re.compile(
    rf"(?:(?P<low>{_SIDE})\s*(?P<from>[<≤]))?\s*[a-z]\s*(?:(?P<to>[<>≤≥])\s*(?P<high>{_SIDE}))"
)


def intervals(text: str) -> str:
    r"""0 < x \le 5 as (0, 5], x < 2 or x > 3 as (-\infty, 2)\cup(3, \infty); anything else as it
    is."""
    shown = text
    for pattern, sign in _RELATIONS:
        shown = pattern.sub(sign, shown)
    found = [_interval(part.strip()) for part in _UNION.split(shown)]
    return r"\cup".join(part for part in found if part) if all(found) else text


def _interval(text: str) -> str | None:
    match = _RANGE.fullmatch(text)
    if match is None or (match["low"] and match["to"] in ">≥"):
        return None
    if match["to"] in ">≥":
        return rf"{'(' if match['to'] == '>' else '['}{match['high']}, \infty)"
    low = f"{'(' if match['from'] == '<' else '['}{match['low']}" if match["low"] else r"(-\infty"
    return f"{low}, {match['high']}{')' if match['to'] == '<' else ']'}"
