"""Strip the reasoning from a reply, so that nothing inside <think> or another model's tags is
graded.

R1's chat template ends inside <think>, so a reply holds only the closing tag; servers with a
reasoning parser hold back the thinking; others send both tags. A reply that never closes its
thinking has no answer, whatever numbers it contains.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.tokenizer.reasoning_tags import REASONING_TAGS

_OPENS, _CLOSES = (
    "|".join(re.escape(tag) for tag in dict.fromkeys(tags)) for tags in zip(*REASONING_TAGS)
)
# The longer harmony header is one tag up to <|message|>; where the server dropped special tokens,
# its words are what is left of it.
_TAG = re.compile(
    rf"(?P<open>(?:{_OPENS})|\A\s*analysis(?=[A-Z]))(?P<rest>(?<=analysis"
    rf"|mmentary)[^<\n]*<\|message\|>)?"
    rf"|(?P<close>{_CLOSES}|assistantfinal(?=\S))(?:(?<=final)[^<\n]*<\|message\|>)?",
    re.IGNORECASE,
)
_MARK = r"(?:<[|｜][^<>|｜]*[|｜]>|</?s>|\[/?INST\])"
_MARKS = re.compile(rf"\A(?:\s*{_MARK})+|(?:{_MARK}\s*)+\Z")


@dataclass(frozen=True)
class Reply:
    """The reasoning, what is said outside of it, and whether the reasoning was closed (or there was
    none)."""

    thinking: str
    answer: str
    finished: bool


def split(completion: ModelReply, thinking_expected: bool) -> Reply:
    """Separate thinking from answer.

    `thinking_expected` (protocol r1, or a model that was seen to think) decides the one case that
    nothing else does: an endpoint whose template is unknown, a reply cut by the token limit, no tag
    in it. A reasoning model was still thinking then.
    """
    text = completion.text
    thinking, answer, inside = _scan(text, inside=completion.think_open is True)
    if inside:
        return Reply(text, "", finished=False)
    if completion.reasoning is not None and not thinking:
        return Reply(completion.reasoning, text, finished=bool(text.strip()))
    if (
        completion.think_open is None
        and thinking_expected
        and completion.finish_reason == "length"
        and not _TAG.search(text)
    ):
        return Reply(text, "", finished=False)
    return Reply(thinking, _MARKS.sub("", answer), finished=True)


def _scan(text: str, inside: bool) -> tuple[str, str, bool]:
    """The text inside and outside of tags, and whether it ends inside. What comes before a closing
    tag that nothing opened is inside."""
    thinking, answer, position = "", "", 0
    for match in _TAG.finditer(text):
        piece, position = text[position : match.start()], match.end()
        if match["open"]:
            thinking, answer = (thinking + piece, answer) if inside else (thinking, answer + piece)
        else:
            thinking, answer = (
                (thinking + piece, answer) if inside else (thinking + answer + piece, "")
            )
        inside = match["open"] is not None
    return (
        (thinking + text[position:], answer, True)
        if inside
        else (thinking, answer + text[position:], False)
    )


def thinks(replies: Iterable[ModelReply]) -> bool:
    """Whether one of the replies closes thinking that it did not open: the server's template opens
    it, so every reply begins inside."""
    firsts = (_TAG.search(reply.text) for reply in replies if reply.think_open is None)
    return any(first is not None and first["close"] is not None for first in firsts)
