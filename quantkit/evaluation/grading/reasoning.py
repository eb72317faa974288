"""Strip the reasoning from a reply, so that nothing inside <think> or another model's tags is
graded.

R1's chat template ends inside <think>, so a reply holds only the closing tag; servers with a
reasoning parser hold back the thinking; others send both tags. A reply that never closes its
thinking has no answer, whatever numbers it contains.
"""

import re
from collections.abc import Iterable

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


def answer_of(completion: ModelReply, thinking_expected: bool) -> str | None:
    """What a reply says outside of its reasoning; None where the reasoning never ends.

    `thinking_expected` (protocol r1, or a model that was seen to think) decides the one case that
    nothing else does: an endpoint whose template is unknown, a reply cut by the token limit, no tag
    in it. A reasoning model was still thinking then.
    """
    text, answer, end = completion.text, "", 0
    inside = completion.think_open is True
    for match in _TAG.finditer(text):
        if match["open"] and not inside:
            answer += text[end : match.start()]
        elif not inside:  # nothing opened what this closes: all before it is reasoning
            answer = ""
        inside, end = match["open"] is not None, match.end()
    if completion.reasoning is not None:
        finished = bool(text.strip())
    else:
        is_cut = thinking_expected and completion.finish_reason == "length"
        finished = completion.think_open is not None or not is_cut or end > 0
    return _MARKS.sub("", answer + text[end:]) if finished and not inside else None


def thinks(replies: Iterable[ModelReply]) -> bool:
    """Whether one of the replies closes thinking that it did not open: the server's template opens
    it, so every reply begins inside."""
    firsts = (_TAG.search(reply.text) for reply in replies if reply.think_open is None)
    return any(first is not None and first["close"] is not None for first in firsts)
