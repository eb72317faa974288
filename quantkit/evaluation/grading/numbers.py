r"""Read a number whole or not at all.

A text is split into numbers once (`numbers`): sign, currency, digits with thousands marks, fraction,
mixed number, power of ten, multiplier, percent. An answer (`read_value`) is one of them with nothing
around it but words before it and a unit after it, an equation that agrees with itself, or an
arithmetic expression, which is left to math-verify. Values are exact fractions. Several values, a
bound, a range, a ratio, a letter as a factor (204x): no value.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain

Value = Fraction | str
"""A number, or a LaTeX expression without free letters."""

LONGEST = 300  # characters of an answer that is read; longer ones are not one value
_DIGITS = 60  # digits of a number; longer ones are not answers

_SIGNS = r"$£¥\u20a0-\u20cf"
_CODES = "USD|EUR|GBP|RMB|CNY|JPY|INR|CHF|CAD|AUD|NZD|HKD|SGD|KRW|RUB|BRL|MXN|PLN|SEK|NOK|DKK|CZK|HUF|TRY"
_CURRENCY = rf"(?:[A-Z]{{1,3}})?[{_SIGNS}]|(?:{_CODES}|Rs\.?)(?![A-Za-z])"
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "k": 1000, "千": 1000, "万": 10**4}
_SCALES |= {"million": 10**6, "m": 10**6, "亿": 10**8, "billion": 10**9, "b": 10**9}
_SCALES |= {"trillion": 10**12}
_GAP = rf"[\s{TEXT}{END_TEXT}]"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.])(?P<sign>[-+]\s?|(?i:minus|negative){_GAP}+"
    rf"|负)?(?:(?:{_CURRENCY})\s?)?(?P<inner>-\s?)?(?:[{_SIGNS}]\s?)?"
    rf"(?:(?P<mixed>\d+){_GAP}+(?:and\s+)?(?=\d+\s?/\s?\d))?"
    r"(?P<digits>\d{1,3}(?: \d{3})+(?![\d-])|\d[\d,.'_]*|\.\d+)(?:[eE](?P<power>[-+]?\d{1,3})(?!\w))?"
    r"(?:\s?/\s?(?P<bottom>\d+(?:\.\d+)?)(?!\d))?(?P<ordinal>(?:st|nd|rd|th)(?![A-Za-z]))?"
    rf"(?:{_GAP}*-?(?P<scale>(?i:dozen|hundred|thousand|[mbtr]{{1,2}}illion)s?(?![A-Za-z])"
    rf"|[kKMB](?![\w/])|[万亿]|千(?![克米瓦])){END_TEXT}?)?"
    rf"(?P<percent>{_GAP}*(?:%|percent(?![A-Za-z])){END_TEXT}?)?(?:{_GAP}?[{_SIGNS}¢])?"
)
_WRITTEN = re.compile(
    r"\d+(?:\.\d+)?|\.\d+|\d{1,3}(?P<mark>[,'_ ])\d{3}(?:(?P=mark)\d{3})*(?:\.\d+)?"
    r"|\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?"
)


@dataclass(frozen=True)
class Number:
    """A number in a text: its value (None where its digits are not written as one), where it
    stands, and whether it is a percentage."""

    value: Fraction | None
    start: int
    end: int
    percent: bool = False


def numbers(text: str) -> Iterator[Number]:
    """The numbers of plain text, in order; ordinals (18th) are none."""
    for match in _NUMBER.finditer(text):
        if not match["ordinal"]:
            yield _number(match)


def _number(match: re.Match[str]) -> Number:
    # The point or comma that ends a sentence is not part of the number.
    digits, end = match["digits"].rstrip(".,'_"), match.end()
    if match.end("digits") == end:
        end -= len(match["digits"]) - len(digits)
    if not _WRITTEN.fullmatch(digits) or len(digits) > _DIGITS:
        return Number(None, match.start(), end)
    value = Fraction(re.sub(r"[,'_ ]", "", digits)) * Fraction(10) ** int(match["power"] or 0)
    if match["bottom"]:
        if not Fraction(match["bottom"]):
            return Number(None, match.start(), end)
        value = int(match["mixed"] or 0) + value / Fraction(match["bottom"])
    scale = (match["scale"] or "").lower()
    value *= _SCALES.get(scale.removesuffix("s"), 1)
    negative = (match["sign"] or "+").strip() != "+"
    negative = negative or match["inner"] is not None
    return Number(-value if negative else value, match.start(), end, bool(match["percent"]))


_UNITS = (
    "kg g mg lb lbs oz cm mm km m ft in yd mi mph kmh kph ml mL L l s h hr hrs min mins sec secs ms J "
    "kJ W kW N V kV Hz A GB MB KB TB pm am ° °C °F px sq cu pt qt gal rpm ppm cal kcal pts hp yr yrs wk"
)
_SHORT = "no na em de da do en la le du il di al a an at by he in it is of on so we us"
_OTHERWISE = (
    "and or to not cannot never nor too than except times plus minus over out divided multiplied mod "
    "modulo squared cubed sqrt root factorial pi half halves third thirds quarter quarters double twice "
    "dozen hundred thousand million billion trillion below above versus vs least most point tenths "
    "hundredths thousandths wrong incorrect impossible fails fail bn mn lakh crore"
)
_KNOWN_UNITS, _SHORT_WORDS = frozenset(_UNITS.split()), frozenset(_SHORT.split())
_NO_UNIT, _LETTER_UNITS = frozenset(_OTHERWISE.split()), frozenset("mgshLlJWNVACFK")
_UNIT_WORD = re.compile(
    rf"(?P<lead>[\s/·.,'’\"(){TEXT}-]*)(?P<word>°?[^\W\d_π²³]+"
    rf"|°){END_TEXT}?(?:\s*\^\s*\{{?[23]\}}?|[²³])?"
)
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")


def is_unit(text: str, letters: bool) -> bool:
    """Whether `text`, which follows a number, only says what is counted. `letters`: a letter can be
    a unit (18 m)."""
    shown = text.rstrip(" .。,;\"')").replace("left over", "leftover")
    parts = list(_UNIT_WORD.finditer(shown))
    said = "".join(part[0] for part in parts)
    if said.rstrip(f"{TEXT}{END_TEXT} ") != shown.rstrip(f"{TEXT}{END_TEXT} "):
        return False
    prose = re.search(r"\s[^\W\d_]{3}", shown) is not None
    for part in parts:
        word, place = part["word"], part.start("word")
        attached = place == 0 and word.isalpha()
        quoted = shown.count(TEXT, 0, place) > shown.count(END_TEXT, 0, place)
        if _CJK.match(word):
            continue
        if len(word) == 1:
            known = quoted or word == "°" or (word == "a" and prose)
            known |= letters and word in _LETTER_UNITS and (word, attached) != ("m", True)
        else:
            is_prose = len(word) > 2 or quoted or prose or word.lower() in _SHORT_WORDS
            known = word in _KNOWN_UNITS or (is_prose and not attached)
        if not known or word.lower() in _NO_UNIT:
            return False
    return True


_BOUND = re.compile(r"[<>≤≥≠±]|\\in(?![a-z])|\\\\")
# Words before a number that make it another number, or no number at all.
CHANGES = re.compile(
    r"(?i)(?<![A-Za-z])(?:not|no|never|neither|nor|cannot|between|somewhere|exceed\w*|divides"
    r"|either|or|and|than|least|most"
    r"|over|under|above|below|beyond|except|other|but|half|third|quarter|twice|double|triple"
    r"|squared?|cubed?|root|close(?=\s+to)"
    r"|log|ln|sin|cos|tan|sqrt|exp|floor|ceil|max|min|abs|mod|times|plus|multiples?|divided"
    r"|thought|doubt|unlikely|wrong"
    r"|incorrect|if|january|february|march|april|may|june|july|august|september|october|november"
    r"|december"
    r"|hundred|thousand|million|billion|[a-z]+n't|up\s+to|(?:digits|squares?|cubes?|reciprocal"
    r"|inverse|factors?|order|divisors?|divisible)\s+(?:of|by)\s*$)(?![A-Za-z])"
    r"|[不非]|[大小多少高低]于|至[少多]|超过"
)
_FUNCTION = re.compile(r"^\s*\\?(?:Pr|[A-Za-z])\s*\([^()]{1,20}\)\s*(?==)")  # P(X = 2) = 3/8
_HALF = re.compile(rf"{_GAP}*(?<![A-Za-z])(?:and\s+)?(?:an?|one)\s+half(?![A-Za-z]){END_TEXT}?")
_LISTED = re.compile(r"[,;]|(?<![A-Za-z])or(?![A-Za-z])")
_UNSOLVED = re.compile(  # 2n = 540
    r"(?:\d\s*[a-z]|[a-z]\s*\^\s*\{?\d+\}?|\|[a-z]+\|)\s*=\s*-?[\d.,]+\W*$"
)
_BEFORE = re.compile(r"(?:[^\W\d_π]|[\s:,.'\"()\[-])*")
_AROUND = f" \t\n$。{TEXT}{END_TEXT}"


def read_value(text: str, letters: bool = True) -> Value | None:
    """What an answer that is by itself states; `letters`: single letters of known units are units
    (18 m)."""
    shown = _FUNCTION.sub("", plain(text))
    if len(text) > LONGEST or _BOUND.search(shown):
        return None
    exact, approximate, _ = shown.partition("≈")
    shown = exact if approximate and any(numbers(exact)) else shown
    shown = _HALF.sub(" 1/2", shown)
    if _UNSOLVED.search(shown):
        return None
    shown = NAMES.get(shown.strip(_AROUND).lower(), shown).rpartition("≡")[2]
    sides = [side for side in re.split(r"=+>?|≈", shown.lstrip("→⇒ ")) if side.strip(_AROUND)]
    values = [_single(side, letters) for side in sides]
    if any(value is None and _LISTED.search(side) for value, side in zip(values, sides)):
        return None
    found = {value for value in values if value is not None}
    if found:
        return found.pop() if len(found) == 1 else None
    if not sides:
        return None
    return _expression(sides[-1])


def _single(side: str, letters: bool) -> Fraction | None:
    """The number of one side of an equation, where it is one: words before it, a unit after it."""
    found = next(numbers(side), None)
    if found is None or found.value is None:
        return None
    before, rest = side[: found.start].translate({2: " ", 3: " "}), side[found.end :]
    if CHANGES.search(before) or not _BEFORE.fullmatch(before):
        return None
    if re.search(r"(?:-|(?<!\w)[^\W\d])[\s(\[]*$", before) and not _CJK.search(before):  # x + 204
        return None
    return found.value if is_unit(rest, letters) else None


_SPOKEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
NAMES = {name: str(number) for number, name in enumerate(_SPOKEN.split())}


_COMMANDS = re.compile(
    r"\\(?:[dtc]?frac|d?binom|sqrt|cdot|times|div|log|ln|sin|cos|tan|lfloor|rfloor|lceil|rceil"
    r"|pi)(?![A-Za-z])"
)
_ARITHMETIC = re.compile(r"[\d\s.+*/^(){}\[\]|#-]*\d[\d\s.+*/^(){}\[\]|#-]*")


def _expression(shown: str) -> str | None:
    """`shown` as an expression to compute, where it has digits and no free letter, list, ratio or
    index."""
    text = shown.replace("÷", "/").replace("²", "^2").replace("³", "^3").strip(" .$")
    text = re.sub(r"(?<=[\d)])\s*(?:[x×·*]\s*(?=[\d(])|(?=\())", r"\\cdot ", text)
    if "\\sin" in text or "\\cos" in text or "\\tan" in text:
        text = re.sub(r"\(?(\d+)\s*°\)?", r"(\\frac{\1π}{180})", text)
    text = re.sub(r"√\s*(\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = text.replace("π", r"\pi ")
    rest = _COMMANDS.sub("#", text)
    is_whole = text.count("{") == text.count("}") and text.count("|") % 2 == 0
    return (
        text
        if is_whole and _ARITHMETIC.fullmatch(rest) and not re.search(r"\d\s+\d", rest)
        else None
    )


def canonical(number: Fraction) -> str:
    """One spelling per value, for votes: 18.00 and 18 are the same. Decimals where few are enough,
    else a ratio."""
    shown = f"{float(number):.12f}".rstrip("0").rstrip(".") if abs(number) < 10**9 else ""
    return shown if shown and Fraction(shown) == number else str(number)
