"""Find the one option that a reply chooses: a letter in either case, or the text of exactly one
option.

A statement is a line `ANSWER: X`, a box, "the answer is X", "option X is correct", "I choose X" and
the like. The last one counts. One that names several letters, or a letter with the text of another
option, or denies what it names, chooses nothing.
"""

import re

from quantkit.evaluation.grading import answer_phrases
from quantkit.evaluation.grading.answers import prepare
from quantkit.evaluation.grading.boxes import Extraction, Found, boxes, last_box
from quantkit.evaluation.grading.closing_phrases import is_refusal
from quantkit.evaluation.grading.options import LETTERS, NOTHING, SENTENCE, read_choice
from quantkit.evaluation.grading.unstated_choices import unstated_choice

_CUES = 50  # statements of a text that are looked at, the last ones


def find_choice(text: str, options: list[str]) -> Extraction:
    """The letter of the chosen option, by a statement (`asked`, `phrase`) or because the reply
    names no other (`last`).

    The text is NOTHING where the reply makes a statement that chooses none, and None where it makes
    none at all.
    """
    text = _SUFFIX.sub("", _BY_NUMBER.sub(_by_letter, _EMPHASIS.sub("", prepare(text))))
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
    if is_refusal(text) and not any(is_refusal(option) for option in options):
        return Extraction(NOTHING, "last")
    alone = unstated_choice(text, options)
    return Extraction(alone, "last") if alone is not None else Extraction(None)


_NUMBERS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
]
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
_DENIED = (
    r"(?P<denied>(?:isn't|is not|is never|cannot be|can't be|is "
    r"(?:definitely|clearly|certainly) not)(?! [A-Z]\)? but)\b)"
)
_PHRASE = re.compile(
    rf"(?i)\b(?:answer|option|choice|{_GUESS})\s+(?:{_DENIED}|(?:is|must be|should be|would "
    r"be|will be|has to be)\b\s*:?)\s*"
    r"|(?<=[.;,!] )(?:it|that)(?:'s| is| must be| has to be)\s+(?=(?:option |choice "
    r")?[(\[]?(?-i:[A-Z])[)\]]?\s*(?:[.;!\n]|$))"
    rf"|{answer_phrases.STATEMENT}"
    r"|(?<![a-z])(?:finally|ultimately|eventually|in the end|in conclusion)[,:]?\s+(?=(?:option "
    r")?[(\[]?(?-i:[A-Z])[)\]]?\W*(?:[.;!\n]|$))"
    r"|\bchang(?:e|ed|ing) (?:my|the) (?:answer|choice) (?:from [A-Z] )?to\s+"
    r"|(?<!not )\b(?P<chosen>choose|pick|select|go(?:ing)? with|opt(?:ing)? for|settl(?:e|ing) "
    r"on)\s+"
    r"|\bI(?:'d| would|'ll| will)\s+(?:say|guess|answer)\s+(?=(?:option "
    r")?[(\[]?(?-i:[A-Z])(?![A-Za-z']))"
    r"|(?<!不)(?<!不[能可应该])选择?(?!项)\s*|答案\s*应?该?[选是为](?!\s*:)"
)
_NOT_CHOSEN = re.compile(r"(?:\bnot|n't|\bcannot|\bunable)\b[^.,;:\n]*$")
_COUNTERFACTUAL = re.compile(r"\b[Ii]f\b[^.\n]*\b(?:were|had been|instead)\b[^.\n]*$")
_FOREIGN_DENIAL = re.compile(
    rf"(?i){answer_phrases.LEADING_DENIAL}|{answer_phrases.TRAILING_DENIAL}"
)
_JUDGED = re.compile(
    r"(?<![A-Za-z0-9'])[(\[]?(?P<letter>[A-Z])[)\]]?\s+(?:is|seems|must be)\s+(?:therefore |thus "
    r"|clearly )?"
    r"(?:the |a )?(?:(?:only |best |right |correct "
    r")*(?:correct|right|answer|choice|option))\b(?!,? (?:but|yet|at first)\b)"
    r"|(?<![A-Za-z0-9'])[(\[]?(?P<better>[A-Z])[)\]]?\s+(?:(?:is|fits|seems|looks|matches|works)\s+"
    r"(?:clearly |much )?(?:the )?(?:better|best|most "
    r"(?:plausible|likely|appropriate|reasonable|suitable|accurate))(?: of the \w+)?"
    r"|over|remains|stays|is (?:what |all that )?(?:left|remains))(?=[\s.,;!]|$)"
    r"|\b(?:[Ee]verything|[Aa]ll|[Ee]very option) (?:but|except) [(\[]?(?P<left>[A-Z])[)\]]?"
    r" (?:can be|is|are|was) (?:excluded|eliminated|ruled out|wrong|incorrect)"
    r"|\b(?:means|implies|indicates|suggests|gives|points to)\s+(?:option "
    r")?[(\[]?(?P<meant>[A-Z])[)\]]?"
    r"(?=,?\s+(?:not|rather than|instead of)\s)"
    r"|\b(?:rul(?:e|es|ed|ing) out|eliminat\w+|exclud\w+|reject\w*|dismiss\w*)"
    r"\s+(?:everything|every option|all(?: (?:of )?(?:the "
    r")?(?:options|others|choices))?)\s+(?:but|except(?: for)?)"
    r"\s+(?:option )?[(\[]?(?P<kept>[A-Z])(?![A-Za-z0-9'])"
)


def _statements(text: str) -> list[tuple[int, Found, str]]:
    """Where each statement is, of which kind it is, and what it says is chosen. What holds a
    box is left to the box."""
    found: list[tuple[int, Found, str]] = []
    for match in list(_ASKED.finditer(text))[-_CUES:]:
        said = next((part for part in match.groups() if part is not None), _line(text, match.end()))
        found.append((match.start(), "asked", said))
    for match in list(_PHRASE.finditer(text))[-_CUES:]:
        said = _line(text, match.end())
        before = text[: match.start()][-SENTENCE:]
        if _COUNTERFACTUAL.search(before) or (match["chosen"] and _NOT_CHOSEN.search(before)):
            continue
        is_denied = match["denied"] or match["foreign_denial"] or _FOREIGN_DENIAL.search(said)
        found.append((match.start(), "phrase", f"not {said}" if is_denied else said))
    for match in list(_JUDGED.finditer(text))[-_CUES:]:
        if not re.search(
            r"(?i)\b(?:and|or|nor|neither|not)\s*[(\[]?$",
            text[max(0, match.start() - 20) : match.start()],
        ):
            found.append(
                (
                    match.start(),
                    "phrase",
                    match["letter"]
                    or match["better"]
                    or match["left"]
                    or match["kept"]
                    or match["meant"],
                )
            )
    return [one for one in found if not re.search(r"\\f?box", one[2])]


def _line(text: str, start: int) -> str:
    """The rest of the line from `start` on, or the next line that is not blank."""
    return text[start : start + SENTENCE].lstrip().split("\n", 1)[0]
