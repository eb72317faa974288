r"""Convert plain-text mathematics (`2√5`, `x² - 7`, `sqrt(5)`, `3 \over 4`, inequalities) to the
LaTeX that math-verify parses."""

import re
from fractions import Fraction

from quantkit.evaluation.grading.typesetting import HIGH, VULGAR, over_to_frac

_SIZES = re.compile(r"\\(?:[bB]igg?[lrm]?|left|right|displaystyle|textstyle)(?![A-Za-z])")
_CHARACTERS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∈": r"\in ",
    "±": r"\pm ",
    "·": r"\cdot ",
    "×": r"\times ",
    "÷": "/",
    "°": r"^\circ ",
    "θ": r"\theta ",
}
_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt(?=\())\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_PI = re.compile(r"(?<![A-Za-z\\{])pi(?![A-Za-z])")
_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\{])(sin|cos|tan|cot|sec|csc|ln|log)(?=\s*\(|\s+[a-z\d\\](?![a-z]))"
)
_MATRIX = re.compile(
    r"\(\s*\\begin\{(?:small)?matrix\}(.*?)\\end\{(?:small)?matrix\}\s*\)", re.DOTALL
)
_PLUS_MINUS = re.compile(r"\+\s*\(\s*-\s*([\w.]+)\s*\)(?!\s*\^)")  # 6 + (-5)i
_PRODUCT = re.compile(r"(?<=[\w)])\s*\*\s*(?=[\w(\\])")


def latex(text: str) -> str:
    """`text` in LaTeX: characters, roots, powers and stars of plain text as commands, without
    commands of size."""
    text = _PLUS_MINUS.sub(r"- \1", _FUNCTIONS.sub(r"\\\1 ", exact_angles(text)))
    text = over_to_frac(_PI.sub(r"\\pi ", _SIZES.sub("", text)))
    text = _MATRIX.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    text = _ROOT.sub(
        lambda match: rf"\sqrt{{{match[1] or match[2]}}}", _PRODUCT.sub(r" \\cdot ", text)
    )
    text = _POWER.sub(lambda match: f"^{{{match[0].translate(HIGH)}}}", text)
    for character, fraction in VULGAR.items():
        text = text.replace(character, r"\frac{{{}}}{{{}}}".format(*fraction.split("/")))
    return "".join(_CHARACTERS.get(character, character) for character in text)


_DEGREES = r"\s*(?:°|\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z]))"
_PI_SIGN = r"(?:\\pi(?![a-z])|π)"
_ANGLE = (
    rf"(?:(?P<degrees>\d{{1,3}}){_DEGREES}|\\[dt]?frac\s*\{{\s*(?P<top>\d*)\s*{_PI_SIGN}\s*\}}\s*\{{\s*(?P<bottom>\d+)\s*\}}"
    rf"|(?P<over>\d*)\s*{_PI_SIGN}\s*/\s*(?P<under>\d+))"
)
_OF_ANGLE = re.compile(
    r"\\?(?<![A-Za-z])(?P<name>sin|cos|tan)\s*(?P<square>\^\s*\{?\s*2\s*\}?)?\s*(?P<open>(?:\\left\s*)?\(|\{)?\s*"
    rf"{_ANGLE}\s*(?(open)(?:(?:\\right\s*)?\)|\}})|(?!\s*(?:[/\d(π^*·×a-zA-Z]|\\(?:pi|cdot|times|[dt]?frac|sqrt)(?![a-z]))))"
)
_SINES = {0: "0", 30: "1/2", 45: r"\sqrt{2}/2", 60: r"\sqrt{3}/2", 90: "1"}
_TANGENTS = {0: "0", 30: r"\sqrt{3}/3", 45: "1", 60: r"\sqrt{3}"}


def exact_angles(text: str) -> str:
    r"""`text` with the sine, cosine and tangent of multiples of 30 and 45 degrees as what they are:
    \sin 30^\circ as (1/2), \cos(\pi/4) as (\sqrt{2}/2). An angle without its degree sign or π is
    one in radians, and stays."""
    return _OF_ANGLE.sub(_exact_value, text)


def _exact_value(match: re.Match[str]) -> str:
    if match["degrees"]:
        angle = Fraction(int(match["degrees"]))
    else:
        times, parts = match["top"] or match["over"] or "1", int(match["bottom"] or match["under"])
        angle = Fraction(180 * int(times), parts) if parts else Fraction(1)
    if angle.denominator != 1:
        return match[0]
    degrees = int(angle)
    value = (
        _tangent(degrees)
        if match["name"] == "tan"
        else _sine(degrees + (90 if match["name"] == "cos" else 0))
    )
    return match[0] if value is None else f"({value})" + ("^2" if match["square"] else "")


def _sine(degrees: int) -> str | None:
    angle = degrees % 360
    value = _SINES.get(min(angle % 180, 180 - angle % 180))
    return f"-{value}" if value not in (None, "0") and angle > 180 else value


def _tangent(degrees: int) -> str | None:
    value = _TANGENTS.get(min(degrees % 180, 180 - degrees % 180))
    return f"-{value}" if value not in (None, "0") and degrees % 180 > 90 else value


_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z])|\\cup(?![a-z]))\s*")
_LESS = re.compile(r"\\leq?(?:slant)?(?![a-z])|<=")
_MORE = re.compile(r"\\geq?(?:slant)?(?![a-z])|>=")
_SIDE = r"[^<>≤≥=,]+?"
_BETWEEN = re.compile(rf"({_SIDE})\s*([<≤])\s*[a-z]\s*([<≤])\s*({_SIDE})")
_BELOW, _ABOVE = (
    re.compile(rf"[a-z]\s*([<≤])\s*({_SIDE})"),
    re.compile(rf"[a-z]\s*([>≥])\s*({_SIDE})"),
)


def intervals(text: str) -> str:
    r"""0 < x \le 5 as (0, 5], x < 2 or x > 3 as (-\infty, 2)\cup(3, \infty); anything else as it
    is."""
    found = [_interval(part.strip()) for part in _OR.split(_MORE.sub("≥", _LESS.sub("≤", text)))]
    return r"\cup".join(part for part in found if part) if all(found) else text


def _interval(text: str) -> str | None:
    if (match := _BETWEEN.fullmatch(text)) is not None:
        return (
            f"{'(' if match[2] == '<' else '['}{match[1]}, "
            f"{match[4]}{')' if match[3] == '<' else ']'}"
        )
    if (match := _BELOW.fullmatch(text)) is not None:
        return rf"(-\infty, {match[2]}{')' if match[1] == '<' else ']'}"
    if (match := _ABOVE.fullmatch(text)) is not None:
        return rf"{'(' if match[1] == '>' else '['}{match[2]}, \infty)"
    return None
