"""Which option a statement names: by a letter in either case, or by the text of exactly one
option. Several options, or a denial, name none."""

import re

from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SENTENCE = 300
"""Characters of what is said that are looked at."""
NOTHING = "-"
"""What a statement chooses that names several options, or denies the one it names."""

# What may come between "ANSWER:" and the choice itself.
_INTRODUCTION = re.compile(
    r"(?i)^(?:(?:the |my )?(?:final |correct |right |best )*(?:answer|option|choice|letter)(?: "
    r"is)?\s*:?\s*"
    r"|it is |it's |it must be |so |that "
    r"|i(?: would|'d|'ll| will)? (?:say|choose|pick|select|guess|believe|think|answer|go with|opt "
    r"for) |not [A-Za-z] but |是|为|选择?|:\s*"
    r"|(?:la|le|l'|die|der|das|el|il|lo|o|de|den|het|a(?= (?:letra|opção|alternativa)))\s+(?=\S)"
    r"|(?:opción|opção|opzione|optie|lettre|letra|lettera|alternativa|buchstabe|вариант|буква|choix|opsi|seçenek)\s+"
    r"|(?:probably|most "
    r"likely|likely|definitely|clearly|certainly|therefore|thus|then|hence|surely|simply|obviously|indeed|just),? "
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r""
    r")"
)
_DENIAL = re.compile(
    r"(?i)^(?:not|neither|none|nor|anything but|all (?:but|of)|everything "
    r"(?:but|except)|any|both|either|between"
    r"|cannot|never|isn't)(?![A-Za-z])|^不"
)
_LABEL = re.compile(
    r"(?P<open>[(\[{<\"']*)\s*(?P<letter>[A-Za-z])\s*(?P<close>[)\]}>\"']*)(?![A-Za-z0-9']|-[A-Za-z])"
)
_JOINED = re.compile(
    r"(?i)(?:\s*\([^()]*\))?"
    r"[\s\"'\])]*\?*\s*(?:,|/|&|\+|-|\?|;|\||(?:, ?|\()?(?:and/or|and|or|to|as well "
    r"as|maybe|perhaps|possibly)\b|和|或|、)\s*"
    r"(?:also |maybe |perhaps |probably |option |possibly "
    r")?[(\[\"']*(?P<letter>[A-Z])(?![A-Za-z0-9']|\.[A-Za-z])"
    r"(?!\s+(?:is|was|would|could|has|does|[a-z]{2,}s)\b)"
)
_BESIDE = re.compile(r"\s+[(\[]?(?P<letter>[A-Z])(?![A-Za-z0-9'])(?!\s+[a-z])")
_TAKEN_BACK = re.compile(
    r"(?i)\s*(?:is|was|are|seems)(?:\s+(?:not|never|wrong|incorrect|false|impossible)\b|n't\b)"
)
_INSTEAD = re.compile(
    r"(?i)[\s.,;?!…—-]*(?:(?:no|wait|sorry|actually|i mean|or rather)[\s,.:…—-]+)+(?:it's |it is "
    r"|that's |make that |option )?"
    r"(?=[(\[]?(?-i:[A-Z])(?![A-Za-z']))"
)
_SYMBOL = re.compile(
    r"\s*(?:[_^]|=|\([a-z]\)|\([a-z],)"
)  # a letter of a formula: F = ma, F_1, F(x)
_REASON = re.compile(
    r"\s*(?:$|[^\sA-Za-z]|(?:because|since|as|is|was|for|due|which|so|where|rather|not|and "
    r"not|but|being|seems|fits|or|and|to)\b)"
)


def read_choice(said: str, options: list[str]) -> str | None:
    """The letter that `said` chooses; NOTHING where it names options but chooses none of them; None
    where it names no option."""
    said = (
        plain(said[:SENTENCE])
        .replace(TEXT, " ")
        .replace(END_TEXT, " ")
        .strip()
        .strip("\"'")
        .strip()
    )
    for _ in range(3):
        said = _INTRODUCTION.sub("", said).strip()
    by_text = _by_text(said, options)
    if by_text is not None:
        return by_text
    if _DENIAL.match(said):
        return NOTHING
    letters = LETTERS[: len(options)]
    if re.match(rf"[{letters}]{{2,{len(letters)}}}(?![A-Za-z])", said):
        return NOTHING
    label = _LABEL.match(said)
    if label is None or label["letter"].upper() not in letters:
        return None
    letter, rest = label["letter"].upper(), said[label.end() :]
    if (instead := _INSTEAD.match(rest)) is not None:
        return read_choice(rest[instead.end() :], options)
    if letter == "I" and not label["close"] and re.match(r"\s+(?:was|am|have|had|do|did)\b", rest):
        return None
    if (
        not label["close"]
        and (label["letter"] in "AI" or label["letter"].islower())
        and not _REASON.match(rest)
    ):
        return None  # an article or a pronoun
    own = options[ord(letter) - 65]
    if _TAKEN_BACK.match(rest) or (_SYMBOL.match(rest) and not same_option(rest.lstrip(" ="), own)):
        return NOTHING
    if _names_another(letter, rest, letters) or any(
        same_option(rest, other) for other in options if not same_option(other, own)
    ):
        return NOTHING
    return letter


def _names_another(letter: str, rest: str, letters: str) -> bool:
    other = _JOINED.match(rest) or _BESIDE.match(rest)
    if other is None or other["letter"].upper() not in letters or other["letter"].upper() == letter:
        return False
    is_word = other["letter"] in "aAI" and re.match(r"\s+[a-z]|'", rest[other.end() :]) is not None
    return not is_word


def _by_text(said: str, options: list[str]) -> str | None:
    """The option whose whole text is said, alone, before a comma, or with its letter after it."""
    pieces = [said, re.split(r",(?!\d)|[;(]|\.\s|\s-\s", said)[0]]
    for piece in pieces:
        found = [
            number
            for number, option in enumerate(options)
            if len(_normal(option)) > 1 and same_option(piece, option)
        ]
        if len(found) == 1:
            letter = LETTERS[found[0]]
            named = (
                re.search(r"(?:\(|\boption |\bchoice )([A-Z])\b", said[len(piece) - 1 :])
                if piece != said
                else None
            )
            return letter if named is None or named[1] == letter else NOTHING
    return None


def _normal(text: str) -> str:
    return re.sub(
        r"[^\w+*/%<>=^.-]+|(?<=\d)(?=[a-zA-Z])",
        " ",
        plain(text).replace(TEXT, "").replace(END_TEXT, "").lower(),
    ).strip(" .-")


def same_option(a: str, b: str) -> bool:
    return _normal(a) == _normal(b) != ""
