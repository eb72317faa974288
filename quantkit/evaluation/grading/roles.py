"""Which number of a sentence is its claim, as opposed to a year or a circumstance.

A number that a preposition governs (`for 8 hours`, `at $30 an hour`, `in 2030`) says under which
circumstances the claim holds. It goes, where exactly one number is left that nothing governs; else
the sentence stays as it is, and the reader's other rules decide.
"""

import re

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.units import SIGNS

_DIGITS = rf"(?:[-+]\s?)?[{SIGNS}]?\s?\d[\d.,]*(?<![.,])(?:/\d+)?(?:\s?(?:%|[{SIGNS}]))?"
_NUMBER = re.compile(rf"(?<![A-Za-z\d.,^_]){_DIGITS}")
_CALCULATES = re.compile(r"[=<>≤≥≈≡^√|\\]|\d\s*[-+*/×·÷]\s*[$]?\d")

_YEAR = r"(?:1[6-9]|20|21)\d\d(?!\d|[.,:]\d|\s*[%€])"
# With the word for a year; after a preposition alone only where no noun follows that it could
# count: in 2030 ways.
_YEARS = re.compile(
    rf"(?:(?<!\w)(?i:in|by|since|until|till|from|as of|during|{answer_phrases.IN_YEAR})\s+)?"
    rf"(?:(?<!\w)(?i:(?:the\s+)?year|{answer_phrases.YEAR})\s+{_YEAR}|{_YEAR}\s*(?i:{answer_phrases.YEAR_SUFFIX}))"
    rf"|(?<!\w)(?:[Ii]n|[Bb]y|[Ss]ince|[Uu]ntil|[Ss]eit|[Ee]n|[Dd]epuis|[Dd]esde|[Nn]el|[Ee]m)\s+{_YEAR}"
    rf"(?=\s*[,.;:!?)—]|\s*$|\s+(?:[A-Z]|she|he|they|it|we|you|the|will|is|was|are|were|has|had|would|at|when|if|and|{answer_phrases.WILL_BE}))"
    r"(?!\s+and\s+\d)[,、]?"
)

# What is counted, not how many: n ≤ 2024, less than 2024; and what is changed: 20% off the original
# $50.
_RANGE = re.compile(
    rf"(?i)\(?(?<![A-Za-z\d])[a-z]\s?(?:[≤<≥>]|\\[lg]eq?)\s?{_DIGITS}\)?"
    rf"|(?<!\w)(?<!\d )(?:less|greater|smaller|larger|fewer|not\s+exceeding|{answer_phrases.BOUND})"
    rf"(?:\s+(?:or|than|equal|to|{answer_phrases.BOUND}|{answer_phrases.BOUND_JOINS}))*\s+{_DIGITS}"
    rf"|\b(?:off|of|from)\s+(?:the|its|his|her|their)\s+(?:original|regular|initial|old|full|list|previous|starting)\s+(?:\w+\s+)?(?:of\s+)?{_DIGITS}"
    rf"|(?<![\w.,]){_DIGITS}\s+(?:\w+\s+)?(?:में|\w+[dt][ea](?=\s))"
)
_AGAIN = r"(?:an?|per|each|every|pro|par|por)"  # of a rate
_APIECE = r"l['’]un[eoa]?\b|cada(?: un[oa])?\b|chacune?\b|apiece\b"
_GOVERNED = re.compile(
    rf"(?<![\w-])(?P<word>in|for|at|after|before|within|during|with|on|among|per|a|{answer_phrases.PREPOSITIONS}|{answer_phrases.ARTICLES}"
    rf"|{answer_phrases.GERUND}|{answer_phrases.SUBORDINATE_CLAUSE})\s+"
    r"(?:(?:just|only|about|all|each "
    r"of|those|these|the|his|her|their|its|every|another|a|las|los|les|die|den|der)\s+){0,2}"
    rf"(?P<number>{_DIGITS})(?!\s+(?:of|out)\b)(?P<noun>(?:[\s-]+(?!{_AGAIN}\b|{_APIECE})[^\W\d_]+){{0,2}})"
    rf"(?P<rate>\s*(?:\b{_AGAIN}\b|/)\s*[^\W\d_]+|\s+(?:{_APIECE}))?",
    re.IGNORECASE,
)
# What takes its object after a preposition: it comes out at 240, results in 240, ends up with 240,
# sells for 240, a total of 240.
_LEADS = re.compile(
    rf"(?i)\b(?:(?:arriv|result|finish|stand|settl|remain|total|cost)\w*|{answer_phrases.SUMS}|{answer_phrases.COPULA}"
    r"|(?:end|leave|come|sell|buy|go|stay|stop|sit|sum)(?:s|ing|es)?|left|came|sold|bought|went|is|are|was|were|be|been|up|out"
    r"|down|answer|number|value)\s+(?:\w+\s+)?$"
)
_ALSO_BARE = (
    "in",
    "on",
    "after",
    "before",
    "per",
    "bis",
    "hasta",
    "até",
    "fino a",
    "tot",
    "до",
    "sur",
    "su",
    "из",
)
_KNOWN = re.compile(
    r"(?i)\b(?:the(?: (?:other|first|last|remaining))?|these|those|his|her|their|its|all)\s+$"
)


_LONGEST = 600
"""Characters of a sentence that is looked at; patterns take time that grows with its square."""


def strip_circumstances(sentence: str) -> str:
    """The sentence without the years and the governed numbers, where one other number is left."""
    if len(sentence) > _LONGEST:
        return sentence
    without = _YEARS.sub(" ", sentence)
    sentence = without if re.search(r"\d", without) else sentence
    without = re.sub(r"\s+(?=[\s.,;!])", "", _RANGE.sub(" ", sentence))
    sentence = without if len(_NUMBER.findall(without)) == 1 else sentence
    if _CALCULATES.search(sentence) or len(_NUMBER.findall(sentence)) < 2:
        return sentence
    free = re.sub(r"\s+(?=[\s.,;!])", "", _GOVERNED.sub(_circumstance, sentence))
    left = list(_NUMBER.finditer(free))
    if not left and re.search(
        r"(?i)\b(?:two|three|four|five|six|seven|eight|nine|ten|[a-z]{3,}teen|[a-z]{3,5}ty)\b", free
    ):
        return free  # eight buses for the 300 students
    return free if len(left) == 1 and not _KNOWN.search(free[: left[0].start()]) else sentence


def _circumstance(match: re.Match[str]) -> str:
    """A blank instead of a governed number, or the match as it is where the number may be what is
    claimed."""
    if match["rate"]:
        return " "
    word = match["word"].lower()
    is_object = _LEADS.search(match.string[: match.start()]) or re.search(
        r"(?i)\bways?\b", match["noun"]
    )
    is_bare = word not in _ALSO_BARE and " " not in word and not match["noun"]
    is_article = word == "a"  # English; in Spanish and Italian it governs rates
    is_price = word in ("for", "in") and re.search(rf"[{SIGNS}]", match["number"])
    return match[0] if is_object or is_bare or is_article or is_price else " "


_CONDITION = (
    rf"(?:if|when|unless|provided|assuming|otherwise|depending|in case|{answer_phrases.CONDITION})"
)
_BY_CASES = re.compile(
    rf"(?i)\d[^.;]*?\s{_CONDITION}\b[^.]*?(?:,|;|\b(?:and|or|but|while|{answer_phrases.CONJUNCTION})\b)[^.]*?\d[^.]*?\b{_CONDITION}(?!\w)"
    r"|\d[^.;,]*,?\s+or\s+(?:(?:it|he|she|they)\s+\w+\s+)?[$]?\d[\d.,]*(?:\s+[a-z]+)?\s+(?:if|when|unless|depending)\b"
    r"|\bit depends\b|\bdepend(?:s|ing) on (?:whether|how|which|what|if)\b"
)
_SEVERAL = re.compile(
    r"(?i)\b(?:solutions|roots|values|answers|possibilities|candidates)\s+(?:are|were|of [\w ]+ "
    r"are)\s[^.]*?\d[^.]*?(?:\band\b|,)[^.]*?\d"
    r"|\d[^.]*\band\b[^.]*\d[^.]*\bboth\b"
)
_REJECTED = re.compile(
    r"(?i)\b(?:reject|discard|extraneous|exclud|only|invalid|negative|impossible|ignore)\w*|\b(?:so|thus|hence|therefore|sum|product)\b"
)


def has_cases(sentence: str) -> bool:
    """Whether the sentence leaves open which of its numbers holds: `36 if she had her birthday, 35
    otherwise`; `28 and -3, both hold`."""
    if len(sentence) > _LONGEST:
        return False
    is_several = _SEVERAL.search(sentence) is not None and _REJECTED.search(sentence) is None
    return is_several or _BY_CASES.search(sentence) is not None
