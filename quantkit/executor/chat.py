"""Text to tokens and back: the tokenizer of a checkpoint, its chat template, and text that streams.

`tokenizers` and `jinja2` read tokenizer.json and the template directly: importing transformers for them would cost seconds at every
start. Templates are programs that come with a model, so they run in jinja's sandbox.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from quantkit.errors import QuantkitError

THINK, END_THINK = "<think>", "</think>"
Message = dict[str, Any]
"""`role` and `content`, as OpenAI's chat messages."""


class ChatTokenizer:
    """The tokenizer of one checkpoint directory.

    eos_ids: tokens that end an answer, of generation_config.json, config.json and the tokenizer together. end_think: the id of </think>,
    if it is one token. sampling_defaults: temperature, top_p and top_k of generation_config.json, where it has them.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise QuantkitError(f"{path} has no tokenizer.json", "copy it from the original model")
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self.settings = _read_json(path / "tokenizer_config.json")
        self.bos = _token_text(self.settings.get("bos_token"))
        self.eos = _token_text(self.settings.get("eos_token"))
        self.eos_ids = self._find_eos(path)
        self.end_think: int | None = self.tokenizer.token_to_id(END_THINK)
        generation = _read_json(path / "generation_config.json")
        self.sampling_defaults = {key: generation[key] for key in ("temperature", "top_p", "top_k") if generation.get(key) is not None}
        self.template = _find_template(path, self.settings)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text to be continued, with the leading token the model expects."""
        ids = self._ids(text, add_special_tokens=True)
        bos = self.tokenizer.token_to_id(self.bos) if self.bos else None
        if self.settings.get("add_bos_token") and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids; special tokens are left out (DeepSeek's <think> is an ordinary token and stays)."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token alone, special or not; bytes that are no character by themselves show as U+FFFD."""
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The chat template's text for `messages`. QuantkitError where there is no template or it refuses them."""
        if self.template is None:
            raise QuantkitError("the model has no chat template", "use plain completions")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            text: str = environment.from_string(self.template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos or "",
                eos_token=self.eos or "",
                **variables,
            )
        except (TemplateError, TypeError) as fault:
            raise QuantkitError(f"the chat template refuses these messages: {fault}", "check roles and contents") from fault
        return text

    def encode_chat(self, messages: list[Message], **variables: Any) -> list[int]:
        """Token ids of the rendered conversation, ready to be answered."""
        return self.encode_rendered(self.render(messages, **variables))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a template's text, which already holds its special tokens."""
        return self._ids(text, add_special_tokens=False)

    def opens_think(self, text: str) -> bool:
        """Whether a rendered prompt ends inside <think>."""
        return text.rstrip().endswith(THINK)

    @property
    def prefills_think(self) -> bool:
        """Whether the template itself opens <think>, so that an answer begins inside it."""
        if self.template is None:
            return False
        return self.opens_think(self.render([{"role": "user", "content": "?"}]))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As a batch of one: tokenizers then lets other threads run meanwhile, and computes no offsets."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _find_eos(self, path: Path) -> frozenset[int]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(path / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        named = self.tokenizer.token_to_id(self.eos) if self.eos else None
        return frozenset(found if named is None else found | {named})


class TextStream:
    """Turns one answer's tokens into text as they come, and watches for stop strings.

    A character of several tokens appears when it is whole. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this token. After a stop string nothing more comes and `stopped` is set."""
        assert not self.stopped, "pushed past a stop string"
        self._held += self._decoder.step(self._tokenizer, token_id) or ""
        if not self._stop:
            return self._release(len(self._held))
        ends = [index for index in (self._held.find(stop) for stop in self._stop) if index >= 0]
        if ends:
            self.stopped = True
            text = self._release(min(ends))
            self._held = ""
            return text
        return self._release(len(self._held) - max(_overlap(self._held, stop) for stop in self._stop))

    def finish(self) -> str:
        """What is still held when the answer ends without a stop string."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` begin `stop`."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0


def _find_template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja where there is one, else tokenizer_config.json's (of several named ones, `default`)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    return template


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as fault:
        raise QuantkitError(f"{file} is not JSON: {fault}", "copy it from the original model") from fault
    return content


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
