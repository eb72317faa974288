"""Calibration documents: records of a file or a `datasets` data set, and the record formats that
are recognized.

.txt and .md are one text. .jsonl, .ndjson and .json hold one record a line, or a list of records,
whatever the suffix says; .csv and .tsv have a header; .parquet is read through pyarrow. Other names
are data set ids: read from the cache of the `datasets` library, or streamed from the hub.

A record is a text or an object. Field names are compared without case. Recognized, in this order:

    messages, conversations, conversation   a list of {role, content} (OpenAI) or {from, value}
                                            (ShareGPT), optionally with `tools` and `system`
    instruction, output or response         alpaca, optionally with `input`
    prompt or question, and                 a text and its reply, or two lists of messages
    response, completion, chosen, answer or output
    text, or content                        plain text

Conversations are rendered by the model's own chat template. Templates of reasoning models drop the
reasoning of earlier replies; but as such a model mostly writes reasoning, the last reply is
appended to the prompt with it, as the model itself would write it. If a template refuses a
conversation (tools, a system message, the order of roles), simpler forms are tried; a model without
a template gets plain text.
"""

import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.common import records
from quantkit.common.errors import QuantkitError
from quantkit.common.records import Record
from quantkit.common.result import JsonObject, one_line
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import END_THINK, THINK

ACCEPTED_FORMATS = (
    "text, messages, conversations (ShareGPT), instruction and output (alpaca), or prompt "
    "and response"
)
Message = JsonObject

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


class UnknownRecordFormat(ValueError):
    """The record has no known format; the message says why."""


@dataclass(frozen=True)
class Document:
    """form: display name of its format. Either `text`, or `messages` in OpenAI's format with the
    tools they may call. kind: its topic, where the record states it."""

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
    """The document of a record. Raises UnknownRecordFormat."""
    if isinstance(value, str):
        return Document("text", text=value)
    if isinstance(value, list | tuple):
        value = {"messages": list(value)}
    if not isinstance(value, dict):
        raise UnknownRecordFormat("it is neither a text nor an object")
    fields = {str(name).strip().casefold(): one for name, one in value.items()}
    kind = fields.get("kind")
    return replace(_document(fields), kind=kind if isinstance(kind, str) else "")


def _document(fields: JsonObject) -> Document:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(fields.get(name), list | str):
            return _conversation(name, fields)
    reply = next((name for name in _REPLIES if name in fields), None)
    if reply and "instruction" in fields:
        return _alpaca(fields, reply)
    question = next((name for name in ("prompt", "question") if name in fields), None)
    if reply and question:
        return _exchange(fields, question, reply)
    for name in ("text", "content"):
        if name in fields:
            return Document(name, text=_text(fields[name], name))
    raise UnknownRecordFormat("it has " + (", ".join(list(fields)[:6]) if fields else "no field"))


def _conversation(name: str, fields: JsonObject) -> Document:
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


def _alpaca(fields: JsonObject, reply: str) -> Document:
    question = [_text(fields.get(name), name) for name in ("instruction", "input")]
    turns = [
        ("system", _text(fields.get("system"), "system")),
        ("user", "\n\n".join(filter(None, question))),
    ]
    turns.append(("assistant", _text(fields[reply], reply)))
    return Document("alpaca", messages=_turns(turns))


def _exchange(fields: JsonObject, question: str, reply: str) -> Document:
    parts = [
        [_message(one, f"{name}[{number}]") for number, one in enumerate(fields[name])]
        if isinstance(fields[name], list)
        else list(_turns([(role, _text(fields[name], name))]))
        for name, role in ((question, "user"), (reply, "assistant"))
    ]
    whole = (
        isinstance(fields[reply], list) and parts[1][:1] and parts[1][0]["role"] != "assistant"
    )  # `chosen` with its prompt
    return Document(
        f"{question} and {reply}", messages=tuple(parts[1] if whole else parts[0] + parts[1])
    )


def _turns(turns: list[tuple[str, str]]) -> tuple[Message, ...]:
    return tuple({"role": role, "content": content} for role, content in turns if content)


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise UnknownRecordFormat(f"{place} is not an object")
    stated = value.get("role", value.get("from"))
    role = _ROLES.get(stated.casefold()) if isinstance(stated, str) else None
    if role is None:
        raise UnknownRecordFormat(
            f"{place} has role {stated!r:.40}"
            if stated is not None
            else f"{place} has neither role nor from"
        )
    if not {"content", "value", "tool_calls"} & set(value):
        raise UnknownRecordFormat(f"{place} has no content")
    message: Message = {
        "role": role,
        "content": _text(value.get("content", value.get("value")), place),
    }
    for name in _KEPT:
        if value.get(name) not in (None, "", []):
            message[name] = _calls(value[name], place) if name == "tool_calls" else value[name]
    return message


def _calls(value: Any, place: str) -> list[Any]:
    """Tool calls with their arguments as an object, as transformers expects; OpenAI writes them as
    a JSON string."""
    made = []
    for call in _list(value, f"{place}.tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnknownRecordFormat(f"{place} has a tool call without a function's name")
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
    """A list, which some data sets store as a JSON string."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UnknownRecordFormat(f"{name} is a text and not a list") from error
    if not isinstance(value, list):
        raise UnknownRecordFormat(f"{name} is not a list")
    return value


def _text(value: Any, name: str) -> str:
    """A text; "" for null; the texts of OpenAI's list of parts, joined."""
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
            raise UnknownRecordFormat(f"{name} has a part that is not a text")
        return "\n".join(texts)
    if not isinstance(value, str):
        raise UnknownRecordFormat(f"{name} is {value!r:.40} and not a text")
    return value


TEXTS = (".txt", ".md")
FILES = (*TEXTS, *records.ENDINGS)
_MOST_ROWS = 20_000
"""Rows read of a table or a data set: documents are drawn from these."""
_DATA_SET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]+){0,2}")
_GIVE = f"give a {', '.join(FILES[:-1])} or {FILES[-1]} file, or the id of a data set"


def listed_records(given: Any) -> list[Any]:
    """The records of a Python object: texts, lists of messages, objects; a data set, a data frame.
    Raises QuantkitError for anything else."""
    if hasattr(given, "columns") and hasattr(given, "to_dict"):
        given = given.to_dict("records")
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise QuantkitError(
            f"calibration is {one_line(repr(given))[:60]}, a {type(given).__name__}",
            "give a file, a data set's id, one split of a data set, or a list of texts or messages",
        )
    found = list(given)
    if found and all(isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in found):
        return [found]  # the messages of one conversation
    return found


def read_records(source: str) -> Iterator[Record]:
    """All records of a file, or the first 20,000 rows of a table or a data set. Raises
    QuantkitError."""
    path = Path(source)
    ending = path.suffix.casefold()
    if ending in FILES or path.exists():
        if path.is_dir():
            raise QuantkitError(f"calibration data {source} is a folder", _GIVE)
        if ending not in FILES:
            raise QuantkitError(
                f"calibration data {source} is none of the files that are read", _GIVE
            )
        if ending in TEXTS:
            return iter([(str(path), records.read_text(path, "calibration data"))])
        found = records.read_records(path)
        is_table = ending in (".csv", ".tsv", ".parquet")
        return itertools.islice(found, _MOST_ROWS) if is_table else found
    # No data set without an owner is named as a file is: the hub need not be asked for notes.pdf.
    identifier = source.partition(":")[0]
    is_file = identifier.startswith(".") or ("." in identifier and "/" not in identifier)
    if is_file or not _DATA_SET.fullmatch(source):
        raise QuantkitError(f"calibration data {source} does not exist", _GIVE)
    return _data_set(source)


def _data_set(name: str) -> Iterator[Record]:
    """`id`, `id:split` or `id:config:split`."""
    try:
        import datasets
    except ImportError as error:
        raise QuantkitError(
            f"calibration data {name} is not a file, and the `datasets` library is not installed",
            "give a file, or pip install datasets",
        ) from error
    identifier, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    options = {"path": identifier, "name": rest[0] if len(rest) > 1 else None, "split": split}
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # they log every retry
    try:
        rows = _cached(datasets, options) or datasets.load_dataset(**options, streaming=True).take(
            _MOST_ROWS
        )
        for number, row in zip(range(_MOST_ROWS), rows):
            yield f"data set {name} row {number + 1}", row
    except (
        Exception
    ) as error:  # the library raises its own errors, and those of several network clients
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        not_cached = datasets.config.HF_HUB_OFFLINE and not _in_cache(datasets, identifier)
        problem = (
            f"data set {name} is not in the cache, and this is offline"
            if not_cached
            else f"data set {name} cannot be loaded: {reason}"
        )
        raise QuantkitError(problem, "check its id and split, or give a file") from error


def _cached(datasets: Any, options: JsonObject) -> Any:
    """The data set from the cache of an earlier download, without network access; None if it is not
    there."""
    if not _in_cache(datasets, str(options["path"])):
        return None
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        return datasets.load_dataset(**options)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _in_cache(datasets: Any, identifier: str) -> bool:
    wanted, cache = _same(identifier.replace("/", "___")), Path(datasets.config.HF_DATASETS_CACHE)
    folders = (
        [one for one in cache.iterdir() if _same(one.name) == wanted] if cache.is_dir() else []
    )
    return any(any(one.rglob("*.arrow")) for one in folders)


def _same(name: str) -> str:
    """The library writes OpenOrca as open_orca in its cache."""
    return name.casefold().replace("_", "")


_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass
class Templating:
    """simplified: documents that the template only accepted in a simpler form; refusal: why it
    refused the first of them."""

    encoder: ChatTokenizer
    simplified: int = 0
    refusal: str = ""

    def text(self, document: Document) -> str:
        """Text of a document as the model sees it."""
        if not document.messages:
            return document.text
        return self._rendered(document) if self.encoder.templates else plain_text(document)

    def encode(self, document: Document, text: str) -> list[int]:
        """Token ids of `text`, as returned by `text` for this document."""
        return (
            self.encoder.encode_rendered(text)
            if document.messages and self.encoder.templates
            else self.encoder.encode(text)
        )

    def _rendered(self, document: Document) -> str:
        refusal: QuantkitError | None = None
        for number, (messages, tools) in enumerate(_forms(document)):
            try:
                text = self._with_reasoning(messages, tools)
            except QuantkitError as error:
                refusal = refusal or error
                continue
            if number > 1:
                self.simplified, self.refusal = self.simplified + 1, self.refusal or str(refusal)
            return text
        assert refusal is not None
        raise refusal

    def _with_reasoning(self, messages: list[Message], tools: list[Any] | None) -> str:
        text = self.encoder.render(messages, tools=tools, add_generation_prompt=False)
        reasoning, reply = _parts(messages[-1])
        if not reasoning or reasoning in text:
            return text
        prompt = (
            self.encoder.render(messages[:-1], tools=tools, add_generation_prompt=True)
            if len(messages) > 1
            else ""
        )
        opening = "" if prompt.rstrip().endswith(THINK) else f"{THINK}\n"
        return f"{prompt}{opening}{reasoning}\n{END_THINK}\n\n{reply}{self.encoder.eos or ''}"


def plain_text(document: Document) -> str:
    """A conversation as text for a model without a template: all contents in order."""
    parts = [json.dumps(list(document.tools), ensure_ascii=False)] if document.tools else []
    for message in _as_text(list(document.messages)):
        reasoning, reply = _parts(message)
        parts += [part for part in (reasoning, reply) if part.strip()]
    return "\n\n".join(parts)


def _forms(document: Document) -> Iterator[tuple[list[Message], list[Any] | None]]:
    """As it is; with call arguments as text, which some templates expect; without tools; with the
    system message merged into the user's."""
    messages = list(document.messages)
    tools = list(document.tools) or None
    yield messages, tools
    yield [_with_text_arguments(one) for one in messages], tools
    as_text = _as_text(messages)
    yield as_text, None
    yield _alternating(as_text), None


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
    """Without tools: a call becomes content of the assistant, its result content of the user."""
    as_text = []
    for message in messages:
        calls = [_json(call["function"]) for call in message.get("tool_calls", [])]
        role = "user" if message["role"] == "tool" else message["role"]
        reasoning = {"reasoning_content": _parts(message)[0]} if _parts(message)[0] else {}
        as_text.append(
            {
                "role": role,
                **reasoning,
                "content": "\n".join(part for part in (_parts(message)[1], *calls) if part),
            }
        )
    return as_text


def _alternating(messages: list[Message]) -> list[Message]:
    """Alternating user and assistant, for templates without a system role."""
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
    """Reasoning and reply of a message; the reasoning is in a field of its own, or in tags within
    the content."""
    content = message["content"]
    for name in _REASONING:
        if isinstance(message.get(name), str):
            return message[name].strip(), content
    if message["role"] == "assistant" and END_THINK in content:
        reasoning, _, reply = content.partition(END_THINK)
        return reasoning.replace(THINK, "", 1).strip(), reply.lstrip("\n")
    return "", content


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
