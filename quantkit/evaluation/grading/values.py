"""The single value that an answer states: a number, a constant expression for math-verify, or
nothing.

An answer may be an equation (its numbers must agree), may begin with words ("Total: $18"), and may
have a remark after it. Several values, a bound, a range, a ratio, a free letter: then it states no
value.
"""

import math
import re
from fractions import Fraction

from quantkit.evaluation.grading.notation import exact_angles
from quantkit.evaluation.grading.quantities import read_quantity
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain
from quantkit.evaluation.grading.units import SIGNS

Value = Fraction | str
"""A number, or a LaTeX expression without free letters."""

LONGEST = 300  # characters of an answer that is read; longer ones are not one value

_BOUND = re.compile(r"[<>≤≥≠±]|\\in(?![a-z])|\\\\")
_NOT_A_LABEL = re.compile(r"[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|\\\\")
_RESIDUE = re.compile(r"\s*-?\d+\s*≡([^=≈≡]*mod[^=≈≡]*)$")
_RESIDUE_FIRST = re.compile(r"\s*(-?\d+)\s*≡\s*[A-Za-z]\w?\s*\(?\\?(?:[pb]?mod)\b[^=≈≡]*$")
NUMBER_BEGINS = re.compile(
    rf"(?:(?:minus|negative)\s+|负)?[-+]?\s*(?:[{SIGNS}]\s*)?[-+]?\s*(?:\d|\.\d)"
)
_ARROW = re.compile(r"^(?:=+>|-+>|[→⇒⟹∴])\s*")
_FUNCTION = re.compile(
    r"^\s*\\?(?:Pr|[A-Za-z])\s*\([^()\d]{1,20}(?:[=<>≤≥]\s*\d+)?\)\s*(?==)"
)  # P(X = 2) = 3/8
UNSOLVED = re.compile(
    r"(?:[^\d=]*\s)?(?:\d+\s*[a-z]|\d*\s*[a-z]\s*\^\s*\{?\d+\}?|\|[a-z]\|)\s*=(?=\s*-?[\d.,]+(?:,\s+as\s[a-z "
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r"]+)?\W*$)"
)
"""An equation that leaves a multiple or a power of its one unknown: So 2n = 540."""
# Words in front of a number that make it another number, or no number at all.
CHANGES = re.compile(
    r"(?i)(?<![A-Za-z])(?:not|no|never|neither|nor|cannot|between|somewhere|exceed(?:s|ed|ing)?|divides|surpass(?:es|ed)?|either|or|and|than|least|most|over|under|above|below|beyond|except|other|but"
    r"|half|third|quarter|twice|double|triple|thrice|squared?|cubed?|root|close(?=\s+to)|log|ln|lg|sin|cos|tan|sqrt|exp|floor|ceil|max|min|abs|mod|times|plus"
    r"|multiple|multiples|divided(?!\s+into)|thought|doubt|doubtful|unlikely|wrong|incorrect|january|february|march|april|may|june|july|august|september|october|november|december|dozen|hundred|thousand"
    r"|million|billion|[a-z]+n't|(?<!adds )(?<!add )(?<!sums )(?<!sum "
    r")up\s+to)(?![A-Za-z])|[不非]|[大小多少高低]于|至[少多]|超过"
    r"|(?i:menos|más|moins|plus|weniger|mehr|meno|più|менее|более|меньше|больше)\s+(?:(?:de|als|di|que|чем)\s+)?$|(?i:digits|squares?|cubes?|reciprocal|inverse|root|logarithm)\s+of\s*$|(?i:divisors?|divisible|multiples?|factors?|order)\s+(?:of|by)\s*$"
)
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_COMMANDS = re.compile(
    r"\\(?:[dtc]?frac|d?binom|sqrt|cdot|times|div|log|ln|sin|cos|tan|lfloor|rfloor|lceil|rceil|bmod|infty)(?![A-Za-z])"
)
_TIMES = re.compile(r"(?<=[\d)])\s*(?:x|×|·|\*)\s*(?=[\d(])")


def read_value(text: str, letters: bool = True) -> Value | None:
    """What an answer that is by itself states; `letters`: single letters of known units are
    units (18 m)."""
    if len(text) > LONGEST:
        return None
    shown = exact_angles(_FUNCTION.sub("", _ARROW.sub("", plain(text))))
    if _BOUND.search(shown):
        return None
    either = re.split(r",?\s+or\s+", shown)
    if (
        len(either) == 2
        and (value := read_quantity(either[0], letters)) is not None
        and value == read_quantity(either[1], letters)
    ):
        return value
    residue = _RESIDUE_FIRST.match(shown) or _RESIDUE.match(shown)
    if residue is not None:
        return _single_value(residue[1], letters)
    if UNSOLVED.match(shown):
        return None
    shown = re.sub(r"\(\s*(=[^()]*\d)\s*\)(?=\W*$)", r"\1", shown)  # 160 (= 40 + 120)
    exact, _, about = shown.partition("≈")
    if re.search(r"\d", exact) and re.fullmatch(r"\s*-?\d*\.\d+\W*", about):
        shown = exact
    sides = re.split(r"[=≈≡]", shown)
    return (
        _single_value(shown, letters)
        if len(sides) == 1
        else _equation_value([side for side in sides if side.strip(f" {TEXT}{END_TEXT}")], letters)
    )


def _single_value(shown: str, letters: bool) -> Value | None:
    number = read_quantity(shown, letters)
    if number is None:
        number = _number_after_words(shown, letters)
    return number if number is not None else _expression(shown)


def _equation_value(sides: list[str], letters: bool) -> Value | None:
    """The value of an equation: its plain numbers, which must agree; else its last side, where that
    can be computed."""
    numbers = set()
    for side in sides:
        number = read_quantity(side, letters)
        computed = number if number is not None else _sum_value(side)
        if computed is not None and (number is not None or computed.denominator == 1):
            numbers.add(computed)
        elif _NOT_A_LABEL.search(re.sub(r"\([^()]*\)", "", side)):
            return None
    if numbers:
        return numbers.pop() if len(numbers) == 1 else None
    return _expression(sides[-1]) if sides else None


_SUM = re.compile(r"\s*-?\d{1,9}(?:\s*(?:[-+*×·]|\\cdot|\\times)\s*\d{1,9})+\s*")


def _sum_value(side: str) -> Fraction | None:
    """The value of a side that is a sum or a product of whole numbers: 330 + 55."""
    if not _SUM.fullmatch(side):
        return None
    terms = re.split(r"(?<=\d)\s*(?=[-+])", side.strip())
    factors = [re.findall(r"\d+", term) for term in terms]
    return Fraction(
        sum(
            (-1 if term.startswith("-") else 1) * math.prod(map(int, part))
            for term, part in zip(terms, factors)
        )
    )


_LEADING = re.compile(
    r"(?i)(?:(?:the )?(?:final |correct )?answer(?: is)?:?|it is|there "
    r"(?:are|is)|[a-z]{2,}ly|therefore|thus|so|just),?\s+"
)


def _number_after_words(shown: str, letters: bool) -> Fraction | None:
    """A number after words: `Total: $18`, `The answer is 204`, `Janet makes $18 every day`."""
    begins = NUMBER_BEGINS.search(shown)
    if begins is None:
        words = _LEADING.match(shown)
        return read_quantity(shown[words.end() :], letters) if words else None
    before = shown[: begins.start()].replace(TEXT, " ").replace(END_TEXT, " ")
    before = re.sub(r"(?<=[A-Za-z])'s\b", "", before)
    words_only = re.fullmatch(r"(?:[^\W\d_π]|[\s:,.'\"()\[-])*", before)
    if not before.strip() or words_only is None or CHANGES.search(before):
        return None
    if re.search(r"-\s*[(\[]\s*$", before):  # -(1/2)
        return None
    if (
        re.search(r"(?<![A-Za-z])[A-Za-z]\s*$", before)
        and shown[begins.start() :].lstrip()[0] in "+-"
    ):
        return None
    if any(
        len(word) == 1 and word not in "aAI"
        for word in re.findall(r"[^\W\d_]+", before)
        if not _CJK.match(word)
    ):
        return None
    return read_quantity(shown[begins.start() :].replace(TEXT, " ").replace(END_TEXT, " "), letters)


def _expression(shown: str) -> str | None:
    """`shown` as an expression to compute, where it has digits and no free letter, list, ratio or
    index."""
    text = _TIMES.sub(
        r"\\cdot ", shown.replace("÷", "/").replace("²", "^2").replace("³", "^3").strip(" .$")
    )
    text = re.sub(r"(?<=[\d)])\s*(?=\()", r"\\cdot ", text)
    text = re.sub(r"√\s*(\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\b(\d{1,2})!", lambda match: str(math.factorial(int(match[1]))), text)
    rest = _COMMANDS.sub("#", text)
    is_arithmetic = (
        re.fullmatch(r"[\d\s.+*/^(){}\[\]|#-]*\d[\d\s.+*/^(){}\[\]|#-]*", rest) is not None
    )
    is_whole = is_arithmetic and text.count("{") == text.count("}") and text.count("|") % 2 == 0
    if not is_whole or re.search(r"\d\s+\d|[-+*/^]\s*(?:[+*/^]|$)|^\s*[*/^]", rest):
        return None
    return text
