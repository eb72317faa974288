"""From the events of a streamed answer to one reply. What no server should send is refused here, so
that it fails its own sample only."""

from dataclasses import dataclass, field
from typing import Any

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.openai_server import GIVEN_UP, StreamError

LARGEST_REPLY = 64 * 2**20  # characters; more is a server that does not stop
_STOPPED = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call"}
_CUT = {"length", "max_tokens", "model_length"}


@dataclass
class ReplyReader:
    """What a stream has brought so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    size: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """One event. Raises StreamError where it has no place in a reply."""
        for choice in _objects(event, "choices"):
            if str(choice.get("index") or 0) == "0":
                self._add_choice(choice)
        usage = _object(event, "usage")
        self.prompt_tokens = _count(usage, "prompt_tokens") or self.prompt_tokens
        self.completion_tokens = _count(usage, "completion_tokens") or self.completion_tokens

    def _add_choice(self, choice: dict[str, Any]) -> None:
        part = _object(choice, "delta") or _object(choice, "message")
        said, thought = _content(part)
        text = said or _text(choice, "text")
        thought += (
            _text(part, "reasoning_content") or _text(part, "reasoning") or _text(part, "thinking")
        )
        if (text or thought) and self.finish_reason is not None:
            raise StreamError("the server sent text after the end of the reply")
        self.logprobs += _objects(_object(choice, "logprobs"), "content")
        self.text.append(text)
        self.reasoning.append(thought)
        self.size += len(text) + len(thought)
        if self.size > LARGEST_REPLY:
            raise StreamError(f"a reply of more than {LARGEST_REPLY >> 20} million characters")
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise StreamError(f"finish_reason is {reason!r}")
        reason = reason.lower() if reason else None
        if reason != "null":  # some servers write it as a word
            self.finish_reason = reason or self.finish_reason

    def reply(self, latency_s: float) -> ModelReply:
        """The whole reply. Raises StreamError where the server sent no end, or gave the reply
        up."""
        return ModelReply(
            index=-1,
            text=_joined(self.text),
            finish_reason=self._finish_reason(),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            latency_s=latency_s,
            reasoning=_joined(self.reasoning) or None,
            logprobs=tuple(self.logprobs),
        )

    def _finish_reason(self) -> str:
        """stop, length, content_filter, or the server's own word where it is none of them."""
        if self.finish_reason is None:
            raise StreamError("the stream ended without a finish reason")
        if self.finish_reason in GIVEN_UP:
            raise StreamError(
                f"the server gave the reply up (finish_reason {self.finish_reason!r})"
            )
        return (
            "stop"
            if self.finish_reason in _STOPPED
            else "length"
            if self.finish_reason in _CUT
            else self.finish_reason
        )


def _objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = holder.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise StreamError(f"{name} is no list of objects: {str(value)[:100]!r}")
    return value


def _object(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name) or {}
    if not isinstance(value, dict):
        raise StreamError(f"{name} is no object: {str(value)[:100]!r}")
    return value


def _text(holder: dict[str, Any], name: str) -> str:
    value = holder.get(name) or ""
    if not isinstance(value, str):
        raise StreamError(f"{name} is no text: {str(value)[:100]!r}")
    return value


def _content(part: dict[str, Any]) -> tuple[str, str]:
    """The text and the reasoning of a content, which some servers send as a list of typed parts."""
    if not isinstance(part.get("content"), list):
        return _text(part, "content"), ""
    text, thought = "", ""
    for one in _objects(part, "content"):
        kind = one.get("type")
        if kind not in ("text", "output_text", "thinking", "reasoning"):
            raise StreamError(f"a part of the content is of type {kind!r}")
        if kind in ("text", "output_text"):
            text += _text(one, "text")
        elif isinstance(one.get("thinking"), list):
            thought += "".join(_text(inner, "text") for inner in _objects(one, "thinking"))
        else:
            thought += _text(one, "thinking") or _text(one, "text")
    return text, thought


def _count(holder: dict[str, Any], name: str) -> int:
    """A number of tokens; 0 is not known, which some servers write as a negative number."""
    value = holder.get(name) or 0
    if not isinstance(value, int | float) or value != value // 1:
        raise StreamError(f"{name} is no count: {str(value)[:100]!r}")
    return max(int(value), 0)


def _joined(pieces: list[str]) -> str:
    """One text: a pair of surrogates that two pieces share becomes its character, a lone one, which
    no file takes, U+FFFD."""
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
