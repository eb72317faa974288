"""/v1/responses: the same answers as a chat's, read and written in the shapes of OpenAI's Responses
API.

Nothing is stored: a conversation is sent whole, and previous_response_id is refused.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.executor.scheduler.sequence import Completion
from quantkit.executor.server.answers import AnswerReader, usage
from quantkit.executor.server.intake import Prepared
from quantkit.executor.server.protocol import HARMLESS, Exact, Messages, first_unsupported
from quantkit.executor.server.service import AnswerStream
from quantkit.executor.server.stream_parser import AnswerParts
from quantkit.executor.server.tools.formats import MAX_TOOLS
from quantkit.tokenizer.chat import ChatTokenizer

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_HARMLESS = HARMLESS | {"stream_options"}


class TextOptions(Exact):
    format: JsonObject = Field(default_factory=lambda: {"type": "text"})


class ResponsesRequest(BaseModel):
    """What is asked. Other fields than these must ask for nothing."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    input: str | Messages
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextOptions = Field(default_factory=TextOptions)
    tools: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    @property
    def unsupported(self) -> str | None:
        """The first field that would have to be ignored."""
        return first_unsupported(self.model_extra, _HARMLESS, _NEUTRAL)

    def as_chat(self) -> JsonObject:
        """The fields of the chat request that asks the same. Raises QuantkitError for items and
        tools that are not known."""
        said = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else list(_messages(self.input))
        )
        instructions = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        fields = {
            "model": self.model,
            "messages": [*instructions, *said],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_tool(one) for one in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format),
        }
        return {name: value for name, value in fields.items() if value is not None}


def _messages(items: list[JsonObject]) -> Iterator[JsonObject]:
    """Items of a conversation as messages; thoughts and calls that follow each other are one."""
    open_message: JsonObject = {}
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            open_message.setdefault("reasoning_content", _text(item.get("content") or []))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            open_message.setdefault("tool_calls", []).append(call)
        elif (
            kind == "message"
            and item.get("role") == "assistant"
            and not open_message.get("tool_calls")
        ):
            open_message["content"] = _text(item.get("content") or "")
        else:
            if open_message:
                yield {"role": "assistant", **open_message}
                open_message = {}
            yield _message(kind, item)
    if open_message:
        yield {"role": "assistant", **open_message}


def _message(kind: str, item: JsonObject) -> JsonObject:
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": _text(item.get("output") or ""),
        }
    if kind != "message":
        raise QuantkitError(
            f"input items of type {str(kind)[:100]} are not supported",
            "send messages, function calls and their outputs",
        )
    role = item.get("role")
    return {
        "role": "system" if role == "developer" else role,
        "content": _text(item.get("content") or ""),
    }


def _text(content: Any) -> str:
    """Of a text, or of parts that hold text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text") or not isinstance(
            part.get("text"), str
        ):
            raise QuantkitError(
                f"content parts of type {str(kind)[:100]} are not supported", "send text only"
            )
        texts.append(part["text"])
    return "".join(texts)


def _tool(given: JsonObject) -> JsonObject:
    if given.get("type") != "function":
        raise QuantkitError(
            f"tools of type {str(given.get('type'))[:100]} are not supported", "send functions"
        )
    return {"type": "function", "function": _named(given)}


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _format(given: JsonObject) -> JsonObject:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": _named(given)}


def _named(given: JsonObject) -> JsonObject:
    """What a tool or a format says besides its type."""
    return {name: value for name, value in given.items() if name != "type" and value is not None}


class ResponseAnswer:
    """One response, whole or as events: an item each for what was thought, said and called."""

    def __init__(
        self, prepared: Prepared, body: ResponsesRequest, tokenizer: ChatTokenizer, model: str
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._prepared, self._body, self._tokenizer, self._model = prepared, body, tokenizer, model
        self._created = int(time.time())
        self._reading = AnswerReader(prepared, separates=tokenizer.end_think is not None)
        self._items: list[JsonObject] = []
        self._open: JsonObject | None = None
        self._sequence = 0

    async def whole(self, stream: AnswerStream) -> JsonObject:
        last: JsonObject = {}
        async for event in self.events(stream):
            last = event
        response: JsonObject = last["response"]
        return response

    async def events(self, stream: AnswerStream) -> AsyncIterator[JsonObject]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for piece in stream:
            done = piece.completion
            for event in self._parts(self._reading.push(0, piece.text, last=done is not None)):
                yield event
            if done is not None:
                status = "incomplete" if done.finish_reason == "length" else "completed"
                for event in self._close(status):
                    yield event
                yield self._event(f"response.{status}", response=self._response(status, done))

    def _parts(self, parts: AnswerParts) -> Iterator[JsonObject]:
        if parts.reasoning:
            yield from self._goes_on("reasoning", parts.reasoning)
        if parts.content:
            yield from self._goes_on("message", parts.content)
        for call in parts.calls:
            if call.name is not None:
                fields = {"call_id": call.id, "name": call.name, "arguments": ""}
                yield from self._begin(
                    {
                        "type": "function_call",
                        "id": f"fc_{uuid.uuid4().hex}",
                        "status": "in_progress",
                        **fields,
                    }
                )
            assert self._open is not None, "a call has begun"
            self._open["arguments"] += call.arguments
            if call.arguments:
                yield self._about("response.function_call_arguments.delta", delta=call.arguments)

    def _goes_on(self, kind: str, text: str) -> Iterator[JsonObject]:
        """More text of an item, which begins where another one was open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(_text_item(kind))
            yield self._about("response.content_part.added", content_index=0, part=_part(kind, ""))
        assert self._open is not None, kind
        self._open["content"][0]["text"] += text
        more: JsonObject = {"logprobs": []} if kind == "message" else {}
        yield self._about(
            f"response.{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **more
        )

    def _begin(self, item: JsonObject) -> Iterator[JsonObject]:
        yield from self._close()
        shown = {**item, "content": []} if "content" in item else dict(item)
        self._items.append(item)
        self._open = item
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=shown
        )

    def _close(self, status: str = "completed") -> Iterator[JsonObject]:
        """The open item ends; status: incomplete where max_output_tokens cut it."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            text = item["content"][0]["text"]
            more: JsonObject = {"logprobs": []} if item["type"] == "message" else {}
            yield self._about(
                f"response.{_TEXT_EVENTS[item['type']]}.done", content_index=0, text=text, **more
            )
            yield self._about(
                "response.content_part.done", content_index=0, part=_part(item["type"], text)
            )
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

    def _about(self, kind: str, **fields: Any) -> JsonObject:
        """An event of the open item."""
        assert self._open is not None, kind
        return self._event(
            kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields
        )

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str, done: Completion | None = None) -> JsonObject:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": self._prepared.choices[0][1].temperature,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": self._prepared.choices[0][1].top_p,
            "truncation": "disabled",
            "usage": None if done is None else _usage(done, self._tokenizer, self._prepared.inside),
        }


_TEXT_EVENTS = {"reasoning": "reasoning_text", "message": "output_text"}


def _part(kind: str, text: str) -> JsonObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(kind: str) -> JsonObject:
    item = {
        "type": kind,
        "id": f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}",
        "status": "in_progress",
    }
    more: JsonObject = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {**item, **more, "content": [_part(kind, "")]}


def _usage(done: Completion, tokenizer: ChatTokenizer, inside: bool) -> JsonObject:
    counted = usage([done], 1, tokenizer.end_think, inside=inside)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"],
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
