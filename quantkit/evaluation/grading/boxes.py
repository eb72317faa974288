r"""\boxed{} and similar boxes of a reply: their contents, and which of them is the answer."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quantkit.evaluation.grading.values import Value

Found = Literal["asked", "phrase", "last"]
"""`asked` is what the prompt asked for, `phrase` a sentence that states the answer, `last` the last
number or expression of the text."""


@dataclass(frozen=True)
class Extraction:
    """The answer as written, the value it states, and where it stood. `open_box`: the last box is
    never closed. `restated`: one quantity in two units, where the reply ends with it. `listed`: the
    contents of boxes that are enumerated, the last one included."""

    text: str | None
    found: Found | None = None
    open_box: bool = False
    value: Value | None = None
    restated: tuple[Fraction, ...] = ()
    listed: str | None = None


@dataclass(frozen=True)
class BoxedText:
    r"""The content of one \boxed{}, and where it is in the text, command and braces
    included."""

    content: str
    start: int
    end: int


_BOX = re.compile(r"\\(?:boxed|fbox|framebox|ovalbox|doublebox|shadowbox)\s*(?:\{|(?P<bare>-?\d+))")
_BOXES, _LONGEST_BOX = (
    100,
    10_000,
)  # boxes of a text that are looked at, the last ones, and characters of one


def boxes(text: str) -> tuple[list[BoxedText], bool]:
    """All boxes in order, an inner one instead of what is around it, and whether the last is never
    closed. Escaped braces do not count."""
    found: list[BoxedText] = []
    is_open = False
    for match in list(_BOX.finditer(text))[-_BOXES:]:
        if match["bare"]:
            found.append(BoxedText(match["bare"], match.start(), match.end()))
            continue
        end = _closing_brace(text, match.end())
        is_open = end is None
        if end is not None:
            outer = found and match.start() < found[-1].end
            box = BoxedText(
                text[match.end() : end].strip(),
                found[-1].start if outer else match.start(),
                end + 1,
            )
            found[-1 if outer else len(found) :] = [box]
    return found, is_open


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, min(len(text), start + _LONGEST_BOX)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


_TYPESET = r"[\s$*_\\(\[{}\])'\"`]*"
_JOINED = re.compile(
    rf"{_TYPESET}(?:or|and|and/or|/|&|,|\\text\s*\{{\s*(?:or|and)\s*\}}){_TYPESET}", re.IGNORECASE
)
_NAME = re.compile(r"([A-Za-z](?:_\{?\w\}?)?)\s*=[\s$]*$")  # of what a box is the value of
_DENIED = re.compile(rf"(?i)(?:\bnot|n't|\bnever|\bcannot be|\bneither|不是){_TYPESET}$")
_TAKEN_BACK = re.compile(
    rf"(?i){_TYPESET}(?:is|was|are|would be|can)\s*(?:clearly |definitely )?"
    r"(?:not\b(?! only)|n't|wrong|incorrect|false|impossible|too (?:large|small|big|high|low))"
)
_WITHDRAWN = re.compile(
    rf"(?i){_TYPESET}[.!?]?{_TYPESET}(?:(?:this|that|it) (?:cannot|can't) be (?:right|correct)"
    r"|(?:(?:wait|hmm+|oops|no|actually|hold on|sorry|but|on second thoughts?|on "
    r"reflection)[\s,.:!…—-]+)+"
    r"(?:i (?:now )?(?:think|see|believe|realize)(?: that)? )?(?:this|that|it|the above)(?:'s| is| "
    r"was| seems| must be)\s+"
    r"(?:clearly |just )?"
    r"(?:wrong|incorrect|not (?:right|correct)|false|impossible|mistaken|a mistake)\b(?!\s+to\b))"
)
_GIVES_UP = re.compile(
    r"\b(?:I|[Ww]e) (?:could not|couldn't|cannot|can't|was unable to|were unable to|am unable to) "
    r"(?:solve|determine|find) (?:it|this|the)\b"
)
_SCALE_BEHIND = re.compile(
    r"[\s$*)\\,;~]*(?:\\(?:text|mathrm)\s*\{)?\s*((?:dozen|hundred|thousand|million|billion|trillion)s?\b|[万亿])",
    re.IGNORECASE,
)


def last_box(text: str) -> Extraction:
    r"""The content of the last \boxed{} or \fbox{} that has any: "" where it is denied, taken back,
    or one of several that are offered."""
    found, is_open = boxes(text)
    if is_open:
        return Extraction(None, open_box=True)
    filled = [box for box in found if re.search(r"[^\s\\{}$.,?!~]", box.content)]
    if not filled:
        return Extraction(None)
    last = filled[-1]
    if _WITHDRAWN.match(text, last.end) or _GIVES_UP.search(text, last.end):
        return Extraction("", "asked")
    if _DENIED.search(text[: last.start][-40:]) or _TAKEN_BACK.match(text, last.end):
        return Extraction("", "asked")
    if (
        len(filled) > 1
        and filled[-2].content != last.content
        and _are_alternatives(text, filled[-2], last)
    ):
        return Extraction("", "asked", listed=_box_list(text, filled))
    scale = _SCALE_BEHIND.match(text, last.end)
    return Extraction(f"{last.content} {scale[1]}" if scale else last.content, "asked")


def _are_alternatives(text: str, one: BoxedText, other: BoxedText) -> bool:
    """Whether two boxes are offered side by side: only `or` and its like is between them, and
    the name where both have the same."""
    names = [_NAME.search(text[: box.start]) for box in (one, other)]
    is_same = names[0] is not None and names[1] is not None and names[0][1] == names[1][1]
    end = (
        names[1].start()
        if is_same and names[1] is not None and names[1].start() >= one.end
        else other.start
    )
    return _JOINED.fullmatch(text, one.end, end) is not None


def _box_list(text: str, filled: list[BoxedText]) -> str:
    """The contents of the last boxes, as far back as each is joined to the next."""
    first = len(filled) - 1
    while first and _are_alternatives(text, filled[first - 1], filled[first]):
        first -= 1
    return ", ".join(box.content for box in filled[first:])


def equal_to(text: str) -> str | None:
    r"""The box before the last one, where both are said to be equal: \boxed{84 min} = \boxed{1 h 24
    min}."""
    found = boxes(text)[0]
    is_equal = len(found) > 1 and re.fullmatch(
        rf"{_TYPESET}={_TYPESET}", text[found[-2].end : found[-1].start]
    )
    return found[-2].content if is_equal else None
