r"""Find the answer of a reply in the text after the reasoning.

In this order: the last \boxed{} that is not empty; the last line or sentence that states the answer
(`Answer: 18`, `#### 18`, `the answer is 18`, 答案是18); the last sentence that has a number, where it
says one. Anything else is no answer: none is inferred.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quantkit.evaluation.grading.numbers import (
    CHANGES,
    Value,
    is_unit,
    numbers,
    read_value,
)
from quantkit.evaluation.grading.typesetting import normalize, plain

Found = Literal["asked", "phrase", "last"]
"""`asked` is what the prompt asked for, `phrase` a sentence that states the answer, `last` the last
sentence of the text."""

LONGEST = 100_000  # characters at the end of a reply that are read
_SENTENCE, _ENDING, _LAST_ONES = 600, 4000, 50


@dataclass(frozen=True)
class Extraction:
    """The answer as written, where it stood, and the value it states. `open_box`: the last box is
    never closed."""

    text: str | None
    found: Found | None = None
    open_box: bool = False
    value: Value | None = None


# ---------------------------------------------------------------------------------------------- boxes


@dataclass(frozen=True)
class BoxedText:
    r"""The content of one \boxed{}, and where it is in the text, command and braces included."""

    content: str
    start: int
    end: int


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_LONGEST_BOX = 10_000
_BOX_TOKENS = re.compile(r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", re.DOTALL)  # GLM
_DRESS = r"[\s$*_\\(\[{}\])'\"`]*"
_JOINED = re.compile(
    rf"{_DRESS}(?:or|and|and/or|&|,|\\text\s*\{{\s*(?:or|and)\s*\}}){_DRESS}(?:[a-z](?:_\d)?\s*={_DRESS})?",
    re.IGNORECASE,
)
_DENIED = re.compile(rf"(?i)(?:\bnot|n't|\bnever|\bcannot be|不是){_DRESS}$")
_TAKEN_BACK = re.compile(
    rf"(?i){_DRESS}[.!?]?{_DRESS}(?:(?:wait|hmm+|oops|no|actually|sorry|but|on second thoughts?"
    rf"|on reflection)[\s,.:!—-]+)*(?:(?:this|that|it)\s+)?(?:is|was|are|would be|'s|can)"
    r"\s*(?:clearly |definitely )?(?:not\b(?! only)|n't|wrong|incorrect|false|impossible"
    r"|too (?:large|small|big|high|low))"
    r"|(?s:.*)\b(?:(?:can|could)(?:\s?not|n't)|unable to|failed to)\s+(?:solve|answer|determine|find)\b"
)
_SCALE = re.compile(
    r"(?i)[\s$*)\\,;~]*(?:\\(?:text|mathrm)\s*\{)?\s*((?:dozen|hundred|thousand|[mb]illion)s?\b|[万亿])"
)


def boxes(text: str) -> tuple[list[BoxedText], bool]:
    """All boxes in order, and whether the last is never
    closed. Escaped braces do not count."""
    found: list[BoxedText] = []
    is_open = False
    for match in list(_BOX.finditer(text))[-100:]:
        end = _closing_brace(text, match.end())
        is_open = end is None
        if end is not None:
            found.append(BoxedText(text[match.end() : end].strip(), match.start(), end + 1))
    return found, is_open


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, min(len(text), start + _LONGEST_BOX)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def last_box(text: str) -> Extraction:
    """The content of the last box that has any: "" where it is denied or taken back; the contents
    of boxes that are enumerated, joined by commas."""
    found, is_open = boxes(text)
    if is_open:
        return Extraction(None, open_box=True)
    filled = [box for box in found if re.search(r"[^\s\\{}$.,?!~]", box.content)]
    if not filled:
        return Extraction(None)
    last = filled[-1]
    if _DENIED.search(text[: last.start][-40:]) or _TAKEN_BACK.match(text, last.end):
        return Extraction("", "asked")
    first = len(filled) - 1
    while first and _JOINED.fullmatch(text, filled[first - 1].end, filled[first].start):
        first -= 1
    contents = list(dict.fromkeys(box.content for box in filled[first:]))
    scale = _SCALE.match(text, last.end)
    return Extraction(", ".join(contents) + (f" {scale[1]}" if scale else ""), "asked")


# ----------------------------------------------------------------------------------------- statements

_VERB = (
    r"(?:(?P<denied>is\s+(?:clearly\s+)?(?:not|never)|isn't|cannot\s+be|can't\s+be|不是)"
    r"|is|was|are|equals?|:|=+>?|-+>|→|(?:comes|turns)\s+out\s+(?:as|to|at)(?:\s+be)?|(?:should"
    r"|must|would|will|has\s+to)\s+be|[是为]|等于)"
)
_STATED = re.compile(
    r"(?i)(?:(?<![A-Za-z/])(?:answer|ans|(?:right|correct|required|requested|desired)\s+(?:value"
    r"|number|result|count|total|sum|remainder|solution))\b\.?"
    r"(?:\s+(?:to|of|for)\s[^.:\n]{1,80}?(?=[\s$*)]*(?:(?:is|was|are|equals)(?![A-Za-z])|:)))?"
    r"|(?:答案|结果)\s*应?|(?<![\u4e00-\u9fff])答(?=\s*:))"
    rf"[\s*_\"'`]*?(?:{_VERB}|(?<=answer)[\s*_:]*(?=\n))\s*:?|\#\#\#\#+|<answer>|(?m:^\W{{0,4}}A\s*:)"
)
_DOUBTED = re.compile(
    r"(?i)(?:\bno|\bassum(?:e|ing)|\bsuppos(?:e|ing)|\bif|\bwhether|\bnot|\bfalse|\bwrong"
    r"|\bunable to|\bdoubt|n't)\b(?:(?!\bbut\b)[\w\s,]){0,40}$"
)
_MARKS = re.compile(r"(?m)^[ \t]*(?:#{1,3}[ \t]+|>+[ \t]?|[-*][ \t]+)|<<[^<>\n]*>>")
_NEXT_QUESTION = re.compile(r"\n[ \t]*\n[^\w\n]*(?:Question|Q|Human|User|Instruction)\s*\d*\s*:")
_ANSWERED = re.compile(r"(?m:^\W{0,4}A\s*:\s*\S)|####\s*\S|(?i:\banswer\s*(?:is|:))|\\boxed\s*\{")


def prepare(text: str) -> str:
    """The end of a reply in plain characters, up to where a model without a stop sequence goes on
    with another question."""
    text = _BOX_TOKENS.sub(lambda match: f"\\boxed{{{match[1]}}}", normalize(text[-LONGEST:]))
    answered = _ANSWERED.search(text)
    following = _NEXT_QUESTION.search(text, answered.end()) if answered is not None else None
    return text[: following.start()] if following is not None else text


def last_statement(text: str) -> str | None:
    """What the last statement of an answer says, to the end of its line; "" where it is denied."""
    for match in reversed(list(_STATED.finditer(text))[-_LAST_ONES:]):
        rest = text[match.end() : match.end() + _SENTENCE]
        line = next((line for line in rest.split("\n") if line.strip(" *_:$")), "")
        line = re.sub(r"^[*_]+\s+", "", line.strip())
        if line:
            doubted = _DOUBTED.search(text[: match.start()][-60:].rpartition("\n")[2])
            return "" if match["denied"] or doubted else line
    return None


def first_of(*readers: Callable[[str], Extraction], text: str) -> Extraction:
    """What the first reader that finds an answer finds; of a box that is open, nothing else."""
    for read in readers:
        found = read(text)
        if found.open_box or found.found is not None:
            return found
    return Extraction(None)


# -------------------------------------------------------------------------------------------- numbers


_RECONSIDERS = re.compile(
    r"(?i)(?:^|[.!?]\s{1,3}|\n[ \t]*)(?:wait|hold on|hmm+|let me (?:reconsider|rethink|recount"
    r"|recalculate|redo))\b[^\w\n]*"
)


_CONCLUDES = re.compile(r"(?i)\W*(?:so|thus|hence|therefore)\b")


def find_number(text: str, letters: bool = True) -> Extraction:
    """The answer of a text whose answer is a number.

    An answer that is stated after the box, and is another one, replaces the box. `letters`: single
    letters of known units are units (18 m).
    """
    text = _MARKS.sub("", prepare(text))

    def boxed(text: str) -> Extraction:
        box = last_box(text)
        if box.found is None:
            return box
        value = read_value(box.text or "", letters)
        after = stated(text[boxes(text)[0][-1].end :])
        return (
            after
            if after.value not in (None, value)
            else Extraction(box.text, "asked", value=value)
        )

    def stated(text: str) -> Extraction:
        said = last_statement(re.sub(r"\\[\[\]]|\$\$", "\n", text))
        if said is None or (said and not re.search(r"\d", plain(said))):
            return Extraction(None)
        return Extraction(said[:100], "phrase", value=read_sentence(said, letters))

    def last(text: str) -> Extraction:
        return _last_number(text[-_ENDING:], letters)

    again = list(_RECONSIDERS.finditer(text))
    if again:
        second = first_of(boxed, stated, last, text=text[again[-1].end() :])
        concluded = second.found != "last" or _CONCLUDES.match(second.text or "")
        if second.value is not None and concluded:
            return second
    return first_of(boxed, stated, last, text=text)


# Where a sentence goes on after its number, and the number is over.
_GOES_ON = re.compile(
    r"(?i)[;。；、,\n—…]|\.(?=\s|$|\.)|[!?](?=\s+[A-Z]|\s*$)|:(?=\s)|\s-+\s(?=[A-Za-z]{2})|</"
    r"|\s\((?!\s*(?:or\s|\\?[pb]?mod))"
    r"|\s(?:because|since|as|that|which|so|where|when|given|due|for|after|before|by|if|but|while"
    r"|from|with|on|at|is|was|are|were|every|each|per(?!\s+cent)|in)(?![A-Za-z])"
    r"|\sof(?=\s+(?:the|these|those|his|her|their|its|my|all)\s)|\sto(?![A-Za-z])(?!\s+(?:\$?\d"
    r"|the\s+power))"
    r"|\sand(?![A-Za-z])(?!\s+(?:\$?\d|an?\s|half|one|two))"
)


_OFFERED = re.compile(  # another number
    r"(?i)[,;.…!?—(\s]*(?:or|no|wait|correction|otherwise|i\.e\.)\b[^.]*\d"
    r"|,\s*(?:and\s+)?(?:[a-z]\w?\s*=\s*)?\$?\d"
)


def read_sentence(text: str, letters: bool = True) -> Value | None:
    """What a sentence that states the answer says: its number, if that is over where the sentence
    goes on."""
    shown = re.sub(r"(?<!\\)\$(?!\d)", " ", plain(text).translate({2: " ", 3: " "}))
    first = next(numbers(shown), None)
    over = _GOES_ON.search(shown, first.end) if first is not None else None
    if over is not None and _OFFERED.match(shown, over.start()):
        return None
    return read_value(shown[: over.start()] if over else shown, letters)


_END = re.compile(r"(?<=[.!?。])(?<!\b[A-Z].)(?<!i\.e\.)(?<!e\.g\.)(?<!vs\.)\s+|[\n。]")
_UNSURE = re.compile(
    r"(?i)\b(?:not|neither|nor|cannot|either|or|maybe|perhaps|might|may|could|would|if|unless"
    r"|whether|suppose|assume|let|set|try|consider"
    r"|case|where|when|unable|sorry|about|around|at least|at most|between|approximately|almost"
    r"|nearly|doubt|suspect|fails?|wrong|incorrect"
    r"|impossible|too|attained|achieved|occurs|base|so far|continued|time"
    r"|nicht|pas|não|non|не|no es)\b|n't\b|[?:]\W*$|[≈<>≤≥≠~|!不]|\\mid|大约|아니|ではな"
)
_FINAL = re.compile(
    r"(?is)(?P<before>.*)\b(?<!who )(?:is|are|was|were|equals|total of|yields"
    r"|gives)\s+(?P<said>[^\d]{0,3}\d[^\s]*(?:\s[^\d\s]+){0,2})\W*$"
)
_EARLIER = re.compile(r"(?i)\b(?:is|are|was|were|be|has|have|had)\s+(?:\w+\s+)?\$?\d")
_RESULT = re.compile(r"(?s).*\d[^=]*[-+*/×÷·%][^=]*=\s*([^=]*\d[^=]*)$")


def _last_number(text: str, letters: bool) -> Extraction:
    """The value of the last sentence with a number: of its bold text, of all its numbers if they
    are one, of what it says of its subject. Several, a bound or a doubt: it says none."""
    sentences = [part.strip() for part in _END.split(text) if re.search(r"\d|\?\s*$", part)]
    if not sentences or sentences[-1].endswith("?"):
        return Extraction(None)
    said = sentences[-1]
    value = _conclusion(re.sub(r"^(?:[=-]+>|[→⇒])\s*", "", said), letters)
    return Extraction(said[-100:], "last", value=value) if value is not None else Extraction(None)


def _conclusion(said: str, letters: bool) -> Value | None:
    """What a sentence says: its bold text, the result of its calculation, or its only number."""
    bold = [part for part in re.findall(r"\*\*([^*]+)\*\*", said) if re.search(r"\d", part)]
    said = bold[0].strip(" :") if len(bold) == 1 else said
    shown = re.sub(r"(?<!\\)\$(?!\d)", " ", plain(said).translate({2: " ", 3: " "}))
    if (result := _RESULT.match(shown)) is not None:
        return read_sentence(result[1], letters)
    if _UNSURE.search(shown):
        return None
    if (value := read_value(shown, letters)) is not None:
        return value
    found = list(numbers(shown))
    if not found:
        return None
    if (final := _FINAL.match(shown)) is not None and not _EARLIER.search(final["before"]):
        return read_value(final["said"], letters)
    before, rest = shown[: found[-1].start], shown[found[-1].end :]
    over = _GOES_ON.search(rest)
    alone = len({number.value for number in found}) == 1 and is_unit(
        rest[: over.start()] if over else rest, letters
    )
    if not alone or CHANGES.search(before[-20:]):
        return None
    return found[-1].value
