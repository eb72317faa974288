"""A reasoning model's answer in two parts: what it thinks, and what it says after </think>."""

from dataclasses import dataclass, field
from typing import NamedTuple

from quantkit.executor.server.tools.stream_parser import CallDelta, ToolCallSplitter
from quantkit.tokenizer.reasoning_tags import END_THINK, THINK


class Parts(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits streamed text. `inside`: the prompt already opened <think>; else thinking begins where
    the text itself does so first.

    The tags belong to neither part, nor do line breaks around them. An answer cut before </think>
    is all reasoning.
    """

    def __init__(self, inside: bool) -> None:
        self._state = "thinking" if inside else "before"
        self._held = ""
        self._fresh = True

    def push(self, text: str) -> Parts:
        """The next piece of text -> what of it is certain now."""
        self._held += text
        reasoning = content = ""
        if self._state == "before":
            self._open()
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "answer":
            content, self._held = self._trimmed(self._held), ""
        return Parts(reasoning, content)

    def finish(self) -> Parts:
        """What is still held when the text ends."""
        rest, self._held = self._held, ""
        return (
            Parts(self._trimmed(rest), "")
            if self._state == "thinking"
            else Parts("", self._trimmed(rest))
        )

    def _open(self) -> None:
        """Decide whether the text opens <think>; until enough of it is there, hold it."""
        start = self._held.lstrip()
        if start.startswith(THINK):
            self._state, self._held = "thinking", start[len(THINK) :]
        elif start and not THINK.startswith(start):
            self._state = "answer"

    def _think(self) -> str:
        end = self._held.find(END_THINK)
        if end >= 0:
            reasoning = self._trimmed(self._held[:end]).rstrip("\n")
            self._state, self._held, self._fresh = (
                "answer",
                self._held[end + len(END_THINK) :],
                True,
            )
            return reasoning
        # Line breaks may precede </think>, and a piece may end within the tag.
        keep = next(
            (n for n in range(len(END_THINK) - 1, 0, -1) if self._held.endswith(END_THINK[:n])), 0
        )
        certain = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(certain) :]
        return self._trimmed(certain)

    def _trimmed(self, text: str) -> str:
        """Without the line breaks that begin a part."""
        if not self._fresh:
            return text
        text = text.lstrip("\n")
        self._fresh = not text
        return text


@dataclass(frozen=True)
class AnswerParts:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class PartsReader:
    """thinking, calling: who takes out thoughts and calls; None where everything is content."""

    def __init__(
        self, thinking: ReasoningSplitter | None, calling: ToolCallSplitter | None
    ) -> None:
        self._thinking, self._calling = thinking, calling
        self.num_calls = 0

    def push(self, text: str, *, last: bool) -> AnswerParts:
        """The next piece of text -> what is certain now; with the last piece everything is."""
        reasoning, content = "", text
        if self._thinking is not None:
            first = self._thinking.push(text)
            rest = self._thinking.finish() if last else None
            reasoning = first.reasoning + (rest.reasoning if rest else "")
            content = first.content + (rest.content if rest else "")
        if self._calling is None:
            return AnswerParts(reasoning, content)
        content, calls = self._calling.push(content)
        if last:
            more, rest_of_calls = self._calling.finish()
            content, calls = content + more, calls + rest_of_calls
        self.num_calls += sum(call.name is not None for call in calls)
        return AnswerParts(reasoning, content, calls)


def joined(calls: list[CallDelta]) -> list[CallDelta]:
    """Whole calls of their pieces, in order."""
    found: dict[int, CallDelta] = {}
    for one in calls:
        known = found.get(one.index)
        found[one.index] = (
            one
            if known is None
            else CallDelta(one.index, known.arguments + one.arguments, known.id, known.name)
        )
    return [found[index] for index in sorted(found)]
