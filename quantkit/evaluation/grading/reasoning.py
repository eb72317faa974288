"""Cutting the reasoning off a reply, so that nothing inside <think> is ever graded.

R1's chat template ends inside <think>, so a reply holds only the closing tag; servers with a reasoning parser hold back the thinking;
others send both tags. A reply that never closes its thinking has no answer, whatever numbers it contains.
"""

from dataclasses import dataclass

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.tokenizer.tags import END_THINK, THINK


@dataclass(frozen=True)
class Reply:
    """The part before the last </think>, the part after it, and whether the thinking was closed (or there was none)."""

    thinking: str
    answer: str
    finished: bool


def split(completion: ModelReply, thinking_expected: bool) -> Reply:
    """Separate thinking from answer.

    `thinking_expected` (protocol r1) decides the one case that nothing else does: an endpoint whose template is unknown, a reply cut
    by the token limit, no tag in it. A reasoning model was still thinking then.
    """
    text = completion.text
    if completion.reasoning is not None and END_THINK not in text:
        return Reply(completion.reasoning, text, finished=bool(text.strip()))
    if END_THINK in text:
        thinking, _, answer = text.rpartition(END_THINK)
        return Reply(thinking.removeprefix(THINK), answer, finished=True)
    if completion.think_open or THINK in text:
        return Reply(text, "", finished=False)
    if completion.think_open is None and thinking_expected and completion.finish_reason == "length":
        return Reply(text, "", finished=False)
    return Reply("", text, finished=True)
