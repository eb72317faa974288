"""Parse a number completely or not at all: digits, words or Chinese numerals, then multipliers,
then a unit, then the end.

Values are exact fractions. `read_quantity` wants the number to be everything; `begin_quantity`
reads one at the beginning of a text and says where it ends. A letter next to a number is a factor
(204x) unless it is a unit that is known (18kg).
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT
from quantkit.evaluation.grading.units import CURRENCY, is_unit

LONGEST = 60  # digits of a number; longer ones are not answers

_SIGN = re.compile(
    rf"(?P<sign>(?:minus|negative)[\s{TEXT}{END_TEXT}]+|负|零下|[-+]?)\s*(?:{CURRENCY})?\s*(?P<inner>[-+]?)\s*",
    re.IGNORECASE,
)
_GROUPED = (
    r"\d{1,3}(?:(?P<mark>[,'_ ])\d{3})(?:(?P=mark)\d{3})*(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)"
)
_DIGITS = rf"(?:{_GROUPED}|\d+)(?:\.\d+|\.(?![\d.]))?|\.\d+"
_NUMBER = re.compile(rf"(?P<whole>{_DIGITS})(?:[eE](?P<power>[-+]?\d{{1,3}})(?![\w.]))?")
# A point or a blank at thousands and a comma before decimals; alone, the comma needs what is paid
# or measured next to it.
_COMMA = re.compile(
    rf"(\d{{1,3}}(?:[. ]\d{{3}})+|(?:(?<=€)|(?<=€\s))\d+(?=,\d\d(?!\d))"
    rf"|\d+(?=,00(?!\d)|,\d{{1,2}}\s*(?:%|{CURRENCY})|,\d{{1,2}}\s+(?!(?:and|und|oder|or)\b)"
    r"(?:[^\W\d_]{3}|(?:kg|km|cm|mm|ml|m|g|l|h|[а-я]{1,2})\b)))"
    r",(\d{1,2})(?!\d|,\d)"
)
# 1.500 €: a point at thousands, where what is paid is written with a comma before decimals.
_POINTS = re.compile(
    r"(?:(?<=€)|(?<=€\s)|(?<=R\$)|(?<=R\$\s)|(?=[\d.]+\s*(?:€|(?i:euros?|eur|kr|zł|Kč|lei|tl|pesos|reais|ft|rupiah|đồng|đ)(?![^\W\d_]))))"
    r"(\d{1,3}(?:\.\d{3})+)(?![.\d])"
)
_RATIO = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)(?![\d.]*\s*/|\d)")
_GAP = rf"[\s{TEXT}{END_TEXT}]+"
_MIXED = re.compile(rf"(\d+){_GAP}(?:and{_GAP})?(\d+)\s*/\s*(\d+)(?!\d|\s*/)")

_SCALES = {
    "dozen": 12,
    "dozens": 12,
    "hundred": 100,
    "hundreds": 100,
    "thousand": 1000,
    "thousands": 1000,
    "k": 1000,
    "lakh": 10**5,
}
_SCALES |= {
    "million": 10**6,
    "millions": 10**6,
    "mil": 10**6,
    "mn": 10**6,
    "m": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "billions": 10**9,
}
_SCALES |= {
    "bn": 10**9,
    "b": 10**9,
    "trillion": 10**12,
    "trillions": 10**12,
    "百": 100,
    "千": 1000,
    "万": 10**4,
    "萬": 10**4,
    "亿": 10**8,
}
_SCALE = re.compile(
    rf"[\s{TEXT}{END_TEXT}-]*(?:"
    r"(?P<word>(?:dozens?|hundreds?|thousands?|millions?|billions?|trillions?|lakh|crore|mil(?=\W*$)|mn|bn)(?![A-Za-z])|[kK](?![\w/])"
    r"|(?-i:[MB])(?![\w/]))|(?P<cjk>[百万萬亿]|千(?![克米瓦卡焦])))",
    re.IGNORECASE,
)
_MORE = re.compile(
    rf"{_GAP}and{_GAP}(?:(?:(?P<times>a|one|two|three)[\s-]+)?(?P<part>half|quarter|third)s?(?![A-Za-z])|(?P<count>\d+)(?![\d.,]))",
    re.IGNORECASE,
)
_TIMES = {"two": 2, "three": 3}
_PARTS = {"half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3)}
_SHARES = {
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
_AFTER = re.compile(
    r"\s*(?:%|percent(?![A-Za-z])|per "
    rf"cent(?![A-Za-z])|°\s*{TEXT}?\s*[CFK]?(?![A-Za-z]){END_TEXT}?|º|¢|(?:{CURRENCY})|[.,/]-+(?!\d))"
)
_ORDINAL = re.compile(
    rf"(?:\^\s*\{{?)?\s*{TEXT}?(?:th|st|nd|rd)(?![A-Za-z]){END_TEXT}?\}}?(?![\s{TEXT}]+[A-Za-z])"
)
_SHARE_OF_ANOTHER = re.compile(r"\s*(?:more|less|higher|lower|sure|certain|confident)(?![A-Za-z])")
_CENTS = re.compile(
    r"(?:\s*(?:dollars?|euros?|pounds?))?\s+and\s+(\d{1,2})\s+(?:cents?|pence)(?![A-Za-z])"
)

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NAMES = {name: number for number, name in enumerate(_ONES.split())} | {
    name: 10 * number for number, name in enumerate(_TENS.split(), start=2)
}
_SHARE = re.compile(
    rf"(?P<count>{'|'.join(_ONES.split()[2:10])})[\s-]+(?P<part>{'|'.join(_SHARES)})s(?![A-Za-z])",
    re.IGNORECASE,
)
_SPOKEN_DECIMALS = re.compile(
    rf"\s+point((?:\s+(?:{'|'.join(_ONES.split()[:10])})\b)+)", re.IGNORECASE
)
_WORD_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_WORD = re.compile(r"[\s-]*([A-Za-z]+)")
_AFTER_COMMA = re.compile(rf"(?:[\s-]*|,\s+(?=(?:{'|'.join(_NAMES)})\b))([A-Za-z]+)", re.IGNORECASE)
_CHINESE = re.compile(r"[零〇一二两三四五六七八九十百千万亿]+(?:点[零〇一二三四五六七八九]+)?")
_CHINESE_DIGITS = {c: n for n, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_CHINESE_SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}


@dataclass(frozen=True)
class Quantity:
    """A number at the beginning of a text: its value, and the index of the first character that is
    no longer it."""

    value: Fraction
    end: int


def begin_quantity(text: str) -> Quantity | None:
    """The number that `text` begins with, with its sign, currency, multipliers and percent sign; in
    digits or in words."""
    signed = _SIGN.match(text)
    assert signed is not None
    if signed["sign"] and signed["inner"]:
        return None
    found = _digits(text, signed.end()) or _words(text, signed.end())
    if found is None:
        return None
    found = _apply_multiplier(text, found)
    after = _AFTER.match(text, found.end) or _ORDINAL.match(text, found.end)
    if after is not None and _SHARE_OF_ANOTHER.match(text, after.end()):
        return None
    negative = (signed["sign"].strip() not in ("", "+")) or signed["inner"] == "-"
    return Quantity(-found.value if negative else found.value, after.end() if after else found.end)


def _digits(text: str, start: int) -> Quantity | None:
    if (mixed := _MIXED.match(text, start)) is not None and int(mixed[3]):
        return Quantity(int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3])), mixed.end())
    if (ratio := _RATIO.match(text, start)) is not None and Fraction(ratio[2]):
        return Quantity(Fraction(ratio[1]) / Fraction(ratio[2]), ratio.end())
    if (comma := _COMMA.match(text, start)) is not None:
        return Quantity(Fraction(f"{re.sub('[. ]', '', comma[1])}.{comma[2]}"), comma.end())
    if (points := _POINTS.match(text, start)) is not None:
        return Quantity(Fraction(points[1].replace(".", "")), points.end())
    number = _NUMBER.match(text, start)
    if number is None or len(number["whole"]) > LONGEST:
        return None
    value = Fraction(re.sub(r"[,'_ ]", "", number["whole"]).rstrip("."))
    # The point that ends a sentence is not part of the number.
    return Quantity(
        value * Fraction(10) ** int(number["power"] or 0),
        number.end() - number["whole"].endswith("."),
    )


def _apply_multiplier(text: str, found: Quantity) -> Quantity:
    """With the multipliers after it: 3 million, 2 dozen, 70k, 7万, 1 dozen and 6, 18 and a half."""
    end, scale = found.end, Fraction(1)
    while (match := _SCALE.match(text, end)) is not None:
        scale *= _SCALES[(match["word"] or match["cjk"]).lower()]
        end = match.end()
    smaller = (
        re.compile(r"(\d+)([千百十])?").match(text, end)
        if scale >= 100 and text[end - 1] in "百千万亿"
        else None
    )
    if smaller is not None and int(smaller[1]) < scale:
        part = int(smaller[1]) * {"千": 1000, "百": 100, "十": 10}.get(smaller[2] or "", 1)
        return Quantity(found.value * scale + part, smaller.end())
    return _more(text, Quantity(found.value * scale, end), scale)


def _more(text: str, found: Quantity, scale: Fraction) -> Quantity:
    if scale == 1 and (cents := _CENTS.match(text, found.end)) is not None:
        return Quantity(found.value + Fraction(int(cents[1]), 100), cents.end())
    more = _MORE.match(text, found.end)
    if more is None or (more["count"] and not 0 < int(more["count"]) < scale):
        return found
    if more["count"]:
        return Quantity(found.value + int(more["count"]), more.end())
    return Quantity(
        found.value
        + scale * _TIMES.get((more["times"] or "").lower(), 1) * _PARTS[more["part"].lower()],
        more.end(),
    )


def _words(text: str, start: int) -> Quantity | None:
    """A number in English words or Chinese numerals."""
    chinese = _CHINESE.match(text, start)
    if chinese is not None and len(chinese[0]) <= LONGEST:
        return Quantity(_chinese(chinese[0]), chinese.end())
    if (share := _SHARE.match(text, start)) is not None:
        return Quantity(
            Fraction(_NAMES[share["count"].lower()], _SHARES[share["part"].lower()]), share.end()
        )
    total, group, scale, end, after_and = 0, 0, 1, start, -1
    while (
        match := (_AFTER_COMMA if scale >= 1000 else _WORD).match(text, max(end, after_and))
    ) is not None:
        word = match[1].lower()
        if word in ("a", "an") and end == start:
            following = _WORD.match(text, match.end())
            if following is None or following[1].lower() not in _WORD_SCALES | _PARTS:
                return None
            group = 0
        elif word in _PARTS and total == 0 and group <= 1:
            article = re.compile(r"\s+an?\b(?=\s+[a-z])").match(text, match.end())
            return Quantity(_PARTS[word], article.end() if article else match.end())
        elif word in _NAMES:
            group, scale = group + _NAMES[word], 1
        elif word in _WORD_SCALES:
            group, scale = max(group, 1) * _WORD_SCALES[word], _WORD_SCALES[word]
            if scale >= 1000:
                total, group = total + group, 0
        elif word == "and" and scale >= 100 and after_and <= end:
            after_and = match.end()
            continue
        else:
            break
        end = match.end()
    if end == start:
        return None
    decimals = _SPOKEN_DECIMALS.match(text, end)
    if decimals is not None:
        digits = "".join(str(_NAMES[name.lower()]) for name in decimals[1].split())
        return Quantity(total + group + Fraction(f"0.{digits}"), decimals.end())
    return _more(text, Quantity(Fraction(total + group), end), Fraction(scale))


def _chinese(text: str) -> Fraction:
    """Chinese numerals: positional with their scales (一千二百三十四), or digit by digit (二〇四)."""
    whole, _, decimals = text.partition("点")
    if all(c in _CHINESE_DIGITS for c in whole):
        value = Fraction(int("".join(str(_CHINESE_DIGITS[c]) for c in whole)))
    else:
        total = section = digit = 0
        for c in whole:
            scale = _CHINESE_SCALES.get(c, 0)
            if not scale:
                digit = _CHINESE_DIGITS[c]
            elif scale >= 10**4:
                total, section, digit = (total + section + digit) * scale, 0, 0
            else:
                section, digit = section + max(digit, 1) * scale, 0
        value = Fraction(total + section + digit)
    for place, c in enumerate(decimals, start=1):
        value += Fraction(_CHINESE_DIGITS[c], 10**place)
    return value


_NAMES_OF_IT = re.compile(
    r"(?<=[A-Za-z\x03 ])\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)$"
)  # 72 ordered pairs (a, b)


def read_quantity(text: str, letters: bool = True) -> Fraction | None:
    """The one number that `text` is, with nothing around it but a unit or a remark in brackets, or
    None.

    Reads `$18.00`, `1,234`, `42 apples`, `25%` (as 25), `3 million`, `2 dozen`, `1 1/2`,
    `eighteen`, `七万`; refuses `200+4`, `{5,7}`, `18x`, `18:1`.
    """
    text = _NAMES_OF_IT.sub("", _strip_punctuation(text))
    found = begin_quantity(text)
    if found is None:
        return None
    return _with_remark(found.value, text[found.end :], letters)


def _strip_punctuation(text: str) -> str:
    """Without quotes, brackets around the whole, an opening mark, a full stop."""
    text = text.strip().rstrip("。.").strip()
    if text[:1] in ('"', "'") or not re.search(
        r"\d['\"]+$", text
    ):  # after a bare number a quote is a prime
        text = text.strip("\"'").strip().rstrip("。.").strip()
    before = None
    while before != text:
        before = text
        text = (
            re.sub(rf"^[{TEXT}\s$]+|[{END_TEXT}\s$]+$", "", text)
            if text.count(TEXT) <= 1
            else text.strip(" $")
        )
        text = re.sub(
            r"^(?:\((?!\s*mod)([^()]*)\)|\[([^\[\]]*)\]|\\\{([^{}]*)\\\})$",
            lambda m: m[1] or m[2] or m[3] or "",
            text,
        ).strip()
        text = re.sub(
            r"^(?:≈|~|≡|#(?=\s*\d)|(?:approximately|approx\.?|about|around|roughly|exactly|precisely|nearly|almost)\s)\s*",
            "",
            text,
        )
    return text


_MODULO = re.compile(r"[\s(]*\\?(?:[pb]?mod(?:ulo)?)[\s{]*(\d+)[\s})]*$")
# How many more: what it is compared with is not a number.
_THAN = re.compile(
    r"(?:\s+[a-z]+){0,3}?\s+(?:more|fewer|less|additional|older|younger|taller|shorter|longer|cheaper|further|faster|slower)"
    r"(?:\s+[a-z]+){0,4}?\s+than"
    r"(?!.*(?:\d|\b(?:half|twice|double|triple|one|two|three|four|five|six|seven|eight|nine|ten)\b))\s[^.;?]*\.?",
    re.IGNORECASE,
)
_FROM_ZERO = re.compile(
    r"(?:°|degrees?)?\s*(?:C|F|Celsius|Fahrenheit)?\s*(?P<side>above|below)\s+zero\W*",
    re.IGNORECASE,
)
_BASE_TEN = re.compile(rf"^_\s*\{{?\s*(?:10|{TEXT}?ten{END_TEXT}?)\s*\}}?")
_REMARK = re.compile(r"^(?P<unit>[^()]*)\((?P<remark>[^()]*)\)\s*\.?$")


def _with_remark(value: Fraction, rest: str, letters: bool) -> Fraction | None:
    rest = _BASE_TEN.sub(
        "", rest.replace("\\pmod", " mod").replace("\\bmod", " mod").replace("\\mod", " mod")
    )
    modulo = _MODULO.fullmatch(rest.replace(TEXT, "").replace(END_TEXT, ""))
    if modulo is not None:
        return value % int(modulo[1]) if int(modulo[1]) else None
    if (from_zero := _FROM_ZERO.fullmatch(rest.strip())) is not None and value >= 0:
        return value if from_zero["side"].lower() == "above" else -value
    if (
        not rest
        or is_unit(rest, letters)
        or (letters and _THAN.fullmatch(rest.replace(TEXT, " ").replace(END_TEXT, " ")))
    ):
        return value
    remark = _REMARK.match(rest.replace(TEXT, " ").replace(END_TEXT, " "))
    if remark is None or not is_unit(f" {remark['unit']}", letters):
        return None
    again = begin_quantity(remark["remark"].strip())
    if again is not None:
        return (
            value
            if again.value == value and is_unit(remark["remark"].strip()[again.end :], letters)
            else None
        )
    return value if is_unit(f" {remark['remark']}", letters) else None


def canonical(number: Fraction) -> str:
    """One spelling per value, for votes: 18.00 and 18 are the same. Decimals where they end, else a
    ratio."""
    if number.denominator == 1:
        return str(number.numerator)
    rest, places = number.denominator, 0
    while rest % 10 == 0 or rest % 2 == 0 or rest % 5 == 0:
        rest, places = rest // (10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5), places + 1
    if rest != 1 or places > LONGEST:
        return f"{number.numerator}/{number.denominator}"
    scaled = abs(number.numerator) * 10**places // number.denominator
    whole, decimals = divmod(scaled, 10**places)
    return f"{'-' if number < 0 else ''}{whole}.{decimals:0{places}d}".rstrip("0")
