"""An answer's text in its parts, while it comes: what the model thinks, what it says, and the tools
it calls."""

from dataclasses import dataclass, field

from quantkit.executor.server.reasoning import ReasoningSplitter
from quantkit.executor.server.tools.splitter import CallDelta, ToolCallSplitter


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
