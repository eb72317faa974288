r"""Finding the answer in the text after the reasoning, and reading numbers strictly.

`strict` is what the prompt asked for (the last \boxed{}, an `ANSWER: X` line); `flexible` falls back to a stated answer in prose and then
to the last number. The number reader accepts one number with decorations (currency, unit, thousands separators) and nothing else: a sum,
a set or a range is not a number.
"""

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Found = Literal["asked", "phrase", "last"]


@dataclass(frozen=True)
class Extraction:
    """The answer text and where it stood: as the prompt asked, in a sentence, or last. `open_box`: the last box is never closed."""

    text: str | None
    found: Found | None = None
    open_box: bool = False


def normalize(text: str) -> str:
    """Full-width forms to ASCII, other scripts' digits to 0-9, typographic minus and spaces to plain ones.

    Not NFKC as a whole: that would turn a superscript into a digit (10² into 102).
    """
    return "".join(_normalize_character(character) for character in text) if not text.isascii() else text


def _normalize_character(character: str) -> str:
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if character in "\u2212\u2013\ufe63":
        return "-"
    return " " if character in "\u00a0\u202f\u2009\u3000" else character


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_box(text: str) -> Extraction:
    r"""Content of the last \boxed{} or \fbox{}, by counting braces. An escaped brace does not count."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return Extraction(None)
    depth = 1
    for end in range(start, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                # A box around a box (\boxed{\boxed{7}} reads as its inner one, which `start` already points at).
                return Extraction(text[start:end].strip(), "asked")
    return Extraction(None, open_box=True)


_PLAIN_NUMBER = r"[-+]?\s?[$€£¥]?\s?(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!,|,\\!)\d{3})+|\d+)(?:\.\d+)?"
_STATED = re.compile(rf"(?i)(?:answer\s*(?:is|:|=)|答案\s*(?:是|为|:|：)|####)[\s:*$\\(\[]*({_PLAIN_NUMBER})")
_LAST = re.compile(rf"(?<![\w.])({_PLAIN_NUMBER})")


def find_number(text: str) -> Extraction:
    """The answer of a text whose answer is a number: last box, else the last stated answer, else the last number."""
    box = last_box(text)
    if box.text is not None or box.open_box:
        return box
    stated = _STATED.findall(text)
    if stated:
        return Extraction(stated[-1].strip(), "phrase")
    numbers = _LAST.findall(text)
    return Extraction(numbers[-1].strip(), "last") if numbers else Extraction(None)


_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|bf|rm|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;: ]|~|\\quad|\\qquad|\\left|\\right|\\displaystyle")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_UNIT = re.compile(r"(?<=[\d.])\s*(?:[A-Za-z\u00b5\u4e00-\u9fff][A-Za-z\u4e00-\u9fff /.'-]*(?:\^\{?[23]\}?|[²³])?)$")


def parse_number(text: str) -> Decimal | None:
    r"""The one number that `text` is, or None.

    Accepts `$18.00`, `1,234`, `1{,}234`, `70,\!000`, `42 apples`, `42 \text{ cm}`, `25\%` (as 25), `x = 42`, `033`;
    refuses `200+4`, `1/2`, `{5,7}`.
    """
    text = normalize(text).strip().strip("$").strip()
    text = text.removeprefix(r"\(").removesuffix(r"\)").strip()
    text = text.replace("{,}", ",")
    text = _SPACING.sub(lambda match: " " if match[0] == "~" else "", text)
    text = _DEGREES.sub("", text)
    while (unwrapped := _WRAPPERS.sub(r" \1 ", text)) != text:
        text = unwrapped
    text = text.replace(r"\%", "%").replace(r"\$", "$")
    _, _, text = text.rpartition("=")
    text = re.sub(r"^(?:US)?[$€£¥]\s*|(?<=[-+])\s*[$€£¥]\s*", "", text.strip().strip("{}").strip())
    text = re.sub(r"^([-+])\s+", r"\1", text)
    text = re.sub(r"\s*[%$€£¥元]$", "", text.rstrip(" ."))
    text = _UNIT.sub("", text).strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if not _NUMBER.fullmatch(text) or len(text) > 40:
        return None
    return Decimal(text)


def canonical(number: Decimal) -> str:
    """One spelling per value, for votes: 18.00 and 18 are the same."""
    whole = number.to_integral_value()
    return str(int(whole)) if number == whole and abs(number) < Decimal(10) ** 30 else format(number.normalize(), "f")


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER = r"(?:\\(?:text|textbf|mathbf|mathrm|boxed|fbox)\s*\{|[\s$*(\[{（【\"'`]|\\\()*([A-Z])(?![A-Za-z0-9])"
_ANSWER_LINE = re.compile(rf"(?i:answer)\s*(?:\*\*)?\s*[:：]\s*{_LETTER}")
_CHOICE_PHRASE = re.compile(
    rf"(?i:answer\s+is|option\s+is|choice\s+is|答案\s*(?:是|为|[:：])|choose|select)\s*:?\s*(?i:option\s+)?{_LETTER}"
)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")


def find_choice(text: str, letters: str) -> Extraction:
    """The chosen letter among `letters`: the last `ANSWER: X` or box, else "the answer is X", else the last letter standing alone."""
    text = normalize(text)
    stated = [(match.start(), match[1]) for match in _ANSWER_LINE.finditer(text) if match[1] in letters]
    box = last_box(text)
    if box.text is not None:
        inner = [letter for letter in _STANDALONE.findall(box.text) if letter in letters]
        if len(inner) == 1:
            stated.append((text.rindex(box.text), inner[0]))
    if stated:
        return Extraction(max(stated)[1], "asked")
    if box.open_box:
        return box
    phrases = [letter for letter in _CHOICE_PHRASE.findall(text) if letter in letters]
    if phrases:
        return Extraction(phrases[-1], "phrase")
    # "I" and "A" are English words as well as labels: as the last resort they count only where no word follows.
    alone = [m[1] for m in _STANDALONE.finditer(text) if m[1] in letters and not (m[1] in "AI" and re.match(r"\s+[a-z]", text[m.end() :]))]
    return Extraction(alone[-1], "last") if alone else Extraction(None)
