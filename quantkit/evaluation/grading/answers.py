r"""Find the final answer in the text after the reasoning, for numeric answers and expressions.

The last \boxed{} (boxes.py) counts; without one the last sentence that states the answer, then the
last number of the text. What is found is read whole by values.py, or refused.
"""

import re
from dataclasses import replace
from fractions import Fraction

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.boxes import Extraction, boxes, equal_to, last_box
from quantkit.evaluation.grading.conversions import equal_quantities
from quantkit.evaluation.grading.languages import decimal_comma
from quantkit.evaluation.grading.prose import (
    has_number,
    read_last,
    read_number_words,
    read_sentence,
)
from quantkit.evaluation.grading.quantities import begin_quantity
from quantkit.evaluation.grading.requested_units import convert_to_requested, unify_units
from quantkit.evaluation.grading.typesetting import normalize
from quantkit.evaluation.grading.values import read_value

LONGEST = 100_000  # characters at the end of a text in which its answer is looked for
_BOX_TOKENS = re.compile(r"<\|begin_of_box\|>([^<>|]*)<\|end_of_box\|>")  # as GLM writes them
_NEXT_QUESTION = re.compile(r"\n[ \t]*\n[^\w\n]*(?:Question|Q|Human|User|Instruction)\s*\d*\s*:")
_ANSWERED = re.compile(r"(?m:^\W{0,4}A\s*:\s*\S)|####\s*\S|(?i:\banswer\s*(?:is|:))|\\boxed\s*\{")


def prepare(text: str) -> str:
    """The end of a reply in plain characters, truncated where a model without a stop sequence
    continues with another question."""
    text = _BOX_TOKENS.sub(lambda match: f"\\boxed{{{match[1]}}}", normalize(text[-LONGEST:]))
    answered = _ANSWERED.search(text)
    following = _NEXT_QUESTION.search(text, answered.end()) if answered is not None else None
    return text[: following.start()] if following is not None else text


_VERB = (
    r"(?:(?P<denied>is\s+(?:clearly\s+|definitely\s+)?(?:not|never)(?!\s+\S{1,30}\s+but)|isn't|wasn't|cannot\s+be|can't\s+be|(?:must|should|could|would|may|might)\s+not\s+be|不是)"
    r"|is|was|are|equals?|becomes|:|=+>|=|-+>?|→|—|comes\s+out\s+(?:as|to|at)|turns\s+out\s+to\s+be"
    r"|(?:should|must|would|will|can|could|might|may|has\s+to)\s+be|是|为|等于|>)"
)
_CUE = re.compile(
    rf"(?i)(?:(?<![A-Za-z/])(?:answer|ans|correction|(?:right|correct|actual|true|corrected|requested|required|desired)\s+(?:value|number|result|count|total|sum|remainder|solution)|(?:value|number|result|count|total|sum)(?=\s+(?:should|must)\s))\.?(?:\s+(?:to|of|for)\s[^.:\n]{{1,60}}?(?=[\s$*)]*(?:(?:is|was|are|would|should|must|will|equals|isn't|cannot|can't|wasn't)(?![A-Za-z])|:)))?[\s*_\"']*?|(?:答案|结果)\s*|(?<![\u4e00-\u9fff])答\s*(?=:))"
    rf"(?:{_VERB}|(?=\n)|(?<=answer)\s*[(,—](?=\s*[$*]*\d)|(?<=ans\.)|(?<=答))\s*:?|\#\#\#\#+|{answer_phrases.STATEMENT}"
)
_DOUBTED = re.compile(
    r"(?i)(?:\bno(?=\s+$)|\bassum(?:e|ing)\b|\bsuppos(?:e|ing)\b[\w\s,]{0,25}|\bif\b|\bwhether\b"
    r"|\bnot (?:the case|true)|\bfalse|\bwrong|\bincorrect|\bdoubt|\b(?:unable|not able) to\b"
    r"|n't (?:think|believe|say))\s+(?:that\s+)?[\w\s]{0,20}$"
)
_KIND = re.compile(
    r"(?i)\s*(?:an?|the|some)\s+(?:[a-z-]+\s+)?(?:integer|number)\s+(?:between|from|in|less|at|of)\b"
)
"""What answers are in general: The answer must be an integer between 0 and 999."""
_FOREIGN_DENIAL = re.compile(
    rf"(?i){answer_phrases.LEADING_DENIAL}(?!.*\s{answer_phrases.CORRECTION}\s)|{answer_phrases.TRAILING_DENIAL}"
)


_CUES, _SENTENCE = (
    50,
    600,
)  # cues for an answer that are looked at, the last ones, and characters after each
_ENDING = 4000  # characters at the end of a text that states no answer


def _statements(text: str) -> list[tuple[int, str, bool]]:
    """What follows each cue for an answer: where, the text up to the end of its line, and
    whether it is denied."""
    found = []
    for match in list(_CUE.finditer(text))[-_CUES:]:
        rest = text[match.end() : match.end() + _SENTENCE]
        line = next((line for line in rest.split("\n") if line.strip(" *_:")), "")
        if _KIND.match(line):
            continue
        is_denied = match["denied"] is not None or match["foreign_denial"] is not None
        is_denied = (
            is_denied
            or _DOUBTED.search(text[: match.start()][-60:]) is not None
            or _FOREIGN_DENIAL.search(line) is not None
        )
        found.append((match.start(), line, is_denied))
    return found


_MARKS = re.compile(r"(?m)^[ \t]*(?:#{1,3}[ \t]+|>+[ \t]?|[-*][ \t]+)|\*\*|__|`+(?:[a-z]+\n)?")
_DISPLAYED = re.compile(r"\\\[|\\\]|\$\$")
_TABLE_ROW = re.compile(r"(?m)^[ \t]*\|[ \t][^\n]*\|[ \t]*$")


def _lines(text: str) -> str:
    """Without headings, quotes, lists and emphasis, of a table's row its last cell; what is
    displayed is on a line of its own."""
    return _DISPLAYED.sub("\n", _TABLE_ROW.sub(_last_cell, _MARKS.sub("", text)))


def _last_cell(row: re.Match[str]) -> str:
    return next((cell for cell in reversed(row[0].split("|")) if cell.strip()), "")


_CALCULATION = re.compile(r"<<[^<>\n]*>>")  # as GSM8K's own solutions have them


_THOUSANDS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:\.\d{3})+(?![\d.]|,\d{3})")
_MILLIONS = re.compile(
    r"(?<![\w.,])[1-9]\d{0,2}(?:\.\d{3}){2}(?![\d.]|,\d{3})"
)  # two points: no decimal one, in any language
_DECIMAL_POINT = re.compile(r"(?<![\d.])\d+\.(?:\d{1,2}|\d{4,})(?![\d.])")


_MIL = re.compile(
    r"(\d)\s+mil(?=\s+(?:de\s|[a-z]+[aeo]s\b)|\W*$)"
)  # Spanish and Portuguese: 45 mil habitantes
_MILES = re.compile(
    r"(?<=[^\W\d_])(\s+\d+)\s+mil(?=\W*$|\s+[a-z])(?! (?:de|in)\b)"
)  # of other languages; $3 mil comes after its sign
_TURKISH = re.compile(
    r"(?<![\w.,])(\d{1,3}(?:\.\d{3})*)'(?:[dt][iıuü]r|[a-zçğıöşü]{1,3})(?![a-zçğıöşü])"
)  # 45.000'dir


_OBJECT = re.compile(r"\s*(?:```(?:json)?\s*)?\{.*\}\s*(?:```)?\s*", re.DOTALL)
_NAMED_VALUE = re.compile(
    r"""["'](?:final[_ ]?)?(?:answer|result|final)["']\s*:\s*(?:["']([^"']*)["']|(-?[\d.]+))\s*[,}]""",
    re.IGNORECASE,
)


def _named_value(text: str) -> str:
    """Of a reply that is a JSON object, the value of its answer, stated; any other text as it
    is."""
    named = list(_NAMED_VALUE.finditer(text)) if _OBJECT.fullmatch(text) else []
    return f"Answer: {named[0][1] or named[0][2]}" if len(named) == 1 else text


def _join_thousands(text: str) -> str:
    """Without the points at thousands, where the text's language writes so and no decimal point
    is in it: 1.250 Liter."""
    text = _MIL.sub(r"\1 thousand", text) if decimal_comma(text[-_ENDING:]) else text
    text = _MILES.sub(r"\1 miles", text)
    text = _TURKISH.sub(lambda match: match[1].replace(".", ""), text)
    text = _MILLIONS.sub(lambda match: match[0].replace(".", ""), text)
    if (
        not _THOUSANDS.search(text)
        or _DECIMAL_POINT.search(text)
        or not decimal_comma(text[-_ENDING:])
    ):
        return text
    return _THOUSANDS.sub(lambda match: match[0].replace(".", ""), text)


_SAID_TWICE = re.compile(
    r"(?<![\w-])(?P<words>[A-Za-z]+(?:[ "
    r"-][A-Za-z]+){0,6})\s?\((?P<digits>\d[\d,]*(?:\.\d+|/\d+)?)\)"
    r"|(?<![\w.,/(])(?P<first>\d[\d,]*(?:\.\d+)?)\s?\((?P<spoken>[A-Za-z]+(?:[ -][A-Za-z]+){0,6})\)"
)


def _deduplicate(match: re.Match[str]) -> str:
    """Of a number in words and in digits, `seven (7)` or `7 (seven)`, the digits; what are two
    numbers stays."""
    digits = match["digits"] or match["first"]
    value = begin_quantity(digits)
    parts = re.split(r"(?<=[ -])", match["words"] or match["spoken"])
    for place in range(len(parts)):
        words = "".join(parts[place:])
        number = begin_quantity(words)
        if (
            number is not None
            and number.end == len(words)
            and value is not None
            and number.value == value.value
        ):
            return match[0] if match["first"] and place else "".join(parts[:place]) + digits
    return match[0]


_COUNT_WORD = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
)
_COUNT = rf"{_COUNT_WORD}(?:[ -](?:one|{_COUNT_WORD}))?(?![\w-])"
_OF_HOW_MANY = re.compile(
    rf"(?<![\w.,/%$-])(?P<part>\d[\d,]*|{_COUNT})\s+(?:out\s+)?(?P<of>of\s+(?:(?:the|these|those|his|her|their|its|all)\s+)?)"
    rf"(?P<whole>\d[\d,]*\d|\d|{_COUNT})(?![\w%]|[.,/]\d)",
    re.IGNORECASE,
)


def _to_digits(match: re.Match[str]) -> str:
    """`7 of the 12` for `seven out of the twelve`: of numbers in words and in digits, the rules
    after it see the digits alone. Words that end the sentence, `seven of 12`, are the first alone:
    7 of 12 might be 7/12."""
    part, whole = (begin_quantity(match[name]) for name in ("part", "whole"))
    if part is None or whole is None:
        return match[0]
    ends = (
        match["part"][0].isalpha()
        and re.match(r"[\s*_]*(?:[.!?](?=\s|$)|$)", match.string[match.end() :]) is not None
    )
    return f"{part.value}" if ends else f"{part.value} {match['of']}{whole.value}"


def find_number(text: str, letters: bool = True, question: str = "") -> Extraction:
    """The answer of a text whose answer is a number: the last box, else the last stated answer,
    else the last number.

    An answer that is stated after the box, as a sentence, and is another one, replaces the box.
    """
    text = _join_thousands(_named_value(_CALCULATION.sub("", prepare(text))))
    text, otherwise = unify_units(
        _OF_HOW_MANY.sub(_to_digits, _SAID_TWICE.sub(_deduplicate, text)), question
    )
    found = _find_number(text, letters, question)
    if not isinstance(found.value, Fraction) or found.text is None:
        return found
    value = convert_to_requested(found.value, found.text, question) if letters else found.value
    return replace(found, value=value, restated=(*found.restated, *otherwise.get(found.value, ())))


def _find_number(text: str, letters: bool, question: str) -> Extraction:
    box = last_box(text)
    if box.open_box:
        return box
    if box.found is not None:
        value = read_value(box.text or "", letters)
        if value is None and (before := equal_to(text)) is not None:
            value = read_value(before, letters)
        after_box = _statement(text[boxes(text)[0][-1].end :], letters)
        if after_box is not None and after_box.value is not None and after_box.value != value:
            return after_box
        return Extraction(box.text, "asked", value=value)
    stated = (
        _second_thought(text, letters)
        or _statement(text, letters)
        or _first_line_answer(text, letters)
    )
    if stated is not None:
        return stated
    shown, last = read_last(_lines(text[-_ENDING:]), letters, question)
    if (shown is None or _LEFT.search(question)) and (
        none := _zero_answer(text, question)
    ) is not None:
        return none
    return (
        Extraction(shown, "last", value=last, restated=equal_quantities(text[-_SENTENCE:]))
        if shown is not None
        else Extraction(None)
    )


_HOW_MANY = re.compile(r"(?i)\bhow (?:many|much)\b")
_LEFT = re.compile(r"(?i)\b(?:left|remain|remaining)\W*$")
_NO_SUCH = (
    r"(?:none|nothing|no(?! (?:answer|idea|information|solution|way|clue|one)\b)(?: [a-z-]+){1,2}?)"
)
_NONE = re.compile(
    rf"(?i)(?:^|[.!?]\s+|\n|,\s+|\bso\s+)\W*(?P<said>(?:there\s+(?:are|is|were|was)\s+|(?:[a-z]+\s+){{1,2}}(?:has|have|had)\s+)?{_NO_SUCH}"
    r"(?:\s+of\s+(?:them|it))?(?:\s+(?:are|is|were|was|will\s+be))?(?:\s+(?:left|remains?|remaining|over))?)\W*$"
)


def _zero_answer(text: str, question: str) -> Extraction | None:
    """Zero, where the question asks how many and the text ends with `none are left`."""
    said = _NONE.search(text[-_SENTENCE:].strip()) if _HOW_MANY.search(question) else None
    return Extraction(said["said"], "last", value=Fraction(0)) if said is not None else None


_RECONSIDERS = re.compile(
    r"(?i)(?:^|[.!?]\s{1,3}|\n[ \t]*)(?:wait|hold on|hmm+|let me "
    r"(?:reconsider|rethink|recount|recalculate|redo))\b[^\w\n]*"
)


def _second_thought(text: str, letters: bool) -> Extraction | None:
    """The result after the last reconsideration, where that states no answer but ends in `So ...
    = 72`."""
    text = text[-_ENDING:]
    points = list(_RECONSIDERS.finditer(text))
    rest = text[points[-1].end() :] if points else ""
    if not _statements(text[: points[-1].start()] if points else "") or _statements(rest):
        return None
    concluded = re.search(r"(?s).*(?:^|[.!?]\s+|\n)(?:So|Thus|Hence|Therefore)\b,?(.*\d.*)$", rest)
    value = read_last(_lines(concluded[1]), letters)[1] if concluded is not None else None
    return Extraction(rest.strip()[-100:], "phrase", value=value) if value is not None else None


_WORK = re.compile(
    r"\s{0,9}(\S[^\n]{0,60})\n[ "
    r"\t]*\n\W*(?i:work|working|explanation|reasoning|steps|solution|calculation|because)\b"
)


def _first_line_answer(text: str, letters: bool) -> Extraction | None:
    """An answer that is the whole first line, before the work."""
    first = _WORK.match(_lines(text))
    value = read_value(first[1], letters) if first is not None else None
    return (
        Extraction(first[1], "phrase", value=value)
        if first is not None and value is not None
        else None
    )


def last_statement(text: str) -> str | None:
    """The sentence of the last statement of an answer that is not a denial."""
    said = [
        line.strip()
        for _, line, is_denied in _statements(_lines(text))
        if not is_denied and line.strip()
    ]
    return said[-1] if said else None


def _statement(text: str, letters: bool) -> Extraction | None:
    """The last sentence that states an answer. A denial is not a statement; alone, it is one
    without a value."""
    text = _lines(text)
    denied = None
    for _, line, is_denied in reversed(_statements(text)):
        if not has_number(line):
            continue
        instead = re.search(
            r"(?i)(?:[;,.]|\bbut\b)\s*(?:but |rather |it is |it's |it must be |而?是)+(.*)", line
        )
        if is_denied and instead is not None and has_number(instead[1]):
            return Extraction(
                instead[1].strip()[:100], "phrase", value=read_sentence(instead[1], letters)
            )
        if is_denied:
            denied = Extraction(line.strip(), "phrase")
            continue
        value = read_sentence(line, letters)
        if value is None and not re.search(r"\d", line):
            value = read_number_words(line, letters)
        return Extraction(
            line.strip()[:100], "phrase", value=value, restated=equal_quantities(line)
        )
    return denied
