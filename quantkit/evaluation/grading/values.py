r"""The one value that an answer states: a number, or a constant expression that math-verify may compute, or nothing.

An answer may be an equation (its numbers must agree), may begin with words ("Total: $18"), and may have a remark behind it. Several
values, a bound, a range, a ratio, a free letter: then it states no value.
"""

import math
import re
from fractions import Fraction

from quantkit.evaluation.grading import answer_words
from quantkit.evaluation.grading.quantities import begin_quantity, read_quantity
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain
from quantkit.evaluation.grading.units import SIGNS

Value = Fraction | str
"""A number, or a LaTeX expression without free letters."""

LONGEST = 300  # characters of an answer that is read; longer ones are not one value

_BOUND = re.compile(r"[<>≤≥≠±]|\\in(?![a-z])|\\\\")
_NOT_A_LABEL = re.compile(r"[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|\\\\")
_RESIDUE = re.compile(r"\s*-?\d+\s*≡([^=≈≡]*mod[^=≈≡]*)$")
_NUMBER_BEGINS = re.compile(rf"(?:(?:minus|negative)\s+|负)?[-+]?\s*(?:[{SIGNS}]\s*)?[-+]?\s*(?:\d|\.\d)")
_ARROW = re.compile(r"^(?:=+>|-+>|[→⇒⟹∴])\s*")
# Words in front of a number that make it another number, or no number at all.
_CHANGES = re.compile(
    r"(?i)(?<![A-Za-z])(?:not|no|never|neither|nor|cannot|between|either|or|and|than|least|most|over|under|above|below|beyond|except|other|but"
    r"|half|third|quarter|twice|double|triple|thrice|squared?|cubed?|root|close(?=\s+to)|log|ln|lg|sin|cos|tan|sqrt|exp|floor|ceil|max|min|abs|mod|times|plus"
    r"|multiple|multiples|divided|thought|doubt|doubtful|unlikely|wrong|incorrect|january|february|march|april|may|june|july|august|september|october|november|december|dozen|hundred|thousand"
    r"|million|billion|[a-z]+n't|(?<!adds )(?<!add )(?<!sums )(?<!sum )up\s+to)(?![A-Za-z])|[不非]|[大小多少高低]于|至[少多]|超过|到"
)
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_COMMANDS = re.compile(r"\\(?:[dtc]?frac|d?binom|sqrt|cdot|times|div|log|ln|sin|cos|tan|lfloor|rfloor|lceil|rceil|bmod|infty)(?![A-Za-z])")
_TIMES = re.compile(r"(?<=[\d)])\s*(?:x|×|·|\*)\s*(?=[\d(])")


def read_value(text: str, letters: bool = True) -> Value | None:
    """What an answer that stands by itself states; `letters`: single letters of known units are units (18 m)."""
    if len(text) > LONGEST:
        return None
    shown = _ARROW.sub("", plain(text))
    if _BOUND.search(shown):
        return None
    residue = _RESIDUE.match(shown)
    if residue is not None:
        return _alone(residue[1], letters)
    sides = re.split(r"[=≈≡]", shown)
    return _alone(shown, letters) if len(sides) == 1 else _chained([side for side in sides if side.strip(f" {TEXT}{END_TEXT}")], letters)


def _alone(shown: str, letters: bool) -> Value | None:
    number = read_quantity(shown, letters)
    if number is None:
        number = _introduced(shown, letters)
    return number if number is not None else _expression(shown)


def _chained(sides: list[str], letters: bool) -> Value | None:
    """The value of an equation: its plain numbers, which must agree; else its last side, where that can be computed."""
    numbers = set()
    for side in sides:
        number = read_quantity(side, letters)
        if number is not None:
            numbers.add(number)
        elif _NOT_A_LABEL.search(re.sub(r"\([^()]*\)", "", side)):
            return None
    if numbers:
        return numbers.pop() if len(numbers) == 1 else None
    return _expression(sides[-1]) if sides else None


_LEADING = re.compile(
    r"(?i)(?:(?:the )?(?:final |correct )?answer(?: is)?:?|it is|there (?:are|is)|[a-z]{2,}ly|therefore|thus|so|just),?\s+"
)


def _introduced(shown: str, letters: bool) -> Fraction | None:
    """A number behind words: `Total: $18`, `The answer is 204`, `Janet makes $18 every day`."""
    begins = _NUMBER_BEGINS.search(shown)
    if begins is None:
        words = _LEADING.match(shown)
        return read_quantity(shown[words.end() :], letters) if words else None
    before = shown[: begins.start()].replace(TEXT, " ").replace(END_TEXT, " ")
    words_only = re.fullmatch(r"(?:[^\W\d_π]|[\s:,.'\"()\[-])*", before)
    if not before.strip() or words_only is None or _CHANGES.search(before):
        return None
    if re.search(r"(?<![A-Za-z])[A-Za-z]\s*$", before) and shown[begins.start() :].lstrip()[0] in "+-":
        return None
    if any(len(word) == 1 and word not in "aAI" for word in re.findall(r"[^\W\d_]+", before) if not _CJK.match(word)):
        return None
    return read_quantity(shown[begins.start() :].replace(TEXT, " ").replace(END_TEXT, " "), letters)


def _expression(shown: str) -> str | None:
    """`shown` as an expression to compute, where it has digits and no free letter, list, ratio or index."""
    text = _TIMES.sub(r"\\cdot ", shown.replace("÷", "/").replace("²", "^2").replace("³", "^3").strip(" .$"))
    text = re.sub(r"√\s*(\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\b(\d{1,2})!", lambda match: str(math.factorial(int(match[1]))), text)
    rest = _COMMANDS.sub("#", text)
    is_arithmetic = re.fullmatch(r"[\d\s.+*/^(){}\[\]|#-]*\d[\d\s.+*/^(){}\[\]|#-]*", rest) is not None
    is_whole = is_arithmetic and text.count("{") == text.count("}") and text.count("|") % 2 == 0
    if not is_whole or re.search(r"\d\s+\d|[-+*/^]\s*(?:[+*/^]|$)|^\s*[*/^]", rest):
        return None
    return text


# ------------------------------------------------------------------------------------------------------------------ sentences

_NUMBER_WORD = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six"
    r"|seven|eigh|nine)ty|half|a\s+(?:half|quarter|third|dozen|hundred|thousand|million)|dozen)"
)
# Where a sentence goes on behind its number, and the number is over.
_GOES_ON = re.compile(
    rf"[;。；、\n—]|,(?!\s*\d|\s+{_NUMBER_WORD}\s+hundred)|,(?=\s+\d+\sof\s)|\.(?=\s|$)|[!?](?=\s|$)|:(?=\s)|\s-+\s(?=[A-Za-z]{{2}})|</"
    r"|\s(?:because|since|as|which|so|where|when|to(?!\s+(?:[$]?\d|the\s+power))|given|due|for|after|before|by|if|but|while|in|from|with|on|at|that|is|was|are|were|every|each)"
    rf"(?![A-Za-z])|\sand(?![A-Za-z])(?!\s+(?:maybe\s+)?[$]?(?:\d|{_NUMBER_WORD}(?![A-Za-z])))",
    re.IGNORECASE,
)
_REMARK = re.compile(r"\s\((?!\s*(?:or\s|\\?[pb]?mod|dozen|hundred|thousand|million|billion))[^()]*\)")
_FACTORIAL = re.compile(r"(\d)!(?=\s*(?:\$|\\\)))")
_NOT_BUT = re.compile(rf"(?i)^\s*(?:not|nicht|pas|no|não|non|не|nie)\s.{{1,60}}?\s{answer_words.INSTEAD}(?:\srather)?\s")
# What is said instead of the number before it; without a word between them, both are offered.
_INSTEAD = re.compile(
    r"(?i)[;,.?!—\s-]*(?:(?:no|wait|hmm|oh|sorry|actually|rather|or rather|i mean|but)[\s,.:;!—]+)+(?:(?:it|that|this|the answer)"
    r"(?:'s| is| should be| must be)\s+)?(?:actually\s+)?(?=[$]?-?\d)"
)
_OFFERED = re.compile(
    r"(?i)[;?]\s*[$]?-?\d[\d.,]*(?!\d|\s+(?:would|is|was|has|does|misses|counts|ignores|can)\b)"
    r"|,\s*(?:or\s+)?(?:perhaps|maybe|possibly|alternatively)\s+[$]?-?\d"
)
_ROUNDED = re.compile(
    r"(?i)\d,?\s+(?:(?:which|that|and)\s+)?(?:is\s+|can be\s+)?(?:rounds?|rounded|rounding)\s+(?:up\s+|down\s+|off\s+)?to\s+(?:about\s+)?"
    r"(?=[$]?\d)(?!\d+\s+(?:decimal|significant|places|digits))"
)
# What a sentence about a number begins with: "In 3 years, ..."
_SETTING = re.compile(r"(?i)^\s*(?:in|after|for|over|at|with|on|during|within|of|out of|given)\s[^,.;=]*\d[^,.;=]*,\s+(?=.*\d)")
_TAKEN_BACK = re.compile(
    r"(?i)^[\s*.)}\]$\\]*(?:is|are|was|were|can|could|would|seems)?\s*(?:not|n't|never|wrong|incorrect|too\s|false|impossible)"
)


def has_number(text: str) -> bool:
    return re.search(rf"(?i)\d|(?<![A-Za-z]){_NUMBER_WORD}(?![A-Za-z])|[零一二两三四五六七八九十百千万½¼¾]", text) is not None


def read_sentence(text: str, letters: bool = True) -> Value | None:
    """What the sentence `text`, which states the answer, says: its number, if the number is over where the sentence goes on."""
    shown = _FACTORIAL.sub(r"\1 factorial", text[: 2 * LONGEST])
    shown = _REMARK.sub("", re.sub(r"(?:\b[A-Z]{1,3})?\$", " ", plain(shown))) + " "
    shown = _NOT_BUT.sub("", shown).replace(TEXT, " ").replace(END_TEXT, " ")
    shown = _SETTING.sub("", shown)
    if (rounded := _ROUNDED.search(shown)) is not None:
        return read_sentence(shown[rounded.end() :], letters)
    begins = _NUMBER_BEGINS.search(shown)
    start = begins.end() if begins else 0
    goes_on = _GOES_ON.search(shown, start)
    if goes_on is not None:
        if _TAKEN_BACK.match(shown[goes_on.start() :]) or _OFFERED.match(shown, goes_on.start()):
            return None
        if (instead := _INSTEAD.match(shown, goes_on.start())) is not None:
            return read_sentence(shown[instead.end() :], letters)
    core = (shown[: goes_on.start()] if goes_on else shown).strip(" ,.:!\"'*")
    core = core.rstrip("} \"'") if core.count("}") > core.count("{") else core
    return read_value(core, letters) if core else None


_TOKEN = re.compile(r"(?<![\w.])(?:[-+]\s?)?[$€£¥₹]?\s?(?:\d|\.\d)[\d,.'_]*")
_NO_ANSWER_BEFORE = re.compile(
    r"(?:[-+*/^×÷·√:<>≤≥≠±(]|\\[A-Za-z]+\{?|(?<![A-Za-z])(?:or|to|of the|of her|of his|of their)|\d\s*(?:,|and|&))\s*$"
    r"|[不非]是\s*$"
)
_END = r"(?<=[.!?。])(?<!i\.e\.)(?<!e\.g\.)(?<!vs\.)(?<!approx\.)\s+|[\n。]"
# Numbers that only name something, sentences beside the matter, and what is only assumed.
_NAMED = re.compile(
    r"(?i)\b(?:step|attempt|equation|eqn?\.|theorem|lemma|corollary|proposition|problem|question|part|case|page|chapter|section|figure|fig\.|table"
    r"|line|example|exercise|version|method|approach|hint|row)\s*[(#]?\d+(?:\.\d+)*(?![\d/]|[.,]\d|\s*[-+*/^=×])\)?[:.]?"
)
_ASIDE = re.compile(r"(?i)^\s*\(?(?:note|notice|observe|remember)\s+that\b|^\s*\(?for\s+(?:comparison|reference)\b")
_ASSUMED = re.compile(r"(?i)\b(?:where|let|if|suppose|assume|assuming)\s+\w+\s*(?:=|is|be|equals)\s*[$]?-?\d[\d.,]*\s*\.?\s*$")
_ASKED = re.compile(r"(?i)^\s*(?:is|are|was|could|can|would|does|do|should)\s.*\?\s*$")
_CONCLUDES = re.compile(r"(?i)[\s,](?:so|thus|hence|therefore|gives|giving|yields|now|leaving)[\s,]|:\s(?=[$]?\d[^:]*$)")
_DENIED = re.compile(rf"(?i){answer_words.DENIED}(?!.*\s{answer_words.INSTEAD}\s)")


def read_last(text: str, letters: bool = True) -> tuple[str | None, Value | None]:
    """The last number of a text that states no answer, as written and as a value: None where it is part of something else."""
    shown = _NAMED.sub(" ", plain(text).replace("$", " ").replace(TEXT, " ").replace(END_TEXT, " "))
    whole = read_value(shown, letters) if not _DENIED.search(shown) and not _ASSUMED.search(shown) else None
    if whole is not None:
        return shown, whole
    sentences = [part for part in re.split(_END, shown) if re.search(r"\d", part)]
    if not sentences:
        spoken = [part for part in re.split(_END, shown) if has_number(part)]
        return (spoken[-1].strip(), _spoken(spoken[-1], letters)) if spoken else (None, None)
    sentences = [part for part in sentences if not _ASIDE.match(part)] or sentences
    if _ASSUMED.search(sentences[-1]) or _DENIED.search(sentences[-1]) or _ASKED.match(sentences[-1]):
        return sentences[-1].strip(), None
    conclusion = _CONCLUDES.split(sentences[-1])[-1]
    stated = read_sentence(conclusion if re.search(r"\d", conclusion) else sentences[-1], letters)
    if stated is not None:
        return sentences[-1].strip(), stated
    clause = re.split(r"[=≈]", sentences[-1])[-1]
    tokens = list(_TOKEN.finditer(clause))
    if not tokens:
        return None, None
    last = tokens[-1]
    before, token = clause[: last.start()], clause[last.start() :]
    changed = _NO_ANSWER_BEFORE.search(before) or _CHANGES.search(re.split(r"[,;.]\s", before)[-1][-30:])
    return last[0].strip(" ,."), None if changed else read_sentence(token, letters)


def _spoken(sentence: str, letters: bool) -> Fraction | None:
    """`There are eighteen apples left.`"""
    for match in re.finditer(rf"(?i)(?<![A-Za-z-]){_NUMBER_WORD}(?![A-Za-z])", sentence):
        if _CHANGES.search(sentence[: match.start()]):
            return None
        found = begin_quantity(sentence[match.start() :])
        if found is not None:
            value = read_sentence(sentence[match.start() :], letters)
            return value if isinstance(value, Fraction) else None
    return read_quantity(sentence, letters)
