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
from itertools import pairwise

from quantkit.evaluation.grading.answers import Extraction, Found, boxes, last_box, prepare
from quantkit.evaluation.grading.typesetting import normalize, words

LETTERS = string.ascii_uppercase
NOTHING = "-"
"""What a statement chooses that names several options, or denies the one it names."""

_CUES, _SENTENCE = 50, 1500
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


_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[+/%<>=^-]|[^\w\s\x00-\x7f]")
_BETWEEN = r"(?:[^\w+/%<>=^-]|_)*"
_ALONE = re.compile(r"[^\w?+/%<>=^-]*([A-Z])[^\w?+/%<>=^-]*")
"""A line that is nothing but a letter."""


@functools.lru_cache(maxsize=1024)
def _tokens(text: str) -> tuple[str, ...]:
    """What counts of an option when texts are compared: words, numbers and signs."""
    return tuple(match[0].casefold() for match in _TOKEN.finditer(normalize(text)))


@functools.lru_cache(maxsize=64)
def _printed(options: tuple[str, ...]) -> re.Pattern[str]:
    """An option as it is printed: its letter and its own text."""
    found = []
    for letter, option in zip(LETTERS, options):
        own = _TOKEN.findall(normalize(option))
        mark = r"\s?[).\]:}>]" if len("".join(own)) < 3 else ""
        text = _BETWEEN.join(map(re.escape, own))
        if own:
            label = rf"(?<![^\W_]){letter}(?![^\W_]){mark}{_BETWEEN}[-=]?{_BETWEEN}"
            found.append(rf"(?P<{letter}>{label}{text}(?![^\W_])[?!]*)")
    return re.compile("|".join(found) or "(?!)", re.IGNORECASE)


def _marked(text: str, options: list[str]) -> str:
    """The text with (C) for option C where it is printed."""
    return _printed(tuple(options)).sub(lambda match: f"({match.lastgroup})", text)


def find_choice(text: str, options: list[str]) -> Extraction:
    """The letter of the chosen option, by a statement (`asked`, `phrase`) or because the reply ends
    with it (`last`).

    The text is NOTHING where the reply makes a statement that chooses none, and None where it makes
    none at all.
    """
    options = [" ".join(option.split()) for option in options]
    reply = " ".join(text.split())
    if len(reply) > 1 and options.count(reply) == 1:  # signs too, which `prepare` takes for bullets
        return Extraction(LETTERS[options.index(reply)], "last")
    text = _marked(_EMPHASIS.sub(" ", prepare(text)).replace("$", " "), options)
    if (whole := _by_text(text, options)) is not None:
        return Extraction(whole, "last")
    lines = _without_lists([line.strip() for line in text.split("\n") if line.strip()])
    text = "\n".join(lines)
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
            groups = match.groupdict()
            rest = text[match.end() : match.end() + _SENTENCE].lstrip()
            said = groups.get("letter") or rest.partition("\n")[0]
            if "\\boxed" not in said and not groups.get("if"):
                denied = groups.get("denied")
                found.append((match.start(), kind, f"not {said}" if denied else said))
    for _, where, said in sorted(found, reverse=True):
        if (chosen := read_choice(said, options)) is not None:
            return Extraction(chosen, where)
    last = _last_choice(lines, options)
    return Extraction(last, "last" if last else None)


def _items(lines: list[str]) -> list[str]:
    """The letter of every line that begins with one, as an item of a list does; "" of others."""
    labels = (_LABEL.match(line) for line in lines)
    return [label["letter"] if label and label["close"] else "" for label in labels]


def _without_lists(lines: list[str]) -> list[str]:
    """The lines without those that list the options, one letter after the other."""
    follows = [
        bool(one and other) and ord(one) + 1 == ord(other) for one, other in pairwise(_items(lines))
    ]
    listed = [one or other for one, other in zip([False, *follows], [*follows, False])]
    return [line for line, is_item in zip(lines, listed) if not is_item]


def read_choice(said: str, options: list[str]) -> str | None:
    """The letter that `said` chooses; NOTHING where it names options but chooses none of them; None
    where it names no option."""
    said = re.sub(r"^[^\w(\[{<\\.+-]+", "", said).strip(" \"'»」")
    for shown in (said, words(said).strip(" \"'")):
        for part in (marked := _marked(shown, options), _INTRODUCTION.sub("", marked).strip()):
            if (named := _by_text(part, options)) is not None:
                return named
    if _DENIAL.match(part):
        return NOTHING
    label = _LABEL.match(part)
    letter = label["letter"].upper() if label else ""
    if label is None or letter not in LETTERS[: len(options)]:
        return None
    left = part[label.end() :]
    if not (label["close"] or label["open"]):
        if (label["letter"].islower() or letter in "AI") and not _REASON.match(left):
            return None  # an article, a pronoun or a word
        if _FORMULA.match(left):
            return None
    other = _ANOTHER.match(left)
    if _TAKEN_BACK.match(left) or (
        other and other["letter"] != letter and other["letter"] in LETTERS[: len(options)]
    ):
        return NOTHING
    return letter if _by_text(left, options) in (None, letter) else NOTHING


def _by_text(said: str, options: list[str]) -> str | None:
    """The one option whose whole text is said; a single letter is a label, not a text."""
    own = _tokens(said)
    if not own or (len(own) == 1 and len(own[0]) == 1 and own[0].isalpha()):
        return None
    for same in (
        [option.split() == said.split() for option in options],
        [_tokens(option) == own for option in options],
        [_tokens(words(option)) == own for option in options],
    ):
        if any(same):
            return LETTERS[same.index(True)] if sum(same) == 1 else None
    return None


def _last_choice(lines: list[str], options: list[str]) -> str | None:
    """The choice of a reply without a statement: its last line or its first where that is an option,
    else the only letter of its last sentence."""
    if not lines:
        return None
    for line in (lines[-1], lines[0]):
        for shown in (line, _marked(words(line), options)):
            if (alone := _ALONE.fullmatch(shown)) and alone[1] in LETTERS[: len(options)]:
                return alone[1]
    if (whole := _by_text(lines[-1], options)) is not None:
        return whole
    sentence = re.split(r"(?<=[.!?。])\s+", lines[-1])[-1]
    concluded = _CONCLUDED.match(sentence) if len(set(_items(lines)) - {""}) < 3 else None
    if concluded is None or concluded["letter"] not in LETTERS[: len(options)]:
        return None
    if concluded["letter"] in "AI" and sentence[concluded.end() :].startswith(","):
        return None
    return read_choice(sentence[concluded.start("letter") :], options)
