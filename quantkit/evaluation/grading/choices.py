r"""Finding the one option that a reply chooses: a letter in either case, or the text of exactly one option.

A statement is a line `ANSWER: X`, a box, "the answer is X", "option X is correct", "I choose X" and the like. The last one counts. One that
names several letters, or a letter with the text of another option, or denies what it names, chooses nothing.
"""

import re

from quantkit.evaluation.grading import answer_words
from quantkit.evaluation.grading.answers import Extraction, Found, boxes, find_number, last_box, prepared
from quantkit.evaluation.grading.closings import refuses
from quantkit.evaluation.grading.typesetting import END_TEXT, TEXT, plain
from quantkit.evaluation.grading.values import read_value

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CUES, _SENTENCE = 50, 300  # statements of a text that are looked at, the last ones, and characters of each
_ENDING = 2000  # characters at the end of a text that makes no statement
NOTHING = "-"
"""What a statement chooses that names several options, or denies the one it names."""


def find_choice(text: str, options: list[str]) -> Extraction:
    """The letter of the chosen option, by a statement (`asked`, `phrase`) or because the reply names no other (`last`).

    The text is NOTHING where the reply makes a statement that chooses none, and None where it makes none at all.
    """
    text = _SUFFIX.sub("", _BY_NUMBER.sub(_by_letter, _EMPHASIS.sub("", prepared(text))))
    box = last_box(text)
    if box.open_box:
        return box
    statements = _statements(text)
    if box.found is not None:
        statements.append((boxes(text)[0][-1].start, "asked", box.text or f"not {NOTHING}"))
    for _, where, said in sorted(statements, reverse=True):
        chosen = read_choice(said, options)
        if chosen is not None:
            return Extraction(chosen, where)
    if refuses(text) and not any(refuses(option) for option in options):
        return Extraction(NOTHING, "last")
    alone = _left(text, LETTERS[: len(options)]) or _alone(text, options) or _by_value(text, options)
    return Extraction(alone, "last") if alone is not None else Extraction(None)


_ALL_WRONG = re.compile(
    r"(?<![A-Za-z0-9'])(?P<letters>[(\[]?[A-Z][)\]]?(?:\s*,\s*(?:(?:and|und|y|et|e)\s+)?[(\[]?[A-Z][)\]]?|\s+(?:and|und|y|et|e|&)\s+[(\[]?[A-Z][)\]]?)+)\s+"
    r"(?:(?:can|could|must)\s+(?:all\s+)?be|are|were|sind|son|sont|sono|são)\s+(?:all\s+|clearly\s+|definitely\s+)?"
    r"(?:wrong|incorrect|false|impossible|ruled\s+out|eliminated|excluded|discarded|not\s+(?:correct|right)|falsch|incorrectas?|falsas?|fausses?"
    r"|incorrectes?|sbagliate|erradas?)(?![a-z])"
)


def _left(text: str, letters: str) -> str | None:
    """The option that is left where a sentence calls all others wrong, and nothing behind it names one."""
    found = list(_ALL_WRONG.finditer(text[-_ENDING:]))
    if not found or re.search(r"(?<![A-Za-z0-9'])(?:[B-HJ-Z]|A(?!\s+[a-z]))(?![A-Za-z0-9'])", text[-_ENDING:][found[-1].end() :]):
        return None
    wrong = set(re.findall(r"[A-Z]", found[-1]["letters"]))
    left = set(letters) - wrong
    return left.pop() if len(left) == 1 and wrong <= set(letters) and len(wrong) > 1 else None


def _by_value(text: str, options: list[str]) -> str | None:
    """Where all options are different numbers without units: what a reply without a letter comes to, read as a number."""
    values = [read_value(option) for option in options]
    if any(value is None or re.search(r"[^\W\d_]", plain(option)) for option, value in zip(options, values)):
        return None
    value = find_number(text).value if len(set(values)) == len(values) else None
    return LETTERS[values.index(value)] if value in values else None


_NUMBERS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_BY_NUMBER = re.compile(rf"(?i)\bthe ({'|'.join(_NUMBERS)}) (?:option|choice)\b")
_SUFFIX = re.compile(r"(?<=\b[A-Z])'[dt][iıuü]r(?![a-z])")  # Turkish: D'dir


def _by_letter(match: re.Match[str]) -> str:
    """`The fourth option` is option D."""
    return f"option {LETTERS[_NUMBERS.index(match[1].lower())]}"


_EMPHASIS = re.compile(r"\*+|__+|`+|(?m:^[ \t]*(?:#+|>|-)[ \t]+)|\$|\\[()\[\]]")
_NOUN = r"(?:answers?|ans|choice|option)\b\.?[\"']?"
_GUESS = r"(?:guess|pick|bet|verdict|selection|conclusion)"
_ASKED = re.compile(
    rf"(?i)(?<![A-Za-z/]){_NOUN}\s*(?:[:=]|\s-\s|(?=\n))\s*"
    rf"|(?im:^[^\w\n]*{_NOUN}\s+(?P<bare>[(\[]?[A-Z][)\].]*)\s*$)"
    r"|<answer>(?P<tagged>[^\n<]*)|(?:答案|选项)\s*[选是为]?\s*:(?P<chinese>[^\n。]*)"
)
_DENIED = r"(?P<denied>(?:isn't|is not|is never|cannot be|can't be|is (?:definitely|clearly|certainly) not)(?! [A-Z]\)? but)\b)"
_PHRASE = re.compile(
    rf"(?i)\b(?:answer|option|choice|{_GUESS})\s+(?:{_DENIED}|(?:is|must be|should be|would be|will be|has to be)\b\s*:?)\s*"
    r"|(?<=[.;,!] )(?:it|that)(?:'s| is| must be| has to be)\s+(?=(?:option |choice )?[(\[]?(?-i:[A-Z])[)\]]?\s*(?:[.;!\n]|$))"
    rf"|{answer_words.STATED}"
    r"|(?<![a-z])(?:finally|ultimately|eventually|in the end|in conclusion)[,:]?\s+(?=(?:option )?[(\[]?(?-i:[A-Z])[)\]]?\W*(?:[.;!\n]|$))"
    r"|\bchang(?:e|ed|ing) (?:my|the) (?:answer|choice) (?:from [A-Z] )?to\s+"
    r"|(?<!not )\b(?P<chosen>choose|pick|select|go(?:ing)? with|opt(?:ing)? for|settl(?:e|ing) on)\s+"
    r"|\bI(?:'d| would|'ll| will)\s+(?:say|guess|answer)\s+(?=(?:option )?[(\[]?(?-i:[A-Z])(?![A-Za-z']))"
    r"|(?<!不)(?<!不[能可应该])选择?(?!项)\s*|答案\s*应?该?[选是为](?!\s*:)"
)
_NOT_CHOSEN = re.compile(r"(?:\bnot|n't|\bcannot|\bunable)\b[^.,;:\n]*$")
_COUNTERFACTUAL = re.compile(r"\b[Ii]f\b[^.\n]*\b(?:were|had been|instead)\b[^.\n]*$")
_FOREIGN_DENIAL = re.compile(rf"(?i){answer_words.DENIED_AT_ONCE}|{answer_words.DENIED_AFTERWARDS}")
_JUDGED = re.compile(
    r"(?<![A-Za-z0-9'])[(\[]?(?P<letter>[A-Z])[)\]]?\s+(?:is|seems|must be)\s+(?:therefore |thus |clearly )?"
    r"(?:the |a )?(?:(?:only |best |right |correct )*(?:correct|right|answer|choice|option))\b(?!,? (?:but|yet|at first)\b)"
    r"|(?<![A-Za-z0-9'])[(\[]?(?P<better>[A-Z])[)\]]?\s+(?:(?:is|fits|seems|looks|matches|works)\s+"
    r"(?:clearly |much )?(?:the )?(?:better|best|most (?:plausible|likely|appropriate|reasonable|suitable|accurate))(?: of the \w+)?"
    r"|over|remains|stays|is (?:what |all that )?(?:left|remains))(?=[\s.,;!]|$)"
    r"|\b(?:[Ee]verything|[Aa]ll|[Ee]very option) (?:but|except) [(\[]?(?P<left>[A-Z])[)\]]?"
    r" (?:can be|is|are|was) (?:excluded|eliminated|ruled out|wrong|incorrect)"
    r"|\b(?:means|implies|indicates|suggests|gives|points to)\s+(?:option )?[(\[]?(?P<meant>[A-Z])[)\]]?"
    r"(?=,?\s+(?:not|rather than|instead of)\s)"
    r"|\b(?:rul(?:e|es|ed|ing) out|eliminat\w+|exclud\w+|reject\w*|dismiss\w*)"
    r"\s+(?:everything|every option|all(?: (?:of )?(?:the )?(?:options|others|choices))?)\s+(?:but|except(?: for)?)"
    r"\s+(?:option )?[(\[]?(?P<kept>[A-Z])(?![A-Za-z0-9'])"
)


def _statements(text: str) -> list[tuple[int, Found, str]]:
    """Where each statement stands, of which kind it is, and what it says is chosen. What holds a box is left to the box."""
    found: list[tuple[int, Found, str]] = []
    for match in list(_ASKED.finditer(text))[-_CUES:]:
        said = next((part for part in match.groups() if part is not None), _line(text, match.end()))
        found.append((match.start(), "asked", said))
    for match in list(_PHRASE.finditer(text))[-_CUES:]:
        said = _line(text, match.end())
        before = text[: match.start()][-_SENTENCE:]
        if _COUNTERFACTUAL.search(before) or (match["chosen"] and _NOT_CHOSEN.search(before)):
            continue
        is_denied = match["denied"] or match["foreign_denial"] or _FOREIGN_DENIAL.search(said)
        found.append((match.start(), "phrase", f"not {said}" if is_denied else said))
    for match in list(_JUDGED.finditer(text))[-_CUES:]:
        if not re.search(r"(?i)\b(?:and|or|nor|neither|not)\s*[(\[]?$", text[max(0, match.start() - 20) : match.start()]):
            found.append((match.start(), "phrase", match["letter"] or match["better"] or match["left"] or match["kept"] or match["meant"]))
    return [one for one in found if not re.search(r"\\f?box", one[2])]


def _line(text: str, start: int) -> str:
    """The rest of the line from `start` on, or the next line that is not blank."""
    return text[start : start + _SENTENCE].lstrip().split("\n", 1)[0]


# What may stand between "ANSWER:" and the choice itself.
_INTRODUCTION = re.compile(
    r"(?i)^(?:(?:the |my )?(?:final |correct |right |best )*(?:answer|option|choice|letter)(?: is)?\s*:?\s*"
    r"|it is |it's |it must be |so |that "
    r"|i(?: would|'d|'ll| will)? (?:say|choose|pick|select|guess|believe|think|answer|go with|opt for) |not [A-Za-z] but |是|为|选择?|:\s*"
    r"|(?:la|le|l'|die|der|das|el|il|lo|o|de|den|het|a(?= (?:letra|opção|alternativa)))\s+(?=\S)"
    r"|(?:opción|opção|opzione|optie|lettre|letra|lettera|alternativa|buchstabe|вариант|буква|choix|opsi|seçenek)\s+"
    r"|(?:probably|most likely|likely|definitely|clearly|certainly|therefore|thus|then|hence|surely|simply|obviously|indeed|just),? )"
)
_DENIAL = re.compile(
    r"(?i)^(?:not|neither|none|nor|anything but|all (?:but|of)|everything (?:but|except)|any|both|either|between"
    r"|cannot|never|isn't)(?![A-Za-z])|^不"
)
_LABEL = re.compile(r"(?P<open>[(\[{<\"']*)\s*(?P<letter>[A-Za-z])\s*(?P<close>[)\]}>\"']*)(?![A-Za-z0-9']|-[A-Za-z])")
_JOINED = re.compile(
    r"(?i)(?:\s*\([^()]*\))?"
    r"[\s\"'\])]*\?*\s*(?:,|/|&|\+|-|\?|;|\||(?:, ?|\()?(?:and/or|and|or|to|as well as|maybe|perhaps|possibly)\b|和|或|、)\s*"
    r"(?:also |maybe |perhaps |probably |option |possibly )?[(\[\"']*(?P<letter>[A-Z])(?![A-Za-z0-9']|\.[A-Za-z])"
    r"(?!\s+(?:is|was|would|could|has|does|[a-z]{2,}s)\b)"
)
_BESIDE = re.compile(r"\s+[(\[]?(?P<letter>[A-Z])(?![A-Za-z0-9'])(?!\s+[a-z])")
_TAKEN_BACK = re.compile(r"(?i)\s*(?:is|was|are|seems)(?:\s+(?:not|never|wrong|incorrect|false|impossible)\b|n't\b)")
_INSTEAD = re.compile(
    r"(?i)[\s.,;?!…—-]*(?:(?:no|wait|sorry|actually|i mean|or rather)[\s,.:…—-]+)+(?:it's |it is |that's |make that |option )?"
    r"(?=[(\[]?(?-i:[A-Z])(?![A-Za-z']))"
)
_SYMBOL = re.compile(r"\s*(?:[_^]|=|\([a-z]\)|\([a-z],)")  # a letter of a formula: F = ma, F_1, F(x)
_REASON = re.compile(
    r"\s*(?:$|[^\sA-Za-z]|(?:because|since|as|is|was|for|due|which|so|where|rather|not|and not|but|being|seems|fits|or|and|to)\b)"
)


def read_choice(said: str, options: list[str]) -> str | None:
    """The letter that `said` chooses; NOTHING where it names options but chooses none of them; None where it names no option."""
    said = plain(said[:_SENTENCE]).replace(TEXT, " ").replace(END_TEXT, " ").strip().strip("\"'").strip()
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
    if not label["close"] and (label["letter"] in "AI" or label["letter"].islower()) and not _REASON.match(rest):
        return None  # an article or a pronoun
    if _TAKEN_BACK.match(rest) or (_SYMBOL.match(rest) and not _same(rest.lstrip(" ="), options[ord(letter) - 65])):
        return NOTHING
    if _names_another(letter, rest, letters) or any(_same(rest, other) for other in options if not _same(other, options[ord(letter) - 65])):
        return NOTHING
    return letter


def _names_another(letter: str, rest: str, letters: str) -> bool:
    other = _JOINED.match(rest) or _BESIDE.match(rest)
    if other is None or other["letter"].upper() not in letters or other["letter"].upper() == letter:
        return False
    is_word = other["letter"] in "aAI" and re.match(r"\s+[a-z]|'", rest[other.end() :]) is not None
    return not is_word


def _by_text(said: str, options: list[str]) -> str | None:
    """The option whose whole text is said, alone, before a comma, or with its letter behind it."""
    pieces = [said, re.split(r",(?!\d)|[;(]|\.\s|\s-\s", said)[0]]
    for piece in pieces:
        found = [number for number, option in enumerate(options) if len(_normal(option)) > 1 and _same(piece, option)]
        if len(found) == 1:
            letter = LETTERS[found[0]]
            named = re.search(r"(?:\(|\boption |\bchoice )([A-Z])\b", said[len(piece) - 1 :]) if piece != said else None
            return letter if named is None or named[1] == letter else NOTHING
    return None


def _normal(text: str) -> str:
    return re.sub(r"[^\w+*/%<>=^.-]+|(?<=\d)(?=[a-zA-Z])", " ", plain(text).replace(TEXT, "").replace(END_TEXT, "").lower()).strip(" .-")


def _same(a: str, b: str) -> bool:
    return _normal(a) == _normal(b) != ""


_CONCLUSION = re.compile(
    r"(?:\b(?:so|leaves|leaving|hence|thus|therefore|be|is|it's|only|with)|:)\s+(?:option |choice )?[(\[]?(?P<letter>[A-Z])[)\]]?\W*$"
)
_DOUBT = re.compile(
    r"(?i)\btempt\w*|\bdistract\w*|\btrap\b|\bcross(?:ed)? out\b|\bis out\b|\bfalse\b|\banything but\b|\bdoubt"
    r"|\b(?:consider|evaluat|examin|analy[sz]|discuss|look at|check|test)\w*\b|:\s*$"
    r"|\bplausible\b|\b(?:could|might|may) be\b|\btoo\b|\bclose second\b|错误"
    r"|\b(?:not|cannot|n't|neither|nor|wrong|incorrect|except|eliminated?|excluded?|reject(?:ed)?|discard(?:ed)?|ruled? out"
    rf"|over|either|or)\b|n't\b|[不非]|排除|{answer_words.DENIED}"
)


_ASKED_AND_DENIED = re.compile(r"(?i)(?<![A-Za-z])[(\[]?[A-Z][)\]]?\?\s*(?:no|nope|not quite|wrong)\b[\s,.:;!—-]*")
# It is meiosis (B), not mitosis (A).
_CONTRAST = re.compile(r"(?i)(?:,\s+(?:(?:and|but)\s+)?(?:not|rather than|instead of)|\s(?:rather than|instead of))\s+[^,.;]*(?=\W*$)")
_CONCEDED = re.compile(r"(?i)(?:(?<=[.!?]\s)|^)(?:(?:even )?though|although|while|whereas|unlike) [^,.\n]*, ")
_VERDICT_LINE = re.compile(r"(?m)^[^\w\n]*[(\[]?(?P<letter>[A-Z])(?![A-Za-z'])(?P<said>.*)$")
_NEXT_OPTION = re.compile(
    r"(?<=[✗✘❌✓✔✅])\s+(?=[(\[]?[A-Z][)\]]?\s)|(?<=[.;!])\s+(?=(?:[Oo]ption )?[(\[]?[A-Z][)\]]?(?::|\s+(?:is|was)\s))"
)
_REFUTED = re.compile(r"(?i)[❌✗✘✖×]|\b(?:incorrect|wrong|false|no|not|excluded|eliminated|ruled out)\b|n't\b|错误?|不")
_AFFIRMED = re.compile(r"(?i)[✅✓✔☑]|\b(?:correct|right|true|yes)\b|正确|对")


def _judged(text: str, letters: str) -> str | None:
    """The option of a list that goes through all of them and finds one of them right, the others wrong; None where it is no such list."""
    lines = [match for match in _VERDICT_LINE.finditer(_NEXT_OPTION.sub("\n", text)) if match["letter"] in letters]
    refuted = {line["letter"] for line in lines if _REFUTED.search(line["said"])}
    affirmed = {line["letter"] for line in lines if _AFFIRMED.search(line["said"])} - refuted
    is_whole = len(refuted) >= max(1, len(letters) - 1)
    is_marked = len(refuted) > 1 and len(refuted) + 1 == len({line["letter"] for line in lines})
    return affirmed.pop() if len(affirmed) == 1 and (is_whole or is_marked) else None


_SET_ASIDE = re.compile(
    r"(?i)(?:^|(?<=[.!?\n]))\W*(?:not|neither)\s+(?P<wrong>[^;—\n]{1,120}?)(?:\s*[;.—]|,?\s+but|\s+-)\s+(?P<chosen>[^;—?\n]+)$"
)


def _set_against(text: str, options: list[str]) -> str | None:
    """The choice of a reply that ends in `Not B; C.`: what stands in front are options, by letter or by text, and behind is another one."""
    said = _SET_ASIDE.search(text)
    if said is None or _DOUBT.search(said["chosen"]):
        return None
    wrong = {read_choice(part, options) for part in re.split(r"(?i),?\s+(?:nor|or|and)\s+(?:not\s+)?|,\s*(?:not\s+)?", said["wrong"])}
    chosen = read_choice(said["chosen"].strip(" ."), options)
    return chosen if not {None, NOTHING, chosen} & wrong and chosen != NOTHING else None


def _alone(text: str, options: list[str]) -> str | None:
    """The choice of a reply without a statement: all that it says, or the only option that its last sentence names."""
    if (against := _set_against(text[-_ENDING:].strip(), options)) is not None:
        return against
    said = _CONTRAST.sub("", _CONCEDED.sub("", _ASKED_AND_DENIED.sub("", text[-_ENDING:].strip())))
    judged = _judged(said, LETTERS[: len(options)])
    if judged is not None:
        return judged
    if not re.search(r"\n|[.!?]\s", said[2:]):
        whole = read_choice(said, options)
        conclusion = _CONCLUSION.search(said)
        if (
            conclusion is not None
            and whole not in (None, NOTHING, conclusion["letter"])
            and conclusion["letter"] in LETTERS[: len(options)]
        ):
            return conclusion["letter"]
        if whole not in (None, NOTHING) and len(said) < 120:
            return whole if not _DOUBT.search(said) else NOTHING
    first = said.split("\n", 1)[0].strip()
    if (label := re.fullmatch(r"[(\[]?([A-Z])(?:[)\]]?\.?|[)\].:]+\s+(.+))", first)) is not None and (
        label[2] is None or any(_same(label[2], option) for option in options)
    ):
        return read_choice(first, options)
    bound = re.findall(r"\b[Ll]et ([A-Z]) (?:be|denote|=)", said)
    letters = "".join(letter for letter in LETTERS[: len(options)] if letter not in bound)
    for sentence in reversed(re.split(r"(?<=[.!?。])\s+|\n", said)):
        alone = _CONTRAST.sub("", sentence)
        sentence = alone if _labels(alone, options, letters) else sentence
        named = _labels(sentence, options, letters)
        if named and _is_item(sentence, said):
            return NOTHING
        if named:
            conclusion = _CONCLUSION.search(sentence)
            if len(set(named)) == 1 and not _DOUBT.search(sentence):
                return named[0]
            if conclusion is not None and conclusion["letter"] in letters and not _DOUBT.search(sentence[conclusion.start() :]):
                joined = re.search(r"(?i)\b(?:or|and|not|over|n't)\s*\W*$", sentence[: conclusion.start("letter")])
                is_left = re.match(r"(?i)\W*(?:so|leav(?:es|ing)|hence|thus|therefore)\b", conclusion[0])
                return NOTHING if joined or (len(set(named)) == 1 and not is_left) else conclusion["letter"]
            return NOTHING
    return None


def _is_item(sentence: str, text: str) -> bool:
    """Whether the sentence is the next one in a list of options, behind that of the letter before: the text ends without a choice."""
    item = re.match(r"[(\[]?(?P<letter>[B-Z])[)\].:]+\s", sentence)
    return item is not None and re.search(rf"(?<!\w){chr(ord(item['letter']) - 1)}[)\].:]+\s", text) is not None


_FORMULA_BEFORE = re.compile(
    r"(?:[=^*·×]|\w[/+]|\b(?:let|force|point|set|matrix|vector|angle|event|mass|acceleration|energy|temperature|line|plane|function|vitamin|type|vertex))\s*$",
    re.IGNORECASE,
)
_FORMULA_BEHIND = re.compile(r"\s*(?:=(?!=)|[_^*·×]|/\w|\+\s*\w)|\([a-z]\)")


def _labels(sentence: str, options: list[str], letters: str) -> list[str]:
    """Letters of the options that a sentence names, by letter or by text."""
    named = []
    for number, option in sorted(enumerate(options), key=lambda item: -len(item[1])):
        pattern = rf"(?i)(?<!\w){re.escape(option.strip())}(?!\w)"
        if len(option.strip()) > 3 and re.search(pattern, sentence):
            named.append(LETTERS[number])
            sentence = re.sub(pattern, " ", sentence)
    for match in re.finditer(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])", sentence):
        if _FORMULA_BEFORE.search(sentence[: match.start()]) or _FORMULA_BEHIND.match(sentence, match.end()):
            continue
        verbs = "is" if match[1] == "I" else "is|was"
        is_word = match[1] in "AI" and re.match(rf",?\s+(?!(?:and|or|nor|{verbs})\b)[a-z]", sentence[match.end() :])
        if match[1] in letters and not is_word:
            named.append(match[1])
    return named
