r"""Convert LaTeX and Markdown to plain characters: formatting is removed, meaning is kept.

Text inside \text{} and its like is kept between TEXT and END_TEXT, because a letter there is a word
or a unit, and in mathematics a factor.
"""

import re
import unicodedata

TEXT, END_TEXT = "\x02", "\x03"


_STRUCK = re.compile(r"~~[^~\n]{1,80}~~")


def normalize(text: str) -> str:
    """Without what is struck out; full-width forms to ASCII, other digits to 0-9, typographic
    minus, quotes and spaces to plain ones.

    Not NFKC as a whole: that would turn a superscript into a digit (10² into 102).
    """
    text = _STRUCK.sub("", text)
    return (
        "".join(_normalize_character(character) for character in text)
        if not text.isascii()
        else text
    )


def _normalize_character(character: str) -> str:
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if character in "\u2212\u2013\ufe63\u2010\u2011":
        return "-"
    if "\u24b6" <= character <= "\u24e9":  # letters in a circle
        return unicodedata.normalize("NFKC", character)
    if character == "।":
        return "."
    if character in "\u2018\u2019":
        return "'"
    if character in "\u201c\u201d":
        return '"'
    return (
        " "
        if character in "\u00a0\u202f\u2009\u200a\u2002\u2003\u2005\u2006\u2007\u2008\u3000"
        else character
    )


_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_WORDS = re.compile(
    rf"\\(?:text|textrm|textnormal|textup|mathrm|mbox|hbox|operatorname)\s*{_GROUP}"
)
_LOOKS = re.compile(
    r"\\(?:textbf|textit|textsf|texttt|textsc|mathbf|mathit|mathsf|mathtt|mathcal|mathbb|mathfrak|mathscr|boldsymbol|bm|emph|underline|boxed|fbox|ensuremath|pmb"
    rf"|(?:raisebox|scalebox|rotatebox|overset|underset|stackrel)\{{[^{{}}]*\}}|color\{{[^{{}}]*\}}|textcolor\{{[^{{}}]*\}}|colorbox\{{[^{{}}]*\}}|(?:tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it))\s*{_GROUP}"
)
_GONE = re.compile(
    r"\\(?:phantom|hphantom|vphantom|hspace|vspace|hspace\*|color|label|tag|unicode)\s*\{[^{}]*\}|\\bbox\s*(?:\[[^\[\]]*\])?"
    r"|</?(?:b|i|u|em|strong|span|sup|p|br|mark|div|h[1-6])\b[^<>]*>|</?[A-Za-z_]{4,}>|\[/?[A-Z]{4,}\]"
    r"|\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|textstyle|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|bfseries|bf|rm|it|tt|sf|limits|nolimits|hfill|hss|relax|par|noindent|newline|mathstrut|strut|boldmath|therefore|implies|Rightarrow|Longrightarrow|blacksquare|square|Box|qed|checkmark|surd(?=\s*$))(?![A-Za-z])|\\!"
)
_SPACES = re.compile(
    r"\\(?:[,;:> ]|\s*$|quad(?![a-z])|qquad(?![a-z])|thinspace|enspace|space(?![a-z]))|~"
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])|\\textdegree")
_DELIMITERS = re.compile(
    r"\\[()\[\]]|\\(?:begin|end)\{(?:equation|align|math|displaymath|center|aligned|gathered?|split|array|matrix)\*?\}(?:\{[clr|]*\})?"
    r"|(?<!\\)\$\$"
)
_OVER = re.compile(r"\{?([^{}\\=]{1,60})\\over(?![A-Za-z])([^{}\\=]{1,60})\}?")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_TEXT_RATIO = re.compile(
    rf"\\[dtc]?frac\s*\{{\s*{TEXT}([^{{}}{END_TEXT}]*){END_TEXT}\s*\}}\s*\{{\s*{TEXT}([^{{}}{END_TEXT}]*){END_TEXT}\s*\}}"
)
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s*(?:\\times|\\cdot|\\ast|[×·*x])\s*10\s*(?:\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))|([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))(?![\d.]|\s*[-+]\s*\d)"
)
HIGH = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
"""Raised digits as plain ones."""
VULGAR = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_RELATIONS = {
    r"\approx": "≈",
    r"\simeq": "≈",
    r"\equiv": "≡",
    r"\leq": "≤",
    r"\le": "≤",
    r"\geq": "≥",
    r"\ge": "≥",
    r"\neq": "≠",
    r"\ne": "≠",
}
_RELATIONS |= {
    r"\lt": "<",
    r"\gt": ">",
    r"\pm": "±",
    r"\mp": "±",
    r"\sim": "~",
    r"\to": "→",
    r"\rightarrow": "→",
    r"\pi": "π",
}
_RELATION = re.compile(
    "|".join(
        rf"{re.escape(name)}(?![A-Za-z])" for name in sorted(_RELATIONS, key=len, reverse=True)
    )
)
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{1,2}(?!\d))")
_BRACED_MARK = re.compile(r"(?<=\d)\{([,.])\}|(?<![A-Za-z])\{(-)\}")
_OVERLINED = re.compile(r"(?<![\d.])\\overline\s*\{(\d+)\}(?!\s*(?:\d|\\overline))")
_REPEATING = re.compile(r"(?<![\d.,])(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}(?!\d)")
_ESCAPED = re.compile(r"\\([$%#&_])")
_MARKDOWN = re.compile(
    r"\*\*+|__+|`+|==(?=\S)|(?<=\S)==|(?<![\w}])_(?=[^\s_{])|(?<=[^\s_])_(?![\w{\\])|(?<![\w)])\*(?=[^\s*])|(?<=[^\s*^])\*(?![\w*(])|[✓✔✅☑■□∎]\ufe0f?"
    r"|[\U0001f300-\U0001faff\u2600-\u26ff\u2728\u2b50\u2757]\ufe0f?|(?<=\s)[:;]-?[)D](?=\s|$)"
)


# A command around nothing but a number only dresses it, unless it computes.
_DRESSED = re.compile(
    r"^\s*\\(?!sqrt|[dtc]?frac|d?binom|overline|bar|dot|log|ln|exp|sin|cos|tan|cot|sec|csc|phantom|hphantom|vphantom|neg|not|bcancel|cancel|xcancel|sout)"
    r"[A-Za-z]+\*?\s*\{\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*\}\s*$"
)
_EMPTY = re.compile(r"\\(?:rule|definecolor)(?:\s*\{[^{}]*\})+|\\[A-Za-z]+\s*\{\s*\}")


def plain(text: str) -> str:
    r"""`text` without typesetting: \boxed{\textbf{18 \text{ cm}}} is 18 cm, 1{,}234 is 1,234,
    \frac{1}{2} is 1/2, \leq is ≤.

    Commands that compute (\sqrt, a fraction of more than numbers) are left as they are, and so are
    powers and indices.
    """
    text = normalize(text)
    text = _DRESSED.sub(r"\1", _EMPTY.sub("", text))
    text = _DELIMITERS.sub(
        " ", re.sub(r"\\(?:text|math)dollar(?![a-z])", r"\\$", text).replace(r"\textpercent", r"\%")
    )
    text = _DEGREES.sub("°", text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _BRACED_MARK.sub(lambda match: match[1] or match[2], text)
    text = _SPACES.sub(" ", text)
    text = _REPEATING.sub(_repeating, text)
    text = _OVERLINED.sub(r"\1", _GONE.sub("", _unwrap(text)))
    text = _MARKDOWN.sub("", text)
    text = _TEXT_RATIO.sub(rf"{TEXT}\1/\2{END_TEXT}", text)
    text = _FRACTION.sub(_fraction, over_to_frac(text))
    text = _POWER_OF_TEN.sub(
        lambda match: f"e{match[1] or match[2] or match[3].translate(HIGH)}", text
    )
    text = "".join(f" {VULGAR[c]}" if c in VULGAR else c for c in text)
    text = _RELATION.sub(lambda match: _RELATIONS[match[0]], text)
    return _loose_braces(_ESCAPED.sub(r"\1", text)).strip()


def over_to_frac(text: str) -> str:
    r"""3 \over 4 as \frac{3}{4}."""
    return _OVER.sub(lambda match: rf"\frac{{{match[1].strip()}}}{{{match[2].strip()}}}", text)


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = _LOOKS.sub(r"\1", text)
        text = _WORDS.sub(
            lambda match: (
                f"{TEXT}{match[1]}{END_TEXT}" if re.search(r"[^\W\d_]", match[1]) else match[1]
            ),
            text,
        )
    return text


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2] or "", match[3] or match[4] or ""
    if re.fullmatch(r"\s*-?\d+(?:\.\d+)?\s*", top) and re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", bottom):
        before = match.string[: match.start()].rstrip()
        return f"{' ' if before[-1:].isdigit() else ''}{top.strip()}/{bottom.strip()}"
    return match[0]


def _repeating(match: re.Match[str]) -> str:
    r"""4.\overline{6} is 14/3."""
    once, again = match[2], match[3]
    ninths = (10 ** len(again) - 1) * 10 ** len(once)
    return f"{int(match[1] + once + again) - int(match[1] + once)}/{ninths}"


def _loose_braces(text: str) -> str:
    """Without the braces around a whole or around a plain piece; those of a command, a power or an
    index stay."""
    before = None
    while before != text:
        before = text
        text = re.sub(r"(?<![\^_}\\A-Za-z\]])\{([^{}\\^_]*)\}", r"\1", text)
        text = re.sub(r"^\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*$", r"\1", text)
    return text
