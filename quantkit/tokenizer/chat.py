"""Text to tokens and back: a checkpoint's tokenizer, its chat template, streamed text and stop
strings.

The model's files are read with `tokenizers` (loader.py), because importing transformers would take
seconds at every start. Chat templates are programs that come with a model: they run in a separate
process with limits on time and memory (template_worker.py). It starts with the first rendering
(0.1 s) and stays alive. A short conversation then takes 0.05 ms, compared with 0.01 ms in this
process.
"""

import functools
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from quantkit.common.errors import QuantkitError, library_errors
from quantkit.common.model_files import is_there, read_json, read_text
from quantkit.common.result import JsonObject
from quantkit.common.worker_process import WorkerEnded, WorkerProcess
from quantkit.tokenizer.loader import read_tokenizer, tokenizer_file
from quantkit.tokenizer.reasoning_tags import END_THINK, THINK
from quantkit.tokenizer.tiktoken import byte_letters

Message = JsonObject
"""`role` and `content`, as OpenAI's chat messages."""

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_DEFAULTS = {
    "temperature": 100.0,
    "top_p": 1.0,
    "top_k": 2**31 - 1,
    "min_p": 1.0,
    "repetition_penalty": 100.0,
}
"""Sampling settings read from generation_config.json, and the largest value of each."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first one, some the second."""
_BYTES = {letter: byte for byte, letter in byte_letters().items()}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are not, or not yet, a whole character."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A SentencePiece token for one byte of a character that the vocabulary lacks."""
_COPY_AGAIN = "copy it from the original model"
_STOP_CACHE = 64
"""Sets of stop strings whose tokens are cached."""
_CONTEXT_FREE = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
"""Decoders under which a token's text does not depend on the tokens before it, except for a leading
space and for bytes of a character that several tokens share."""
_WORKER = WorkerProcess(Path(__file__).with_name("template_worker.py"))
"""Shared by all templates of this process."""
_DEADLINE_S = 30.0
"""Wall-clock limit, for a worker that hangs. The worker itself limits CPU time, which does not
depend on the load of the machine."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template. `name` is its source file for messages. Usable from several threads, one
    rendering at a time."""

    source: str
    name: str

    def render(self, variables: JsonObject) -> str:
        """The text rendered from JSON values. Raises QuantkitError where the template rejects them,
        fails, or takes too long."""
        try:
            line = json.dumps({"source": self.source, "variables": variables}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise QuantkitError(
                f"the messages cannot be written as JSON: {error}",
                "give texts, numbers, lists and objects",
            ) from error
        reply = self._request(line)
        if "fault" in reply:
            raise QuantkitError(
                f"the chat template in {self.name} refuses these messages: {reply['fault']}",
                "check roles and contents",
            )
        return reply["text"]

    def check(self) -> None:
        """Raises QuantkitError where it does not compile; which messages it accepts shows only when
        it is rendered."""
        self._request(json.dumps({"source": self.source, "variables": {}}).encode() + b"\n")

    def _request(self, line: bytes) -> dict[str, str]:
        try:
            reply: dict[str, str] = _WORKER.ask(line, _DEADLINE_S)
        except WorkerEnded as end:
            timed_out = end.code in (-signal.SIGPROF, -signal.SIGKILL)
            raise QuantkitError(
                f"the chat template in {self.name} "
                + ("takes too long" if timed_out else f"ended its process (exit code {end.code})"),
                "use the model's own template, or a shorter conversation",
            ) from end
        if "unreadable" in reply:
            raise QuantkitError(
                f"the chat template in {self.name} is not a template: {reply['unreadable']}",
                "copy it from the original model",
            )
        return reply


class ChatTokenizer:
    """The tokenizer of one checkpoint directory.

    eos_ids: tokens that end an answer, from generation_config.json, config.json (and its
    text_config) and the tokenizer together. end_think: id of </think> if it is one token.
    unknown_id: token for text that the vocabulary cannot encode. sampling_defaults: temperature,
    top_p, top_k, min_p and repetition_penalty of generation_config.json, if set. templates: by
    name; `default` is the usual one, others are for special uses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = tokenizer_file(path)
        self.tokenizer, self.settings = read_tokenizer(path, _read_settings(path))
        self.special_tokens = _special_tokens(path / "tokenizer_config.json", self.settings)
        self.bos = self.special_tokens.get("bos_token")
        self.eos = self.special_tokens.get("eos_token")
        config = _merge_text_config(_read_optional(path / "config.json"))
        generation = _read_optional(path / "generation_config.json")
        vocab_size = config.get("vocab_size")
        self.vocab_size: int | None = vocab_size if type(vocab_size) is int else None
        self.eos_ids = self._find_eos(
            path, {"generation_config.json": generation, "config.json": config}
        )
        unknown = self.special_tokens.get("unk_token")
        self.unknown_id: int | None = self.tokenizer.token_to_id(unknown) if unknown else None
        self.end_think: int | None = self.tokenizer.token_to_id(END_THINK)
        self.sampling_defaults = _sampling_defaults(path / "generation_config.json", generation)
        self.templates = _find_templates(path, self.settings)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text to be continued, with the leading token that the model
        expects."""
        ids = self._ids(text, add_special_tokens=True)
        bos = self.tokenizer.token_to_id(self.bos) if self.bos else None
        if self.settings.get("add_bos_token") and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise QuantkitError(
                f"the text holds half of a character (at {error.start})", "give it as valid Unicode"
            ) from error
        with library_errors(f"{self.file} cannot encode this text", _COPY_AGAIN):
            # As a batch of one: tokenizers then releases the GIL and computes no offsets.
            ids: list[int] = self.tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )[0].ids
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            raise QuantkitError(
                f"{self.file} makes token {max(ids)} of this text, and config.json has vocab_size "
                f"= {self.vocab_size}",
                _COPY_AGAIN,
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids without special tokens (DeepSeek's <think> is an ordinary token and
        stays)."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special or not; bytes that are not a whole character become
        U+FFFD."""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token appends to a text, possibly a part of a character."""
        piece = self.tokenizer.id_to_token(token_id) or ""
        if lone := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(lone[1])
        # The first token of a text may lose its space.
        text: str = self.tokenizer.decode(
            [token_id, token_id], skip_special_tokens=False
        ).removeprefix(self.token_text(token_id))
        known = _REPLACEMENT in text and _BYTES.keys() >= {*piece}
        return bytes(_BYTES[letter] for letter in piece) if known else text.encode()

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The chat template's text for `messages`. Raises QuantkitError where there is no template
        or it rejects them."""
        named = "tool_use" if variables.get("tools") and "tool_use" in self.templates else "default"
        if named not in self.templates:
            raise QuantkitError(
                f"{self.path} has no chat template: no chat_template.jinja, and none in "
                "tokenizer_config.json or chat_template.json",
                "use plain completions, `run --raw`, or `serve --chat-template FILE`",
            )
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        conversation = [_with_reasoning(message) for message in messages]
        return self.templates[named].render(
            {**given, "messages": conversation, "add_generation_prompt": add_generation_prompt}
        )

    def use_template(self, template: ChatTemplate) -> None:
        """Render conversations with another template than the model's own."""
        self.templates = {"default": template}

    def encode_chat(self, messages: list[Message], **variables: Any) -> list[int]:
        """Token ids of the rendered conversation, ready to be answered."""
        ids = self.encode_rendered(self.render(messages, **variables))
        if not ids:
            raise QuantkitError(
                f"the chat template in {self.templates['default'].name} makes an empty text of "
                "these messages",
                _COPY_AGAIN,
            )
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of rendered text, which already holds its special tokens."""
        return self._ids(text, add_special_tokens=False)

    def opens_think(self, text: str) -> bool:
        """Whether a rendered prompt ends inside <think>."""
        return text.rstrip().endswith(THINK)

    @property
    def prefills_think(self) -> bool:
        """Whether the template itself opens <think>, so that an answer begins inside it."""
        if "default" not in self.templates:
            return False
        return self.opens_think(self.render([{"role": "user", "content": "?"}]))

    def _find_eos(self, path: Path, files: dict[str, JsonObject]) -> frozenset[int]:
        found: set[int] = set()
        for name, content in files.items():
            value = content.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(one) is int and 0 <= one < (self.vocab_size or 2**31) for one in ids):
                raise QuantkitError(
                    f"{path / name} has eos_token_id = {value!r:.60}",
                    "give ids of tokens that the model has",
                )
            found.update(ids)
        named = self.tokenizer.token_to_id(self.eos) if self.eos else None
        if named is not None and named < (self.vocab_size or 2**31):
            found.add(named)
        return frozenset(found)


class TextStream:
    """Decodes an answer's tokens incrementally and detects stop strings.

    A character that spans several tokens is returned when complete. Text that may be the start of a
    stop string is held back. skip_special: whether special tokens are omitted. min_tokens: a stop
    string that ends within the first `min_tokens` tokens is ordinary text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
        self._exempt = 0
        """Leading characters of the held text in which no stop string may end."""
        self._decoder = DecodeStream(skip_special_tokens=skip_special)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became final with this token. After a stop string, `stopped` is set and
        nothing more may be pushed."""
        assert not self.stopped, "pushed past a stop string"
        self._held += self._decoder.step(self._tokenizer, token_id) or ""
        if not self._stop:
            return self._release(len(self._held))
        if self._min_tokens:
            self._min_tokens, self._exempt = self._min_tokens - 1, len(self._held)
        ends = [index for index in map(self._find, self._stop) if index >= 0]
        if ends:
            self.stopped = True
            text = self._release(min(ends))
            self._held = ""
            return text
        return self._release(
            len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        )

    def finish(self) -> str:
        """The text still held when the answer ends without a stop string."""
        return self._release(len(self._held))

    def _find(self, stop: str) -> int:
        """Index of the stop string, -1 where it does not end the answer."""
        return self._held.find(stop, max(0, self._exempt - len(stop) + 1))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._exempt = max(0, self._exempt - count)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0


class StopTokens(dict[int, bool]):
    """Whether a token's text may hold the end of a stop string (True for some other tokens too);
    after all other tokens the text need not be searched. Computed when a token is first looked up.
    skip_special: whether special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], skip_special: bool) -> None:
        super().__init__()
        self._tokenizer, self._stop, self._skip_special = tokenizer, stop, skip_special
        self._context_free = _is_context_free(tokenizer) and not any(
            _REPLACEMENT in one for one in stop
        )

    def __missing__(self, token_id: int) -> bool:
        found = self[token_id] = not self._context_free or self._may_end(token_id)
        return found

    def _may_end(self, token_id: int) -> bool:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)
        if _REPLACEMENT in text:
            return True
        return any(_holds_end(shown, stop) for shown in (text, " " + text) for stop in self._stop)


@functools.lru_cache(maxsize=_STOP_CACHE)
def stop_tokens(tokenizer: Tokenizer, stop: tuple[str, ...], skip_special: bool) -> StopTokens:
    """The same object for all requests with the same stop strings."""
    return StopTokens(tokenizer, stop, skip_special)


def _holds_end(text: str, stop: str) -> bool:
    """Whether `stop` may end in `text`, whatever comes before it."""
    return stop in text or any(
        stop.endswith(text[:count]) for count in range(1, min(len(text), len(stop)) + 1)
    )


def _is_context_free(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    state: JsonObject = json.loads(tokenizer.decoder.__getstate__())
    parts = state["decoders"] if state.get("type") == "Sequence" else [state]
    return all(part.get("type") in _CONTEXT_FREE for part in parts)


def _special_tokens(file: Path, settings: JsonObject) -> dict[str, str]:
    """Text of the named special tokens in the settings; each is a string, or an object with
    `content`."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(text, str):
            raise QuantkitError(f"{file} has {name} = {token!r:.60}, expected a text", _COPY_AGAIN)
        if text is not None:
            found[name] = text
    return found


def _sampling_defaults(file: Path, generation: JsonObject) -> JsonObject:
    found = {key: generation[key] for key in _DEFAULTS if generation.get(key) is not None}
    for key, value in found.items():
        largest = _DEFAULTS[key]
        is_number = type(value) is int or (type(value) is float and key != "top_k")
        if (
            not is_number
            or not 0 <= value <= largest
            or (key in ("top_p", "repetition_penalty") and value == 0)
        ):
            raise QuantkitError(
                f"{file} has {key} = {value!r:.60}, expected a number from 0 to {largest:g}",
                _COPY_AGAIN,
            )
    return found


def _find_templates(path: Path, settings: JsonObject) -> dict[str, ChatTemplate]:
    """chat_template.jinja if it exists, else the template or the named templates in
    tokenizer_config.json, else chat_template.json, which transformers reads for vision models."""
    file = path / "chat_template.jinja"
    if is_there(file):
        return {"default": ChatTemplate(read_text(file), str(file))}
    file, found = path / "tokenizer_config.json", settings.get("chat_template")
    if found is None:
        file = path / "chat_template.json"
        found = _read_optional(file).get("chat_template")
    if found is None:
        return {}
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    if not all(
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("template"), str)
        for one in named
    ):
        raise QuantkitError(
            f"{file} has a chat_template that is neither a text nor a list of named ones",
            _COPY_AGAIN,
        )
    return {one["name"]: ChatTemplate(one["template"], str(file)) for one in named}


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under the keys that templates read, as in transformers."""
    reasoning = (
        next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if isinstance(message, dict)
        else None
    )
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _read_settings(path: Path) -> JsonObject:
    """tokenizer_config.json. Where it lists no added tokens, the special ones that older models
    name in special_tokens_map.json are included."""
    settings = _read_optional(path / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    named = _read_optional(path / "special_tokens_map.json")
    return settings | {name: token for name, token in named.items() if name in _SPECIAL_TOKENS}


def _merge_text_config(config: JsonObject) -> JsonObject:
    """config.json, completed by its text_config for a model that contains a text model."""
    text = config.get("text_config")
    own = {key: value for key, value in config.items() if value is not None}
    return {**text, **own} if isinstance(text, dict) else config


def _read_optional(file: Path) -> JsonObject:
    return read_json(file) if is_there(file) else {}
