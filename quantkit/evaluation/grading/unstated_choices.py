"""The choice of a reply without a statement: the option that remains, is found right, is
computed, or is the only one named."""

import re

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.answers import find_number
from quantkit.evaluation.grading.options import LETTERS, NOTHING, read_choice, same_option
from quantkit.evaluation.grading.typesetting import plain
from quantkit.evaluation.grading.values import read_value

_ENDING = 2000  # characters at the end of a text that are looked at


def unstated_choice(text: str, options: list[str]) -> str | None:
    """The letter; NOTHING where several options are named last, or one in doubt; None where none is
    named."""
    return (
        _by_elimination(text, LETTERS[: len(options)])
        or _only_option(text, options)
        or _by_value(text, options)
    )


_ALL_WRONG = re.compile(
    r"(?<![A-Za-z0-9'])(?P<letters>[(\[]?[A-Z][)\]]?(?:\s*,\s*(?:(?:and|und|y|et|e)\s+)?[(\[]?[A-Z][)\]]?|\s+(?:and|und|y|et|e|&)\s+[(\[]?[A-Z][)\]]?)+)\s+"
    r"(?:(?:can|could|must)\s+(?:all\s+)?be|are|were|sind|son|sont|sono|são)\s+(?:all\s+|clearly\s+|definitely\s+)?"
    r"(?:wrong|incorrect|false|impossible|ruled\s+out|eliminated|excluded|discarded|not\s+(?:correct|right)|falsch|incorrectas?|falsas?|fausses?"
    r"|incorrectes?|sbagliate|erradas?)(?![a-z])"
)


def _by_elimination(text: str, letters: str) -> str | None:
    """The option that is left where a sentence calls all others wrong, and nothing after it names
    one."""
    found = list(_ALL_WRONG.finditer(text[-_ENDING:]))
    if not found or re.search(
        r"(?<![A-Za-z0-9'])(?:[B-HJ-Z]|A(?!\s+[a-z]))(?![A-Za-z0-9'])",
        text[-_ENDING:][found[-1].end() :],
    ):
        return None
    wrong = set(re.findall(r"[A-Z]", found[-1]["letters"]))
    left = set(letters) - wrong
    return left.pop() if len(left) == 1 and wrong <= set(letters) and len(wrong) > 1 else None


def _by_value(text: str, options: list[str]) -> str | None:
    """Where all options are different numbers without units: what a reply without a letter comes
    to, read as a number."""
    values = [read_value(option) for option in options]
    if any(
        value is None or re.search(r"[^\W\d_]", plain(option))
        for option, value in zip(options, values)
    ):
        return None
    value = find_number(text).value if len(set(values)) == len(values) else None
    return LETTERS[values.index(value)] if value in values else None


_CONCLUSION = re.compile(
    r"(?:\b(?:so|leaves|leaving|hence|thus|therefore|be|is|it's|only|with)|:)\s+(?:option |choice "
    r")?[(\[]?(?P<letter>[A-Z])[)\]]?\W*$"
)
_DOUBT = re.compile(
    r"(?i)\btempt\w*|\bdistract\w*|\btrap\b|\bcross(?:ed)? out\b|\bis out\b|\bfalse\b|\banything "
    r"but\b|\bdoubt"
    r"|\b(?:consider|evaluat|examin|analy[sz]|discuss|look at|check|test)\w*\b|:\s*$"
    r"|\bplausible\b|\b(?:could|might|may) be\b|\btoo\b|\bclose second\b|错误"
    r"|\b(?:not|cannot|n't|neither|nor|wrong|incorrect|except|eliminated?|excluded?|reject(?:ed)?|discard(?:ed)?|ruled? "
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r"out"
    rf"|over|either|or)\b|n't\b|[不非]|排除|{answer_phrases.DENIAL}"
)


_ASKED_AND_DENIED = re.compile(
    r"(?i)(?<![A-Za-z])[(\[]?[A-Z][)\]]?\?\s*(?:no|nope|not quite|wrong)\b[\s,.:;!—-]*"
)
# It is meiosis (B), not mitosis (A).
_CONTRAST = re.compile(
    r"(?i)(?:,\s+(?:(?:and|but)\s+)?(?:not|rather than|instead of)|\s(?:rather than|instead "
    r"of))\s+[^,.;]*(?=\W*$)"
)
_CONCEDED = re.compile(
    r"(?i)(?:(?<=[.!?]\s)|^)(?:(?:even )?though|although|while|whereas|unlike) [^,.\n]*, "
)
_VERDICT_LINE = re.compile(r"(?m)^[^\w\n]*[(\[]?(?P<letter>[A-Z])(?![A-Za-z'])(?P<said>.*)$")
_NEXT_OPTION = re.compile(
    r"(?<=[✗✘❌✓✔✅])\s+(?=[(\[]?[A-Z][)\]]?\s)|(?<=[.;!])\s+(?=(?:[Oo]ption "
    r")?[(\[]?[A-Z][)\]]?(?::|\s+(?:is|was)\s))"
)
_REFUTED = re.compile(
    r"(?i)[❌✗✘✖×]|\b(?:incorrect|wrong|false|no|not|excluded|eliminated|ruled out)\b|n't\b|错误?|不"
)
_AFFIRMED = re.compile(r"(?i)[✅✓✔☑]|\b(?:correct|right|true|yes)\b|正确|对")


def _by_verdicts(text: str, letters: str) -> str | None:
    """The option of a list that goes through all of them and finds one of them right, the others
    wrong; None where it is not such a list."""
    lines = [
        match
        for match in _VERDICT_LINE.finditer(_NEXT_OPTION.sub("\n", text))
        if match["letter"] in letters
    ]
    refuted = {line["letter"] for line in lines if _REFUTED.search(line["said"])}
    affirmed = {line["letter"] for line in lines if _AFFIRMED.search(line["said"])} - refuted
    is_whole = len(refuted) >= max(1, len(letters) - 1)
    is_marked = len(refuted) > 1 and len(refuted) + 1 == len({line["letter"] for line in lines})
    return affirmed.pop() if len(affirmed) == 1 and (is_whole or is_marked) else None


_SET_ASIDE = re.compile(
    r"(?i)(?:^|(?<=[.!?\n]))\W*(?:not|neither)\s+(?P<wrong>[^;—\n]{1,120}?)(?:\s*[;.—]|,?\s+but|\s+-)\s+(?P<chosen>[^;—?\n]+)$"
)


def _by_contrast(text: str, options: list[str]) -> str | None:
    """The choice of a reply that ends in `Not B; C.`: what comes first are options, by letter
    or by text, and after it is another one."""
    said = _SET_ASIDE.search(text)
    if said is None or _DOUBT.search(said["chosen"]):
        return None
    wrong = {
        read_choice(part, options)
        for part in re.split(
            r"(?i),?\s+(?:nor|or|and)\s+(?:not\s+)?|,\s*(?:not\s+)?", said["wrong"]
        )
    }
    chosen = read_choice(said["chosen"].strip(" ."), options)
    return chosen if not {None, NOTHING, chosen} & wrong and chosen != NOTHING else None


def _only_option(text: str, options: list[str]) -> str | None:
    """The choice of a reply without a statement: all that it says, or the only option that its last
    sentence names."""
    if (against := _by_contrast(text[-_ENDING:].strip(), options)) is not None:
        return against
    said = _CONTRAST.sub("", _CONCEDED.sub("", _ASKED_AND_DENIED.sub("", text[-_ENDING:].strip())))
    judged = _by_verdicts(said, LETTERS[: len(options)])
    if judged is not None:
        return judged
    if not re.search(r"\n|[.!?]\s", said[2:]):
        whole = read_choice(said, options)
        conclusion = _CONCLUSION.search(said)
        if (
            conclusion is not None
            and whole not in (None, NOTHING, conclusion["letter"])
            and conclusion["letter"] in LETTERS[: len(options)]
        ):
            return conclusion["letter"]
        if whole not in (None, NOTHING) and len(said) < 120:
            return whole if not _DOUBT.search(said) else NOTHING
    first = said.split("\n", 1)[0].strip()
    if (
        label := re.fullmatch(r"[(\[]?([A-Z])(?:[)\]]?\.?|[)\].:]+\s+(.+))", first)
    ) is not None and (
        label[2] is None or any(same_option(label[2], option) for option in options)
    ):
        return read_choice(first, options)
    bound = re.findall(r"\b[Ll]et ([A-Z]) (?:be|denote|=)", said)
    letters = "".join(letter for letter in LETTERS[: len(options)] if letter not in bound)
    for sentence in reversed(re.split(r"(?<=[.!?。])\s+|\n", said)):
        alone = _CONTRAST.sub("", sentence)
        sentence = alone if _labels(alone, options, letters) else sentence
        named = _labels(sentence, options, letters)
        if named and _is_item(sentence, said):
            return NOTHING
        if named:
            conclusion = _CONCLUSION.search(sentence)
            if len(set(named)) == 1 and not _DOUBT.search(sentence):
                return named[0]
            if (
                conclusion is not None
                and conclusion["letter"] in letters
                and not _DOUBT.search(sentence[conclusion.start() :])
            ):
                joined = re.search(
                    r"(?i)\b(?:or|and|not|over|n't)\s*\W*$", sentence[: conclusion.start("letter")]
                )
                is_left = re.match(
                    r"(?i)\W*(?:so|leav(?:es|ing)|hence|thus|therefore)\b", conclusion[0]
                )
                return (
                    NOTHING
                    if joined or (len(set(named)) == 1 and not is_left)
                    else conclusion["letter"]
                )
            return NOTHING
    return None


def _is_item(sentence: str, text: str) -> bool:
    """Whether the sentence is the next one in a list of options, after that of the letter before:
    the text ends without a choice."""
    item = re.match(r"[(\[]?(?P<letter>[B-Z])[)\].:]+\s", sentence)
    return (
        item is not None
        and re.search(rf"(?<!\w){chr(ord(item['letter']) - 1)}[)\].:]+\s", text) is not None
    )


_FORMULA_BEFORE = re.compile(
    r"(?:[=^*·×]|\w[/+]|\b(?:let|force|point|set|matrix|vector|angle|event|mass|acceleration|energy|temperature|line|plane|function|vitamin|type|vertex))\s*$",
    re.IGNORECASE,
)
_FORMULA_BEHIND = re.compile(r"\s*(?:=(?!=)|[_^*·×]|/\w|\+\s*\w)|\([a-z]\)")


def _labels(sentence: str, options: list[str], letters: str) -> list[str]:
    """Letters of the options that a sentence names, by letter or by text."""
    named = []
    for number, option in sorted(enumerate(options), key=lambda item: -len(item[1])):
        pattern = rf"(?i)(?<!\w){re.escape(option.strip())}(?!\w)"
        if len(option.strip()) > 3 and re.search(pattern, sentence):
            named.append(LETTERS[number])
            sentence = re.sub(pattern, " ", sentence)
    for match in re.finditer(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])", sentence):
        if _FORMULA_BEFORE.search(sentence[: match.start()]) or _FORMULA_BEHIND.match(
            sentence, match.end()
        ):
            continue
        verbs = "is" if match[1] == "I" else "is|was"
        is_word = match[1] in "AI" and re.match(
            rf",?\s+(?!(?:and|or|nor|{verbs})\b)[a-z]", sentence[match.end() :]
        )
        if match[1] in letters and not is_word:
            named.append(match[1])
    return named
