"""Documents to tokens, as the model would see them: conversations through its own chat template,
thoughts included.

Templates of reasoning models drop the thought of a reply, because the next question is to be
answered without it. What such a model writes is mostly thought, so the last reply is put behind the
prompt with it, as the model itself would have written it. A template that refuses a conversation
(tools, a system message, who speaks when) gets it in simpler forms; a model without a template gets
plain text.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantkit.calibrate.documents import Document, Message
from quantkit.common.errors import QuantkitError
from quantkit.tokenizer.tags import END_THINK, THINK

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def templates(self) -> Mapping[str, Any]:
        """Chat templates by name; a base model has none."""

    @property
    def eos(self) -> str | None:
        """Text of the token that ends a reply."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a template's text."""

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation's text. Raises QuantkitError where the template refuses it."""


@dataclass
class Templating:
    """simplified: documents that the template took in a simpler form only, and why it refused the
    first of them."""

    encoder: Encoder
    simplified: int = 0
    refusal: str = field(default="")

    def text(self, document: Document) -> str:
        """What the model is shown of a document."""
        if not document.messages:
            return document.text
        return self._rendered(document) if self.encoder.templates else plain(document)

    def encode(self, document: Document, text: str) -> list[int]:
        """Token ids of `text`, which `text` made of the document."""
        return (
            self.encoder.encode_rendered(text)
            if document.messages and self.encoder.templates
            else self.encoder.encode(text)
        )

    def _rendered(self, document: Document) -> str:
        refusal: QuantkitError | None = None
        for number, (messages, tools) in enumerate(_forms(document)):
            try:
                text = self._with_thought(messages, tools)
            except QuantkitError as error:
                refusal = refusal or error
                continue
            if number > 1:
                self.simplified, self.refusal = self.simplified + 1, self.refusal or str(refusal)
            return text
        assert refusal is not None
        raise refusal

    def _with_thought(self, messages: list[Message], tools: list[Any] | None) -> str:
        text = self.encoder.render(messages, tools=tools, add_generation_prompt=False)
        thought, reply = _parts(messages[-1])
        if not thought or thought in text:
            return text
        prompt = (
            self.encoder.render(messages[:-1], tools=tools, add_generation_prompt=True)
            if len(messages) > 1
            else ""
        )
        opening = "" if prompt.rstrip().endswith(THINK) else f"{THINK}\n"
        return f"{prompt}{opening}{thought}\n{END_THINK}\n\n{reply}{self.encoder.eos or ''}"


def plain(document: Document) -> str:
    """A conversation as text for a model that has no template: what is said, in order."""
    told = [json.dumps(list(document.tools), ensure_ascii=False)] if document.tools else []
    for message in _as_text(list(document.messages)):
        thought, reply = _parts(message)
        told += [part for part in (thought, reply) if part.strip()]
    return "\n\n".join(told)


def _forms(document: Document) -> Iterator[tuple[list[Message], list[Any] | None]]:
    """As it is; with arguments of calls as text, which some templates expect; without tools; the
    system's words with the user's."""
    messages = list(document.messages)
    tools = list(document.tools) or None
    yield messages, tools
    yield [_with_text_arguments(one) for one in messages], tools
    spoken = _as_text(messages)
    yield spoken, None
    yield _alternating(spoken), None


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [
        {**call["function"], "arguments": _json(call["function"]["arguments"])} for call in calls
    ]
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, functions)],
    }


def _as_text(messages: list[Message]) -> list[Message]:
    """Without tools: a call is what the assistant says, its result what the user says."""
    spoken = []
    for message in messages:
        calls = [_json(call["function"]) for call in message.get("tool_calls", [])]
        role = "user" if message["role"] == "tool" else message["role"]
        thought = {"reasoning_content": _parts(message)[0]} if _parts(message)[0] else {}
        spoken.append(
            {
                "role": role,
                **thought,
                "content": "\n".join(part for part in (_parts(message)[1], *calls) if part),
            }
        )
    return spoken


def _alternating(messages: list[Message]) -> list[Message]:
    """User and assistant in turn, as templates without a system role want it."""
    turns: list[Message] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        if turns and turns[-1]["role"] == role:
            turns[-1] = {
                **turns[-1],
                **message,
                "role": role,
                "content": f"{turns[-1]['content']}\n\n{message['content']}",
            }
        elif turns or role == "user":
            turns.append({**message, "role": role})
    return turns


def _parts(message: Message) -> tuple[str, str]:
    """Thought and reply of a message, whose thought stands in a field of its own, or in tags within
    the content."""
    content = message["content"]
    for name in _REASONING:
        if isinstance(message.get(name), str):
            return message[name].strip(), content
    if message["role"] == "assistant" and END_THINK in content:
        thought, _, reply = content.partition(END_THINK)
        return thought.replace(THINK, "", 1).strip(), reply.lstrip("\n")
    return "", content


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
