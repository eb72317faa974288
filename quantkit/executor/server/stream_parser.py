"""An answer's text in parts, while it comes: what a reasoning model thinks, what it says after
</think>, and the tools that it calls."""

import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from quantkit.executor.server.tools.formats import ToolFormat, ToolUse
from quantkit.executor.server.tools.parsers import CallReader
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
class CallDelta:
    """A piece of a tool call: its place among the answer's calls, and more of its arguments. The
    first piece has an id and a name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolCallSplitter:
    """Splits streamed text. White space before and between calls belongs to nothing; what only
    looks like a call is said.

    Where the request wants one call at most, further ones are left out.
    """

    def __init__(self, form: ToolFormat, use: ToolUse) -> None:
        self._form, self._use = form, use
        self._held, self._body = "", ""
        self._reader: CallReader | None = None
        self._in_section = self._named = self._fresh = False
        self._count = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """The next piece of text -> what is certain now: text, and pieces of calls."""
        self._held += text
        said, calls = "", list[CallDelta]()
        while True:
            taken, mark = self._take(self._awaited())
            if self._reader is not None:
                calls += self._read(self._reader, taken)
            else:
                said += self._say(taken, before_call=mark == self._form.opening)
            if not mark:
                return said, calls
            more, rest = self._pass(mark)
            said, calls = said + more, calls + rest

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The text ends: what is still held."""
        rest, self._held = self._held, ""
        if self._reader is None:
            return self._say(rest, before_call=False), []
        calls = self._read(self._reader, rest)
        said, more = self._close(self._reader, "")
        return said, calls + more

    def _awaited(self) -> tuple[str, ...]:
        """The marks that may come next."""
        if self._reader is not None:
            return (self._form.call[1],)
        return (
            (self._form.call[0], self._form.section[1])
            if self._in_section
            else (self._form.opening,)
        )

    def _take(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Held text up to the first of the marks, and that mark, which is taken too; else what is
        no beginning of a mark, and "".

        Outside calls white space is held, until it is known what follows.
        """
        found = min(
            ((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None
        )
        if found is not None:
            taken, self._held = self._held[: found[0]], self._held[found[0] + len(found[1]) :]
            return taken, found[1]
        count = len(self._held) - max(_overlap(self._held, mark) for mark in marks)
        if self._reader is None:
            count = len(self._held[:count].rstrip())
        taken, self._held = self._held[:count], self._held[count:]
        return taken, ""

    def _say(self, text: str, *, before_call: bool) -> str:
        """Text outside calls; nothing is said within a section."""
        if self._in_section:
            return ""
        text = text.rstrip() if before_call else text
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return text

    def _pass(self, mark: str) -> tuple[str, list[CallDelta]]:
        """What a mark brings: nothing, or the end of a call."""
        if self._reader is not None:
            return self._close(self._reader, mark)
        if mark == self._form.call[0]:
            self._reader, self._body, self._named = self._form.reader(self._use.tools), "", False
        else:
            self._in_section = mark == self._form.section[0]
            self._fresh = True
        return "", []

    def _read(self, reader: CallReader, text: str) -> list[CallDelta]:
        self._body += text
        return self._deltas(reader, reader.push(text))

    def _deltas(self, reader: CallReader, arguments: str) -> list[CallDelta]:
        """A piece of the open call, for who waits for it."""
        if reader.name is None or (self._count and not self._use.parallel):
            return []
        if not self._named:
            self._named = True
            return [
                CallDelta(
                    self._count,
                    arguments,
                    reader.id or f"call_{uuid.uuid4().hex[:24]}",
                    reader.name,
                )
            ]
        return [CallDelta(self._count, arguments)] if arguments else []

    def _close(self, reader: CallReader, mark: str) -> tuple[str, list[CallDelta]]:
        """The open call ends: its text where it was none, else what is missing of it."""
        calls = self._deltas(reader, reader.finish())
        self._reader = None
        if reader.name is None:
            return self._form.call[0] + self._body + mark, []
        self._count, self._fresh = self._count + 1, True
        return "", calls


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters of `text` begin the mark."""
    return next(
        (
            count
            for count in range(min(len(text), len(mark) - 1), 0, -1)
            if text.endswith(mark[:count])
        ),
        0,
    )


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
