"""One record of people's data as a document: which of the known forms it has, and what of it is
text.

A record is a text or an object. Names of fields are compared without case. Recognised, in this
order:

    messages, conversations, conversation   a list of {role, content} (OpenAI) or {from, value} (ShareGPT), with `tools` and `system` beside
    instruction, output or response         alpaca, with `input` where there is one
    prompt or question, and                 a text and its reply, or two lists of messages
    response, completion, chosen, answer or output
    text, or content                        plain text
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

ACCEPTED = (
    "text, messages, conversations (ShareGPT), instruction and output (alpaca), or prompt "
    "and response"
)
Message = dict[str, Any]

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_KEPT = ("reasoning_content", "thinking", "reasoning", "tool_calls", "tool_call_id", "name")
_REPLIES = ("response", "completion", "chosen", "answer", "output")


class UnknownForm(ValueError):
    """The record is in no known form; the text says what is wrong with it."""


@dataclass(frozen=True)
class Document:
    """form: its name for people. Either `text`, or `messages` in OpenAI's form with the tools they
    may call. kind: what it is about, where the record says so."""

    form: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    kind: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.text.strip() and not any(
            one["content"].strip() or one.get("tool_calls") for one in self.messages
        )


def read_document(value: Any) -> Document:
    """The document that a record stands for. Raises UnknownForm."""
    if isinstance(value, str):
        return Document("text", text=value)
    if not isinstance(value, dict):
        raise UnknownForm("it is neither a text nor an object")
    fields = {str(name).strip().casefold(): one for name, one in value.items()}
    kind = fields.get("kind")
    return replace(_document(fields), kind=kind if isinstance(kind, str) else "")


def _document(fields: dict[str, Any]) -> Document:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(fields.get(name), list | str):
            return _conversation(name, fields)
    reply = next((name for name in _REPLIES if name in fields), None)
    if reply and "instruction" in fields:
        return _alpaca(fields, reply)
    asked = next((name for name in ("prompt", "question") if name in fields), None)
    if reply and asked:
        return _exchange(fields, asked, reply)
    for name in ("text", "content"):
        if name in fields:
            return Document(name, text=_text(fields[name], name))
    raise UnknownForm("it has " + (", ".join(list(fields)[:6]) if fields else "no field"))


def _conversation(name: str, fields: dict[str, Any]) -> Document:
    found = _list(fields[name], name)
    messages = [_message(one, f"{name}[{number}]") for number, one in enumerate(found)]
    shared = any(isinstance(one, dict) and "from" in one for one in found)
    system = _text(fields.get("system"), "system")
    if system and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": system})
    return Document(
        "ShareGPT" if shared else "messages",
        messages=tuple(messages),
        tools=tuple(_list(fields.get("tools"), "tools")),
    )


def _alpaca(fields: dict[str, Any], reply: str) -> Document:
    asked = [_text(fields.get(name), name) for name in ("instruction", "input")]
    turns = [
        ("system", _text(fields.get("system"), "system")),
        ("user", "\n\n".join(filter(None, asked))),
    ]
    turns.append(("assistant", _text(fields[reply], reply)))
    return Document("alpaca", messages=_turns(turns))


def _exchange(fields: dict[str, Any], asked: str, reply: str) -> Document:
    parts = [
        [_message(one, f"{name}[{number}]") for number, one in enumerate(fields[name])]
        if isinstance(fields[name], list)
        else list(_turns([(role, _text(fields[name], name))]))
        for name, role in ((asked, "user"), (reply, "assistant"))
    ]
    whole = (
        isinstance(fields[reply], list) and parts[1][:1] and parts[1][0]["role"] != "assistant"
    )  # `chosen` with its prompt
    return Document(
        f"{asked} and {reply}", messages=tuple(parts[1] if whole else parts[0] + parts[1])
    )


def _turns(turns: list[tuple[str, str]]) -> tuple[Message, ...]:
    return tuple({"role": role, "content": content} for role, content in turns if content)


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise UnknownForm(f"{place} is no object")
    said = value.get("role", value.get("from"))
    role = _ROLES.get(said.casefold()) if isinstance(said, str) else None
    if role is None:
        raise UnknownForm(
            f"{place} has role {said!r:.40}"
            if said is not None
            else f"{place} has neither role nor from"
        )
    if not {"content", "value", "tool_calls"} & set(value):
        raise UnknownForm(f"{place} has no content")
    message: Message = {
        "role": role,
        "content": _text(value.get("content", value.get("value")), place),
    }
    for name in _KEPT:
        if value.get(name) not in (None, "", []):
            message[name] = _calls(value[name], place) if name == "tool_calls" else value[name]
    return message


def _calls(value: Any, place: str) -> list[Any]:
    """Tool calls with their arguments as an object, as transformers asks for; OpenAI writes them as
    a text of JSON."""
    made = []
    for call in _list(value, f"{place}.tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnknownForm(f"{place} has a tool call without a function's name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):  # some models write anything
                arguments = json.loads(arguments)
        made.append(
            {
                **call,
                "type": "function",
                "function": {**function, "arguments": {} if arguments is None else arguments},
            }
        )
    return made


def _list(value: Any, name: str) -> list[Any]:
    """A list, which some data sets store as a text of JSON."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UnknownForm(f"{name} is a text and not a list") from error
    if not isinstance(value, list):
        raise UnknownForm(f"{name} is not a list")
    return value


def _text(value: Any, name: str) -> str:
    """A text; null is none; of OpenAI's lists of parts the texts together."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [
            part.get("text")
            if isinstance(part, dict) and part.get("type", "text") == "text"
            else part
            for part in value
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise UnknownForm(f"{name} has a part that is no text")
        return "\n".join(texts)
    if not isinstance(value, str):
        raise UnknownForm(f"{name} is {value!r:.40} and not a text")
    return value
