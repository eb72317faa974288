r"""Convert LaTeX and Markdown to plain characters: formatting is removed, meaning is kept.

Text inside \text{} and its like is kept between TEXT and END_TEXT, because a letter there is a word
or a unit, and in mathematics a factor.
"""

import re
import unicodedata

TEXT, END_TEXT = "\x02", "\x03"

_PLAIN = {ord(c): "-" for c in "\u2212\u2013\ufe63\u2010\u2011"}
_PLAIN |= {ord(c): "'" for c in "\u2018\u2019"} | {ord(c): '"' for c in "\u201c\u201d"}
_PLAIN |= {
    ord(c): " " for c in "\u00a0\u202f\u2009\u200a\u2002\u2003\u2005\u2006\u2007\u2008\u3000"
}
_PLAIN |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}


def normalize(text: str) -> str:
    """Full-width forms to ASCII, other digits to 0-9, typographic minus, quotes and spaces to plain
    ones.

    Not NFKC as a whole: that would turn a superscript into a digit (10² into 102).
    """
    if text.isascii():
        return text
    shown = text.translate(_PLAIN)
    return "".join(
        str(unicodedata.digit(c)) if unicodedata.category(c) == "Nd" else c for c in shown
    )


GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
"""A pattern for braces, two deep, with their content as a group."""
_WORDS = re.compile(rf"\\(?:text|textrm|textnormal|textup|mathrm|mbox|hbox|operatorname)\s*{GROUP}")
_LOOKS = re.compile(
    r"\\(?:text(?:bf|it|sf|tt|sc)|math(?:bf|it|sf|tt|cal|bb|frak|scr)|boldsymbol|bm|emph"
    r"|underline|boxed|fbox"
    r"|ensuremath|pmb|(?:color|textcolor|colorbox)\{[^{}]*\}"
    rf"|(?:tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it))\s*{GROUP}"
)
_GONE = re.compile(
    r"\\(?:[hv]?phantom|hspace\*?|color|label|tag)\s*\{[^{}]*\}"
    r"|</?(?:b|i|u|em|strong|span|sup|p|br|mark|div|h[1-6])\b[^<>]*>"
    r"|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|tiny|scriptsize|footnotesize|small"
    r"|normalsize|large|Large|LARGE|huge|Huge|bfseries|bf|rm|it|tt|sf|limits|nolimits|par|noindent"
    r"|newline|therefore|blacksquare|square|qed|checkmark)(?![A-Za-z])|\\!"
)
_SPACES = re.compile(r"\\(?:[,;:> ]|\s*$|q?quad(?![a-z])|thinspace|enspace|space(?![a-z]))|~")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])")
_DELIMITERS = re.compile(
    r"\\[()\[\]]|\\(?:begin|end)\{(?:equation|align|math|displaymath|center|aligned|gathered?)\*?\}"
    r"|(?<!\\)\$\$"
)
_FRACTION = re.compile(
    r"(\d?)\s*\\[dtc]?frac\s*(?:\{\s*(-?\d[\d.,]*)\s*\}|(\d))\s*(?:\{\s*(\d[\d.,]*)\s*\}|(\d))"
)
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s*(?:\\times|\\cdot|[×·*x])\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}"
    r"|([-+]?\d+))(?![\d.]|\s*[-+]\s*\d)"
)
HIGH = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
"""Raised digits as plain ones."""
VULGAR = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_NAMES = (
    "approx ≈ simeq ≈ equiv ≡ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ lt < gt > pm ± mp ± sim ~ to → "
    "rightarrow → pi π"
)
_RELATIONS = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2]))
_RELATION = re.compile(rf"\\({'|'.join(_RELATIONS)})(?![A-Za-z])")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{1,2}(?!\d))")
_BRACED_MARK = re.compile(r"(?<=\d)\{([,.])\}|(?<![A-Za-z])\{(-)\}")
_ESCAPED = re.compile(r"\\([$%#&_])")
_EMPHASIS = re.compile(
    r"\*\*+|__+|`+|(?<![\w}])_(?=[^\s_{])|(?<=[^\s_])_(?![\w{\\])|(?<![\w)*])\*(?=[^\s*])"
    r"|(?<=[^\s*^])\*(?![\w*(])|[✓✔✅☑■□∎]\ufe0f?"
)


def plain(text: str) -> str:
    r"""`text` without typesetting: \boxed{\textbf{18 \text{ cm}}} is 18 cm, 1{,}234 is 1,234,
    \frac{1}{2} is 1/2, \leq is ≤.

    Commands that compute (\sqrt, a fraction of more than numbers) are left as they are, and so are
    powers and indices.
    """
    text = _DECIMAL_COMMA.sub(".", _DELIMITERS.sub(" ", normalize(text)))
    text = _DEGREES.sub("°", text)
    text = _SPACES.sub(" ", _BRACED_MARK.sub(lambda match: match[1] or match[2], text))
    before = None
    while before != text:
        before = text
        text = _WORDS.sub(rf"{TEXT}\1{END_TEXT}", _LOOKS.sub(r"\1", text))
    text = _EMPHASIS.sub("", _GONE.sub("", text))
    text = _FRACTION.sub(_fraction, text)
    text = _POWER_OF_TEN.sub(lambda match: f"e{match[1] or match[2]}", text)
    text = "".join(f" {VULGAR[c]}" if c in VULGAR else c for c in text)
    text = _ESCAPED.sub(r"\1", _RELATION.sub(lambda match: _RELATIONS[match[1]], text))
    return text.strip()


def words(text: str) -> str:
    """`text` without typesetting and without the marks of its words."""
    return plain(text).replace(TEXT, "").replace(END_TEXT, "")


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[2] or match[3], match[4] or match[5]
    return f"{match[1]}{' ' if match[1] else ''}{top}/{bottom}"
