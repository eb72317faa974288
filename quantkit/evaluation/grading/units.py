"""What may follow a number without changing it: units and counted things; and currencies on
either side."""

import re

from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT

_CODES = (
    "USD|EUR|GBP|RMB|CNY|JPY|INR|CHF|CAD|AUD|NZD|HKD|SGD|KRW|RUB|BRL|MXN|PLN|SEK|NOK|DKK|CZK"
    "|HUF|TRY|ZAR|THB|VND|IDR|PHP|MYR|ILS|AED|SAR|UAH"
)
SIGNS = r"$£¥\u20a0-\u20cf"
"""Characters of a class in a pattern: signs of currencies."""
CURRENCY = rf"(?:[A-Z]{{1,3}})?[{SIGNS}]|(?:{_CODES}|Rs\.?)(?![A-Za-z])"

_KNOWN = (
    "kg g mg lb lbs oz cm mm km m ft in yd mi mph kmh kph ml mL L l s h hr hrs min mins sec secs "
    "ms J kJ W kW N V kV Hz A GB MB KB TB pm am"
    " ° px sq cu pt qt gal rpm ppm cal kcal pts hp Ft yr yrs wk kr zł Kč lv"
)
_SHORT = "no na em de da do en la le du il di al a an at by he in is it of on so tv we us up"
_OTHERWISE = (
    "and or to not cannot never nor too than except times plus minus over out divided multiplied "
    "mod modulo squared cubed sqrt"
    " root factorial pi half halves third thirds quarter quarters double twice dozen dozens "
    "hundred thousand million billion"
    " trillion below above versus vs least most point tenths hundredths thousandths fifths sixths "
    "sevenths eighths ninths wrong"
    " incorrect impossible fail fails oder und nicht mal ou pas fois или и не раза veces या और से "
    "कम अधिक ज़्यादा"
)
_ONE_LETTER_WORDS = frozenset(
    "aàiwzvkuåвскуо"
)  # prepositions of other languages, before a longer word: 240 kr i veckan
_KNOWN_UNITS, _SHORT_WORDS, _NO_UNIT = (
    frozenset(_KNOWN.split()),
    frozenset(_SHORT.split()),
    frozenset(_OTHERWISE.split()),
)
_LETTER_UNITS = frozenset("mgshLlJWNVACFKмгчлср")
_CJK_RANGE = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_CJK_NO_UNIT = re.compile(
    r"[万萬亿百千十零一二三四五六七八九两倍至到或和与加减乘除以点负]|不(?!同)|또는|아니|아닙"
)
_WORD = re.compile(
    rf"(?P<space>[\s/·.(),'’\"-]*)(?P<word>(?P<cjk>[{_CJK_RANGE}]+)|(?:(?![{_CJK_RANGE}])[^\W\d_πθ²³]|[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963\u0e30-\u0e4e]|Ω)+)(?P<power>\^\s*\{{?[23]\}}?|[²³])?"
)


_PART_OF_A_NAME = re.compile(
    r"\s*(?P<prime>['\"]+)\s*$|-(?:gon|fold|sided|th|digit|bit|dimensional|ary|tuple|cycle)(?![a-z])"
)


def is_unit(text: str, letters: bool) -> bool:
    """Whether `text`, which follows a number, only says what is counted. `letters`: a letter
    can be a unit (18 m)."""
    part = _PART_OF_A_NAME.match(text.replace(TEXT, "").replace(END_TEXT, ""))
    if part is not None and not (letters and part["prime"]):  # 45" are inches
        return False
    shown = text.replace(TEXT, " ").replace(END_TEXT, " ").replace("left over", "leftover")
    quoted = {
        word
        for part in re.findall(f"{TEXT}([^{END_TEXT}]*)", text)
        for word in re.findall(r"[A-Za-z]+", part)
    }
    shown = re.sub(
        r"\s+(?=\^|[²³])",
        "",
        shown.rstrip(" .。,;\"')").removesuffix("^").removesuffix("*").removesuffix("^").rstrip(),
    )
    shown = re.sub(r"\s+", " ", shown)
    if re.search(
        r"\s[^\W\d_]{3}", shown
    ):  # in prose short words are words, too, and a letter is the name of what is counted
        quoted |= set(
            re.findall(
                r"(?<![^\W\d_])[^\W\d_]{2}(?![^\W\d_])|(?:(?<=such )|(?<=of )|(?<=của )|(?<=de "
                r")|(?<=von )|(?<=s ))[a-z]\b",
                shown,
            )
        )
    shown = re.sub(r"(?i)^\s+times$", "", shown)
    position, attached = 0, text[:1] not in (TEXT, " ")
    while position < len(shown.rstrip(" )")):
        match = _WORD.match(shown, position)
        if match is None or not _is_unit_word(
            match, quoted, letters, attached and not match["space"]
        ):
            return False
        position, attached = match.end(), False
    return True


def _is_unit_word(match: re.Match[str], quoted: set[str], letters: bool, attached: bool) -> bool:
    word = match["word"]
    if match["cjk"]:
        return not _CJK_NO_UNIT.search(word.replace("千克", "").replace("千米", ""))
    if word.lower() in _NO_UNIT:
        return False
    if len(word) == 1:
        if (
            not attached
            and match["space"]
            and word in _ONE_LETTER_WORDS
            and re.match(r"\s+[^\W\d_]{3}", match.string[match.end() :])
        ):
            return True
        return (
            word in quoted or (letters and word in _LETTER_UNITS) or (not attached and word == "a")
        )
    if attached:
        return word in _KNOWN_UNITS
    return (
        len(word) > 2
        or word in _KNOWN_UNITS
        or word.lower() in _SHORT_WORDS
        or word in quoted
        or not word.isascii()
    )
