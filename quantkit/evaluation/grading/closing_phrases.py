"""Closing text of a reply other than its answer: a verification of the answer, or a refusal."""

import re

from quantkit.evaluation.grading import answer_phrases

_CHECKS = re.compile(
    r"(?im)(?:^|(?<=[.!?。:]\s)|(?<=。))[^\w\n]{0,6}(?:(?:let me|let's|let us|we "
    r"can|i'll|now|to|quick|sanity|as a|final)\s+){0,3}"
    r"(?:just\s+|quickly\s+|double[- "
    rf"]?)*(?:verif(?:y|ication|ying)|check(?:ing)?|{answer_phrases.VERIFICATION})(?![a-z])"
)
_DOUBTS = re.compile(
    r"(?i)\b(?:wait|hmm|oops|actually|mistake|wrong|incorrect|doesn't|does "
    r"not|didn't|mismatch|however|instead|correction"
    rf"|correct(?:ed)? (?:answer|value))\b|[≠✗✘❌]|{answer_phrases.MISTAKE}"
)
_CONCLUDES = re.compile(
    r"(?i)(?:^|[.!?。\n])\W*(?:so|thus|hence|therefore|final|in total|answer|the "
    rf"answer|total|{answer_phrases.CONCLUSION})(?!\w)"
)


def strip_verification(text: str) -> str:
    """The text before it begins to verify its answer, if the verification brings nothing new: no
    doubt and no conclusion of its own."""
    checks = [match for match in _CHECKS.finditer(text) if re.search(r"\d", text[: match.start()])]
    if not checks:
        return text
    rest = text[checks[-1].end() :]
    before = text[: checks[-1].start()].rstrip()
    is_new = _DOUBTS.search(rest) or _CONCLUDES.search(rest) or before.endswith((":", ","))
    return text if is_new else before


_UNABLE = r"(?:unable|not able|can't|cannot|can not|couldn't|could not|won't|refuse|don't|do not)"
_TO_ANSWER = (
    r"(?:determine|answer|solve|find|compute|calculate|help|assist|provide|give|tell|know|finish|continue|say|complete|choose|decide|see"
    r"|view|have enough|do that|do this)"
)
_REFUSES = re.compile(
    "(?i)"
    + "|".join(
        (
            r"\b(?:i|we)(?:'m| am| was|'re| are)?\s+(?:really |afraid |sorry,? |unfortunately |but "
            r"|i |we )*"
            rf"{_UNABLE}\s+(?:to\s+)?(?:\w+ly\s+)?{_TO_ANSWER}\b",
            r"(?:^|[.!]\s+)\W*(?:unable|not "
            rf"able|impossible|cannot|can't)\s+(?:to\s+)?{_TO_ANSWER}\b",
            r"\b(?:cannot|can't|can not) be "
            r"(?:determined|answered|solved|computed|found|calculated)\b",
            r"\b(?:not enough|insufficient|missing) (?:information|data|details)\b|\bno "
            r"(?:unique|definite|single) answer\b",
            r"\bimpossible to (?:determine|say|answer|tell|know|find)\b|\bas an ai\b",
            r"\b(?:ran|run|running) out of (?:time|tokens|space|budget)\b|\bto be continued\b|\bso "
            r"far\W*$",
            answer_phrases.REFUSAL,
        )
    )
)
_STILL = re.compile(
    r"(?i)\b(?:so|thus|hence|therefore|but|however|still|nevertheless|nonetheless|that "
    r"said|yet|best (?:guess|estimate)|my guess"
    rf"|i (?:would )?(?:guess|say|think|believe))\b(?! far)[^.!?\n]*\d|{answer_phrases.CONTRAST}"
)
_LAST = 3  # sentences at the end in which a refusal is looked for


def is_refusal(text: str) -> bool:
    """Whether the last sentences say that there is no answer, and none is given after it all the
    same."""
    sentences = [part for part in re.split(r"(?<=[.!?。])\s*|\n+", text) if re.search(r"\w", part)][
        -_LAST:
    ]
    for number in range(len(sentences) - 1, -1, -1):
        said = _REFUSES.search(sentences[number])
        if said is not None:
            return (
                _STILL.search(" ".join([sentences[number][said.end() :], *sentences[number + 1 :]]))
                is None
            )
    return False
