"""Parse what a question asks for: the counted thing, its unit, of whom and when, and the numbers
that the question gives."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.clauses import numbers_of
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain


@dataclass(frozen=True)
class QuestionTarget:
    """`counted`: what is counted (`how many dark chocolates`), its last word the noun; `words`: the
    stems of what is asked; `given`: numbers that the question gives; `circumstances`: of the words
    those after a preposition (`in the afternoon`); `kind`: `$` for money, `%` for a share, `/` for
    a rate; `denied`: how many are not; `another_time`: not now; `when`: after how many years;
    `compares`: by how much; `literal_words`:
    the words of what is asked, as written.
    """

    counted: tuple[str, ...]
    words: frozenset[str]
    given: frozenset[Fraction]
    circumstances: frozenset[str]
    kind: str
    denied: bool
    another_time: bool
    when: bool
    compares: bool
    literal_words: frozenset[str]


# Words that say the same; the first names the class.
_CLASSES = (
    "total altogether together all combined overall sum add adding both entire whole",
    "left leave leaving remain remaining remainder rest still leftover keep kept over",
    "pay paid cost spend spent price charge owe",
    "earn make made income salary wage profit get got receive gain",
    "sell sold sale",
    "buy bought purchase",
    "give gave given",
    "eat ate eaten",
    "use used",
    "drive drove driven",
    "run ran",
    "fast speed mph kmh",
    "far distance",
    "old age",
    "save saving discount",
    "more additional extra",
    "will ll would",
)
_STOP_WORDS = (
    "a an the of in on at to for from by with and or is are was were be been do does did has have "
    "had how many much what which who whom"
    " that this these those it its he she they we you i his her their our your him them there if "
    "as find determine compute calculate"
    " value number amount answer can could should than then so one each every per when where into "
    "out up s be integer positive express"
    " your question please such need needs give"
)
_STOP = frozenset(_STOP_WORDS.split())
_IRREGULAR = {word: words.split()[0] for words in _CLASSES for word in words.split()} | {
    "children": "child",
    "people": "person",
    "feet": "foot",
    "kg": "kilogram",
    "km": "kilometer",
    "g": "gram",
    "cm": "centimeter",
    "lb": "pound",
    "lbs": "pound",
    "oz": "ounce",
    "ft": "foot",
    "min": "minut",
    "mins": "minut",
    "hr": "hour",
    "hrs": "hour",
    "mi": "mile",
    "m": "meter",
}


def stem(word: str) -> str:
    """A word without its English endings; of words that say the same the first."""
    word = word.lower()
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for ending, instead in (
        ("ies", "y"),
        ("ing", ""),
        ("ed", ""),
        ("ly", ""),
        ("es", ""),
        ("s", ""),
    ):
        if word.endswith(ending) and len(word) - len(ending) > 2 and not word.endswith("ss"):
            word = word.removesuffix(ending) + instead
            break
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = word.removesuffix("e") if len(word) > 3 else word
    return word[:-1] if len(word) > 3 and word[-1:] == word[-2:-1] else word


def stems(text: str) -> frozenset[str]:
    """The stems of the words that state something, and `total` and `left` where another language
    says so."""
    found = {
        stem(word)
        for word in re.findall(r"[^\W\d_]+", text.replace("'s ", " "))
        if word.lower() not in _STOP
    }
    if any(
        len(word) > 1 for word in found
    ):  # the letters of a formula count where nothing else is asked
        found = {word for word in found if len(word) > 1}
    found |= {
        name for name, pattern in (("total", _TOTAL), ("left", _LEFT)) if pattern.search(text)
    }
    return frozenset(found)


_TOTAL, _LEFT = (
    re.compile(rf"(?i){answer_phrases.IN_TOTAL}"),
    re.compile(rf"(?i){answer_phrases.REMAINDER}"),
)
_ASKS = re.compile(
    r"(?i)\b(?:how\s+(?:many|much|old|long|far|fast|tall|heavy|big|high|wide|large|often)|what(?:'s)?|which|find|determine|compute|calculate"
    r"|evaluate|give)\b"
)
_COUNTED = re.compile(
    r"(?i)\b(?:how\s+many|number\s+of)\s+"
    r"(?P<noun>(?:(?:more|fewer|less|additional|of)\s+)?(?:[a-z'-]+\s+){0,4}?[a-z'-]+)"
    r"(?=\s+(?:do|does|did|is|are|was|were|will|would|can|could|should|has|have|had|must|in|on|at|for|to|per|a|each|if|that|who|with|of|from"
    r"|left|remain|the|he|she|they|you|needs?|got|go|went|[a-z]+ed)\b|\s*[?,.]|$)"
)
_MONEY = re.compile(
    r"(?i)\bhow\s+much\s+(?:money|profit)\b|\bhow\s+much\b[^.?]*\b(?:pay|cost|spend|spent|earn|make|made|owe|charge|save|money|change|price)\b"
    r"|\bdollars?\b|\b(?:profit|price|cost|income|salary|revenue|earnings|savings|rent)\b"
)
_CIRCUMSTANCE = re.compile(
    r"(?i)\b(?:in|on|at|for|during|by|from|after|before)\s+((?:[a-z]+\s+){0,2}[a-z]+)"
)
_SHARE = re.compile(r"(?i)\bpercent(?:age)?\b|%")
_RATE = re.compile(r"(?i)\b(?:per|speed|rate|how\s+fast)\b")
_ANOTHER_TIME = re.compile(
    r"(?i)\b(?:will|was|were|had|did|ago)\b|\bin\s+(?:the\s+end|\w+\s+(?:years?|months?|weeks?|days?))\b"
)
_COMPARES = re.compile(
    r"(?i)\bthan\b|\bdifference\b|\bcompared\b|\bhow\s+(?:many|much)\s+(?:\w+\s+)?(?:more|fewer|less|[a-z]{3,}er)\b"
)
_WHEN = re.compile(r"(?i)\b(?:in|after|within)\s+how\s+(?:many|long)\b")
NEGATED = re.compile(r"(?i)\b(?:not|never|without)\b|n't\b")


_COEFFICIENT = re.compile(r"\s?[a-z](?![a-z])|\s?\^")  # of x^2 - 12x
_OF_THESE = re.compile(r"(?i)\s+of\s+(?:the|them|these|those|which)\b")


@lru_cache(maxsize=64)
def read_question(question: str) -> QuestionTarget | None:
    """What the last question or request of a text asks for; None where it asks for no number."""
    shown = plain(question).replace("$ ", " ").replace(TEXT, " ").replace(END_TEXT, " ")
    sentences = [part for part in re.split(r"(?<=[.?!])\s+|\n+", shown) if _ASKS.search(part)]
    if not sentences:
        return None
    target = sentences[-1][
        list(_ASKS.finditer(sentences[-1]))[0 if "?" not in sentences[-1] else -1].start() :
    ]
    target = re.split(
        r"(?i),?\s+(?:if|given\s+that|assuming)\s|,\s+(?:rounded|including|excluding|in\s+addition)\b|\?",
        target,
    )[0]
    counted = _COUNTED.search(target)
    nouns = (
        tuple(stem(word) for word in re.findall(r"[^\W\d_]+", counted["noun"]))
        if counted is not None
        else ()
    )
    nouns = tuple(
        noun for noun in nouns if noun not in ("more", "fewer", "les", "of", "total", "left")
    )
    kind = (
        "%"
        if _SHARE.search(target)
        else "$"
        if not nouns and _MONEY.search(target)
        else "/"
        if _RATE.search(target)
        else ""
    )
    if nouns and nouns[-1] in ("dollar", "cent"):
        kind = "$"
    stated_numbers = [
        number
        for number in numbers_of(_OF_THESE.sub("", shown))
        if not _COEFFICIENT.match(number.sentence, number.end)
    ]
    words = stems(target)
    if not words:
        return None
    return QuestionTarget(
        counted=nouns,
        words=words,
        given=frozenset(number.value for number in stated_numbers),
        circumstances=frozenset(
            word for match in _CIRCUMSTANCE.finditer(target) for word in stems(match[1]) & words
        )
        - {"total", "left"},
        kind=kind,
        denied=NEGATED.search(target) is not None,
        another_time=_ANOTHER_TIME.search(target) is not None,
        compares=_COMPARES.search(target) is not None,
        when=_WHEN.search(sentences[-1]) is not None,
        literal_words=frozenset(re.findall(r"[a-z]+", target.lower())),
    )
