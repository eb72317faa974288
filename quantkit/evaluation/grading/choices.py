"""Find the one option that a reply chooses.

In this order: a line `ANSWER: X` or a box; "the answer is X", "option X is correct", "I choose X";
the last line, where it is an option (`X) its text`, a letter, or the text of one option); the only
letter that the last sentence names. The letter is taken at the option mark and the option's own text
is removed before anything else is read, so words of the options never count as words of the reply.
Several letters, another option's text, or a denial choose nothing; a list of the options repeated is
no choice.
"""

import functools
import re
import string

from quantkit.evaluation.grading.answers import Extraction, Found, boxes, last_box, prepare
from quantkit.evaluation.grading.typesetting import normalize, words

LETTERS = string.ascii_uppercase
NOTHING = "-"
"""What a statement chooses that names several options, or denies the one it names."""

_CUES, _SENTENCE, _ENDING = 50, 1500, 4000
_EMPHASIS = re.compile(r"\*+|__+|`+|(?m:^[ \t]*(?:#+|>|-(?![ \t]*[$\d.]))[ \t]+)|\\[()\[\]]")
_NOUN = (
    r"(?:answers?|ans|choice|option|solution|selection|conclusion|respuesta|réponse|antwort|resposta"
    r"|risposta|ответ|正解|정답|答え)\b\.?[\"']?"
)
_ASKED = re.compile(
    rf"(?i)(?<![A-Za-z/]){_NOUN}\s*(?:[:=]>?|\s?->?\s|(?=\n))\s*"
    rf"|(?im:^[^\w\n]*{_NOUN}\s+(?=[(\[]?[A-Z][)\].]*\s*$))"
    r"|<answer>\s*|(?:答案|选项)\s*[选是为]?\s*:"
)
_PHRASE = re.compile(
    rf"(?i)(?P<if>\bif\b[^.\n]*)?\b(?:{_NOUN})(?:\s+(?:to|of|for|that)\s[^.\n]{{1,60}}?"
    rf"|\s+correct\w?)?\s+(?:(?P<denied>(?:isn't|is not(?! [A-Z]\)? but)|is never|cannot be"
    rf"|can't be)\b)"
    r"|(?:is|must be|should be|would be|will be|es|est|ist|é|è)(?!\w)\s*:?)\s*"
    r"|\b(?:I|we)(?:'d|'ll| would| will)?\s+(?:choose|pick|select|answer|say"
    r"|go with)\s+(?=(?:option\s+|answer\s+)?[(\[]?(?-i:[A-Z])(?![A-Za-z']))"
    r"|答案\s*应?该?[选是为](?!\s*:)|(?<![不能])选择?\s*(?=[A-Z])"
)
_JUDGED = re.compile(
    r"(?<![A-Za-z0-9'])(?<!not )(?<!nor )(?<!either )(?<!or )(?<!over )(?<!if )"
    r"[(\[]?(?P<letter>[A-Z])[)\]]?\s+(?:is|must be)\s+(?:therefore |thus "
    r"|clearly )?(?:the )?"
    r"(?:only |best |right |correct )*(?:correct|right|answer|choice|option)\b(?!,? (?:but|yet))"
)
_INTRODUCTION = re.compile(
    r"(?i)^(?:(?:the |my )?(?:final |correct |right |best )*(?:answer|option|choice"
    r"|letter)(?: is)?\s*:?\s*"
    r"|i(?: would|'d|'ll| will)? (?:say|choose|pick|select|answer|believe|think|go with) "
    r"|not [A-Z]\)? but |i(?:'m| am) (?:going with |confident (?:that )?)|it(?:'s| is| must be"
    r"| has to be) |(?:probably|likely|clearly|definitely|therefore|thus|so),? |是|选|:\s*)+"
)
_DENIAL = re.compile(
    r"(?i)(?:not|never|neither|none|nor|any|anything but|all but|everything (?:but|except)|both"
    r"|either|between|cannot|isn't)\b|^不"
)
_LABEL = re.compile(
    r"(?P<open>[(\[{<\"']*)(?P<letter>[A-Za-z])(?P<close>\s*[)\]}>\"']+|\s?[.:](?=\s"
    r"|$))?(?![A-Za-z0-9'_^]|-[A-Za-z])"
)
_ANOTHER = re.compile(
    r"(?i)(?:\s*\([^()]*\))?[\s\"'\])(]*(?:,|/|&|\+|-|\?+|;|\||\.{3}|(?:and/or|and|or|to"
    r"|as well as|maybe|perhaps|possibly)\b|和|或|、|(?=\s[A-Z]\W*$))"
    r"\s*(?:(?:,|or|no|also|maybe|perhaps|possibly|option)[\s,]+){0,3}[(\[\"']*"
    r"(?P<letter>(?-i:[A-Z]))(?![A-Za-z0-9']|\.[A-Za-z])(?!\s+(?:is|was|would|could|has|does"
    r"|[a-z]{2,}s)\b)"
)
_TAKEN_BACK = re.compile(
    r"(?i)\s*(?:is|was|seems)(?:\s+(?:not|never|wrong|incorrect|false|impossible)\b|n't\b)"
)
_REASON = re.compile(
    r"\s*(?:$|[^\sA-Za-z]|(?:because|since|as|is|for|due|which|so|rather|not|and|but|or)\b)"
)
_FORMULA = re.compile(r"\s*[_^=]|\([a-z]\)")  # F = ma, F(x)


_CONCLUDED = re.compile(
    r"(?:(?i:so|thus|hence|therefore|then|it|that|this|which|he|clearly|is|must be|has to be"
    r"|should be|'s|leaves|leaving|means|only|the|my|best|correct|final"
    r"|option|choice|answer|i'd say|i say|i think"
    r"|,)\s*)*[(\[]?(?P<letter>[A-Z])(?![A-Za-z0-9'_^=])[)\]]?(?=\W*$|[.,:;]?\s+(?:because|since"
    r"|as|-)\s|[,:;]\s)"
)


def find_choice(text: str, options: list[str]) -> Extraction:
    """The letter of the chosen option, by a statement (`asked`, `phrase`) or because the reply ends
    with it (`last`).

    The text is NOTHING where the reply makes a statement that chooses none, and None where it makes
    none at all.
    """
    for option in options:
        if "\n" in option:
            text = text.replace(option, " ".join(option.split()))
    options = [" ".join(option.split()) for option in options]
    reply = " ".join(text.split())
    if len(reply) > 1 and options.count(reply) == 1:  # signs too, which `prepare` takes for bullets
        return Extraction(LETTERS[options.index(reply)], "last")
    text = _EMPHASIS.sub(" ", prepare(text)).replace("$", " ")
    printed = _option_line(text, options) if _is_printed(text, options) else None
    if (whole := printed or _by_text(text, options)) is not None:
        return Extraction(whole, "last")
    ending = text[-_ENDING:]
    # Words of the options are not words of the reply.
    text = "\n".join("" if _is_printed(line, options) else line for line in text.split("\n"))
    for match in [*_ASKED.finditer(text), *_PHRASE.finditer(text)]:
        line = _line(match.string, match.end())
        if _is_printed(line, options):
            text = text.replace(line, _label(line, options)[0])
    box = last_box(text)
    if box.open_box:
        return box
    found: list[tuple[int, Found, str]] = []
    if box.found is not None:
        found.append((boxes(text)[0][-1].start, "asked", box.text or f"not {NOTHING}"))
    kinds: tuple[tuple[re.Pattern[str], Found], ...] = (
        (_ASKED, "asked"),
        (_PHRASE, "phrase"),
        (_JUDGED, "phrase"),
    )
    for pattern, kind in kinds:
        for match in list(pattern.finditer(text))[-_CUES:]:
            said = match["letter"] if pattern is _JUDGED else _line(text, match.end())
            denied = pattern is _PHRASE and match["denied"]
            if "\\boxed" not in said and not (pattern is _PHRASE and match["if"]):
                found.append((match.start(), kind, f"not {said}" if denied else said))
    for _, where, said in sorted(found, reverse=True):
        if (chosen := read_choice(said, options)) is not None:
            return Extraction(chosen, where)
    last = _last_choice(ending, options)
    return Extraction(last, "last") if last is not None else Extraction(None)


def _line(text: str, start: int) -> str:
    """The rest of the line from `start` on, or the next line that is not blank."""
    return text[start : start + _SENTENCE].lstrip().split("\n", 1)[0]


def read_choice(said: str, options: list[str]) -> str | None:
    """The letter that `said` chooses; NOTHING where it names options but chooses none of them; None
    where it names no option."""
    said = re.sub(r"^[^\w(\[{<\\.+-]+", "", said).strip(" \"'»」")
    for shown in (said, words(said).strip(" \"'")):
        for part in (shown, _INTRODUCTION.sub("", shown).strip()):
            if (named := _named(part, options)) is not None:
                return named
    if _DENIAL.match(part):
        return NOTHING
    letter, label, left, printed = _label(part, options)
    if label is None:
        return None
    if not (label["close"] or label["open"] or printed):
        if (label["letter"].islower() or letter in "AI") and not _REASON.match(left):
            return None  # an article, a pronoun or a word
        if _FORMULA.match(left):
            return None
    other = _ANOTHER.match(left)
    if _TAKEN_BACK.match(left) or (
        other and other["letter"] != letter and other["letter"] in LETTERS[: len(options)]
    ):
        return NOTHING
    text = _by_text(left, options)
    return letter if text in (None, letter) else NOTHING


def _named(said: str, options: list[str]) -> str | None:
    """The option that is all that is said: as it was printed, by its text, its text and its
    letter."""
    letter, label, left, printed = _label(said, options)
    if label is not None and printed and not _TOKEN.search(left):
        return letter
    return _by_text(said, options)


def _label(said: str, options: list[str]) -> tuple[str, re.Match[str] | None, str, bool]:
    """The letter that `said` begins with, its match, what follows it without the option's own text,
    and whether that text was there."""
    label = _LABEL.match(said)
    letter = label["letter"].upper() if label else ""
    if label is None or letter not in LETTERS[: len(options)]:
        return "", None, said, False
    rest = said[label.end() :]
    own = _tokens(options[LETTERS.index(letter)])
    found = list(_TOKEN.finditer(rest))
    for first in (0, 1):  # C - its text
        pieces = tuple(match[0].casefold() for match in found[first : first + len(own)])
        if own and pieces == own and (first == 0 or found[0][0] in "-="):
            return letter, label, rest[found[first + len(own) - 1].end() :], True
    return letter, label, rest, False


_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[+/%<>=^-]|[^\w\s\x00-\x7f]")


@functools.lru_cache(maxsize=1024)
def _tokens(text: str) -> tuple[str, ...]:
    """What counts of an option when texts are compared: words, numbers and signs."""
    return tuple(match[0].casefold() for match in _TOKEN.finditer(normalize(text)))


def _by_text(said: str, options: list[str]) -> str | None:
    """The one option whose whole text is said; a single letter is a label, not a text."""
    own = _tokens(said)
    if not own or (len(own) == 1 and len(own[0]) == 1 and own[0].isalpha()):
        return None
    for shown in (str.split, _tokens, lambda text: _tokens(words(text))):
        target = own if shown is not str.split else said.split()
        found = [number for number, option in enumerate(options) if shown(option) == target]
        if found:
            return LETTERS[found[0]] if len(found) == 1 else None
    return None


def _last_choice(text: str, options: list[str]) -> str | None:
    """The choice of a reply without a statement: its last line where that is an option and no item
    of a list of them, else the only letter of its last sentence."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        return None
    marks = [_LABEL.match(line) for line in lines]
    items = [mark["letter"] if mark and mark["close"] else "" for mark in marks]
    last = _option_line(lines[-1], options)
    if last is not None:
        is_item = len(items) > 1 and items[-2] and ord(items[-2]) + 1 == ord(last)
        return None if is_item else last
    first = _option_line(lines[0], options)
    if first is not None and len({item for item in items if item}) < 2:
        return first
    if (whole := _by_text(lines[-1], options)) is not None:
        return whole
    sentence = re.split(r"(?<=[.!?。])\s+", lines[-1])[-1]
    concluded = _CONCLUDED.match(sentence) if len(set(items)) < 3 else None
    if concluded is None or concluded["letter"] not in LETTERS[: len(options)]:
        return None
    rest = sentence[concluded.end() :]
    if concluded["letter"] in "AI" and rest.startswith(","):
        return None
    return read_choice(sentence[concluded.start("letter") :], options)


def _is_printed(line: str, options: list[str]) -> bool:
    """Whether a line is an option as it was printed, letter and text."""
    _, _, left, printed = _label(line.strip(), options)
    return printed and not _TOKEN.search(left)


def _option_line(line: str, options: list[str]) -> str | None:
    """The letter of a line that is nothing but an option: `C`, `(C)`, `C) its text`."""
    for shown in (line.strip(), words(line)):
        letter, label, left, printed = _label(shown, options)
        alone = label is not None and label["letter"].isupper() and not _TOKEN.search(left)
        if label and alone and (printed or label["close"] or not shown[label.end() :].strip(" .")):
            return letter
    return None
