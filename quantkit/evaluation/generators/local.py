"""A local checkpoint as a generator, on the executor."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.model_files import read_file
from quantkit.evaluation.generators.generator import Drafts, Generation, ModelReply, Prompt
from quantkit.executor.engine import Engine
from quantkit.executor.hf_engine import open_engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import THINK


class Local:
    """Prompts run together, up to `options.max_batch` in a batch. count_experts: a file that
    `close` writes, with the tokens routed to each expert."""

    identity_is_certain = True

    def __init__(
        self, options: EngineOptions, *, name: str, count_experts: Path | None = None
    ) -> None:
        self.name, self._counts_file = name, count_experts
        self.identity: dict[str, Any] = {"checkpoint": content_hash(options.model_path)}
        if options.cache is not None:
            self.identity |= {"cache": options.cache}
        self.engine = open_engine(replace(options, count_experts=count_experts is not None))
        self._defaults = _server_defaults(self.engine.tokenizer)
        if self._defaults:
            self.identity |= {"sampling": self._defaults}

    def generate(self, prompts: Sequence[Prompt], parameters: Generation) -> Iterator[ModelReply]:
        encoded = [encode_prompt(self.engine.tokenizer, prompt) for prompt in prompts]
        limit = self.engine.max_model_len
        fitting = [index for index, (ids, _) in enumerate(encoded) if len(ids) < limit]
        for index in set(range(len(prompts))).difference(fitting):
            refusal_text = f"the prompt has {len(encoded[index][0])} tokens, the context is {limit}"
            yield ModelReply(index, finish_reason="context", refusal=refusal_text)
        sampling = [
            SamplingParams(
                max_new_tokens=parameters.max_tokens or limit,
                temperature=parameters.temperature,
                top_p=parameters.top_p,
                seed=prompts[index].seed,
                stop=parameters.stop,
                **self._defaults,
            )
            for index in fitting
        ]
        for done in self.engine.generate([encoded[index][0] for index in fitting], sampling):
            index = fitting[done.index]
            if done.fault is not None:
                yield ModelReply(index, error=f"{type(done.fault).__name__}: {done.fault}")
                continue
            yield ModelReply(
                index=index,
                text=done.text,
                finish_reason="length" if done.finish_reason == "length" else "stop",
                prompt_tokens=done.prompt_tokens,
                completion_tokens=len(done.token_ids),
                latency_s=done.timings.total_s,
                think_open=encoded[index][1],
            )

    def open_tokens(self) -> list[int]:
        if not isinstance(self.engine, Engine):
            return []
        return [len(one.generated) for one in list(self.engine.scheduler.running)]

    def drafts(self) -> Drafts | None:
        if self.engine.speculation is None:
            return None
        found = self.engine.speculation.acceptance
        return Drafts(found.drafted, found.accepted)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids as `generate` uses them."""
        return encode_prompt(self.engine.tokenizer, prompt)[0]

    def close(self) -> None:
        if self._counts_file is not None and self.engine.expert_counter is not None:
            self.engine.expert_counter.counts.write(self._counts_file)
        del self.engine


def _server_defaults(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Sampling defaults of generation_config.json that servers apply where a request does not
    set them, so that a local model scores the same as a served one."""
    given = {name: tokenizer.sampling_defaults.get(name) for name in _CHANGES_NOTHING}
    return {name: value for name, value in given.items() if value not in _CHANGES_NOTHING[name]}


_CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
}


def encode_prompt(tokenizer: ChatTokenizer, prompt: Prompt) -> tuple[list[int], bool]:
    """Token ids, and whether they end inside <think>, by the chat template or because the
    protocol asks for it."""
    if prompt.text is not None:
        return tokenizer.encode(prompt.text), False
    text = tokenizer.render(list(prompt.messages))
    is_open = tokenizer.opens_think(text)
    if prompt.think and not is_open and tokenizer.tokenizer.token_to_id(THINK) is not None:
        text, is_open = f"{text}{THINK}\n", True
    return tokenizer.encode_rendered(text), is_open


def template_reasons(path: Path) -> bool | None:
    """Whether the checkpoint's chat template opens <think>; None without a chat template. Loads
    the tokenizer only."""
    tokenizer = ChatTokenizer(path)
    return tokenizer.prefills_think if "default" in tokenizer.templates else None


def content_hash(path: Path) -> str:
    """A hash of the weights, the tokenizer and the chat template: the checkpoint's fingerprint
    and its small files."""
    digest = hashlib.sha256(Checkpoint.open(path).fingerprint.encode())
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".jinja"):
            digest.update(f"{file.name}:".encode() + read_file(file))
    return digest.hexdigest()
