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
from quantkit.evaluation.grading.typesetting import HIGH, VULGAR, words

_SHORT = 40  # characters of a reply that is nothing but its answer
LONGEST = 500  # characters of an answer that math-verify is asked about
_ENDING = 2000  # characters at the end of a text that states no answer

_MATH = r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]"
_LAST_MATH = re.compile(rf"(?:{_MATH}|\*\*([^*\n]+)\*\*)[\s.!*。]*$", re.DOTALL)
_PREDICATE = re.compile(r"(?is).*(?:(?<![a-z])(?:is|are|equals?)(?![a-z])|[是为:])\s*(\S[^\n]*)$")


def find_expression(text: str) -> Extraction:
    """The last box, several of them where they are enumerated; else what the last statement of the
    answer says, as written; else the mathematics or bold text that the last sentence ends with."""
    return first_of(last_box, _stated, _last, text=prepare(text))


def _stated(text: str) -> Extraction:
    said = last_statement(text)
    if not said:
        return Extraction(None) if said is None else Extraction("", "phrase")
    return Extraction(re.split(r"\.(?:\s|$)|[。;]", said.strip("*_ "))[0], "phrase")


def _last(text: str) -> Extraction:
    lines = [line for line in text[-_ENDING:].split("\n") if line.strip(" $")]
    sentence = re.split(r"(?<=[.!?。])\s+", lines[-1])[-1] if lines else ""
    found = _LAST_MATH.search(text[-_ENDING:]) or _PREDICATE.fullmatch(sentence)
    said = found[found.lastindex or 0] if found else sentence if len(lines) == 1 else ""
    said = said.strip(" *_.!。")
    return Extraction(said, "last") if 0 < len(said) <= _SHORT else Extraction(None)


def same_text(gold: str, answer: str) -> bool:
    """Whether the two are the same characters without typesetting, blanks, and the case of words."""
    target = _normal(gold)
    if re.fullmatch(r"\d+_\d+", target) and "_" not in answer:  # a number whose base was given
        target = target.partition("_")[0]
    return target != "" and target == _normal(answer)


def _normal(text: str) -> str:
    shown = words(text.strip().strip("$")).rstrip(".").removeprefix("an ")
    shown = re.sub(r"[\s{}]+", "", shown).lower()
    return re.sub(r"(?<=\d_)[a-z]+", lambda base: NAMES.get(base[0], base[0]), shown)


_ENDS = re.compile(r"(?:\\left)?([(\[])[^()\[\]]*,[^()\[\]]*([)\]])")


def comparison_form(gold: str, answer: str) -> str | None:
    """The answer in the form that math-verify compares, or None where it cannot equal the gold: too
    long, words, or several where one is asked for."""
    answer = answer.strip().strip("$").strip().rstrip(".。").lstrip("= ")
    if len(answer) > LONGEST:
        return None
    if "_" in gold or re.fullmatch(r"[A-Za-z][A-Za-z' ]{2,}", words(gold)):
        return None  # a number in a base, words: equal as text or not at all
    units = [set(re.findall(r"[a-z]{3,}", words(text).lower())) for text in (gold, answer)]
    known = {other[:3] for other in units[0]}
    if "text" in gold and all(units) and not any(unit[:3] in known for unit in units[1]):
        return None  # hours are not minutes
    answer = latex(answer)
    target = re.sub(r"^[A-Za-z]\s*\\in(?![a-z])", "", gold)
    answer = intervals(answer) if _ends(target) or "\\infty" in gold else answer
    # [2, 5) is not (2, 5), and a point is not an interval.
    if _ends(answer) and _ends(target) and _ends(answer) != _ends(target):
        return None
    return answer


def _ends(text: str) -> tuple[str, ...]:
    found = _ENDS.fullmatch(re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip())
    return found.groups() if found else ()


def same_short(gold: str, said: str) -> bool:
    """Whether `said` names the gold of a short answer: `(C)` in any dress, a number, or the same
    words."""
    said = said.strip().strip("\"'").rstrip(".")
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


def latex(text: str) -> str:
    """`text` in LaTeX: characters, roots and powers of plain text as commands."""
    text = re.sub(r"\\[bB]igg?[lrm]?(?![A-Za-z])", "", text)
    text = _NAMES.sub(r"\\\1 ", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    return _POWER.sub(lambda match: f"^{{{match[0].translate(HIGH)}}}", text).translate(_CHARACTERS)


_UNION = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z])|\\cup(?![a-z]))\s*")
_RELATION = re.compile(r"\\([lg])eq?(?:slant)?(?![a-z])|([<>])=")
_SIDE = r"[^<>≤≥=,]+?"
_RANGE = re.compile(
    rf"(?:(?P<low>{_SIDE})\s*(?P<from>[<≤]))?\s*[a-z]\s*(?:(?P<to>[<>≤≥])\s*(?P<high>{_SIDE}))"
)


def intervals(text: str) -> str:
    r"""0 < x \le 5 as (0, 5], x < 2 or x > 3 as (-\infty, 2)\cup(3, \infty); anything else as it
    is."""
    shown = _RELATION.sub(lambda match: "≤" if (match[1] or match[2]) in "l<" else "≥", text)
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
