"""One question to one or two models: their greedy answers as they are generated, then the scores of
both answers under each model. A model generates like any engine, and scores a whole text in one
forward pass."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.distance.replies import common_prefix
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Delta
from quantkit.executor.weights.expert_counter import watch_experts
from quantkit.models.context import CausalContext


@dataclass(frozen=True)
class TextReading:
    """A forward pass over a text of T tokens: `final` [T, H] after the last norm, and the experts
    topk_ids [T, k] of each MoE layer."""

    final: Tensor
    topk_ids: dict[int, Tensor]


class PlayModel:
    """name: displayed. The engine's experts are wrapped to record topk_ids while a text is
    scored."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self.tokenizer = name, engine, engine.tokenizer
        self._model = engine.loaded.model
        self._topk_ids: dict[int, Tensor] | None = None
        watch_experts(self._model, self._record)

    def _record(self, layer: int, topk_ids: Tensor) -> None:
        if self._topk_ids is not None:
            self._topk_ids[layer] = topk_ids.cpu()

    @torch.inference_mode()
    def read(self, ids: list[int]) -> TextReading:
        """Forward pass over the whole text, without the cache."""
        device = self.engine.loaded.device
        self._topk_ids = {}
        try:
            final = self._model(torch.tensor(ids, device=device), CausalContext([len(ids)], device))
            return TextReading(final, self._topk_ids)
        finally:
            self._topk_ids = None

    @torch.inference_mode()
    def logprobs(self, reading: TextReading, begin: int, end: int) -> Tensor:
        """Log-probabilities of the next token after tokens begin..end: float32 [end - begin, V], on
        the CPU."""
        return self._model.logits(reading.final[begin:end]).float().log_softmax(dim=-1).cpu()

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token, including special ones; a character of several tokens belongs to
        the last of them."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.tokenizer.tokenizer, token) or "" for token in ids]


_ROWS = 64
"""Number of tokens whose distributions are in memory at a time."""
_ALTERNATIVES = 5


def score_answer(models: list[PlayModel], prompt: list[int], answer: list[int]) -> JsonObject:
    """For each token of the answer: text, probability under each model, KL(first || second) in
    nats, the most likely tokens of each.

    For two MoE models also the share of the first one's experts that the second did not choose, by
    layer and token.
    """
    ids = prompt + answer
    readings = [model.read(ids) for model in models]
    tokens: list[JsonObject] = [{"text": text} for text in models[0].pieces(answer)]
    for begin in range(0, len(answer), _ROWS):
        rows = min(_ROWS, len(answer) - begin)
        first = len(prompt) - 1 + begin
        logprobs = [
            model.logprobs(reading, first, first + rows) for model, reading in zip(models, readings)
        ]
        for row in range(rows):
            tokens[begin + row] |= _token(
                models, [one[row] for one in logprobs], answer[begin + row]
            )
    experts = (
        changed_experts(readings, len(prompt) - 1, len(ids) - 1) if len(readings) == 2 else None
    )
    return {"tokens": tokens, "experts": experts}


def _token(models: list[PlayModel], rows: list[Tensor], token: int) -> JsonObject:
    """rows: log-probabilities [V] of each model."""
    top = [one.topk(min(_ALTERNATIVES, len(one))) for one in rows]
    text = models[0].tokenizer.token_text
    return {
        "p": [float(one[token].exp()) for one in rows],
        "kl": divergence(*rows) if len(rows) == 2 else None,
        "top": [
            [[text(i), float(v.exp())] for i, v in zip(one.indices.tolist(), one.values)]
            for one in top
        ],
    }


def divergence(first: Tensor, second: Tensor) -> float:
    """KL(first || second) in nats of log-probabilities [V]; tokens with probability 0 under the
    first contribute 0."""
    p = first.double().exp()
    terms = torch.where(p > 0, p * (first.double() - second.double()), 0.0)
    return max(float(terms.sum()), 0.0)


def changed_experts(readings: list[TextReading], begin: int, end: int) -> JsonObject | None:
    """For the tokens begin..end: by layer and token, the share of the first model's experts that
    the second did not choose.

    None for models without experts.
    """
    first, second = (reading.topk_ids for reading in readings)
    layers = sorted(first.keys() & second.keys())
    if not layers:
        return None
    changed = []
    for layer in layers:
        ours, theirs = first[layer][begin:end], second[layer][begin:end]
        shared = (ours[:, :, None] == theirs[:, None, :]).any(dim=2)
        changed.append((1 - shared.float().mean(dim=1)).tolist())
    return {"layers": layers, "changed": changed}


def first_difference(answers: list[list[int]]) -> int | None:
    """The first position where two answers differ; None if they are equal."""
    first, second = answers
    return None if first == second else common_prefix(first, second)


MAX_NEW_TOKENS = 2048

Send = Callable[[JsonObject], None]


class Playground:
    """One model, or two with the same tokenizer. Not thread-safe."""

    def __init__(self, models: list[PlayModel]) -> None:
        self.models = models
        if len(models) == 2:
            _check_same_tokens(*models)

    @classmethod
    def open(
        cls,
        models: list[tuple[str, Path]],
        *,
        device: str = "auto",
        backend: str = "auto",
        context: int | None = None,
    ) -> "Playground":
        """models: names and folders. context: maximum tokens of a prompt and its answer; None:
        4096, or what a model has where that is less. Raises QuantkitError."""
        opened = []
        for name, path in models:
            options = EngineOptions(
                path,
                device=device,
                backend=backend,
                max_batch=1,
                max_model_len=context,
                cache_tokens=4096 if context is None else None,
            )
            opened.append(PlayModel(name, Engine.open(options)))
        return cls(opened)

    def play(
        self,
        question: str,
        *,
        raw: bool,
        max_new_tokens: int,
        send: Send,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send the answers piece by piece, then their token scores, to `send`. raw: continue the
        text itself, without the chat template.

        Stops between two tokens once `stopped` returns true. Raises QuantkitError for a question
        that cannot be answered.
        """
        prompt = self._prompt(question, raw)
        params = SamplingParams(max_new_tokens=max_new_tokens)
        answers: list[list[int]] = [[] for _ in self.models]
        start, open_streams = time.perf_counter(), dict(enumerate(self._streams(prompt, params)))
        try:
            while open_streams and not stopped():
                for side, stream in list(open_streams.items()):
                    delta = next(stream)
                    if delta.text:
                        send({"kind": "text", "side": side, "text": delta.text})
                    if delta.completion is not None:
                        del open_streams[side]
                        answers[side] = delta.completion.token_ids
                        send(
                            {
                                "kind": "done",
                                "side": side,
                                "count": len(answers[side]),
                                "seconds": time.perf_counter() - start,
                                "reason": delta.completion.finish_reason,
                            }
                        )
        finally:
            for stream in open_streams.values():
                stream.close()
        if not stopped():
            self._send_scores(prompt, answers, send, stopped)

    def _streams(self, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        for model in self.models:
            found: Iterator[Delta] = model.engine.stream(prompt, params)
            yield found

    def _send_scores(
        self, prompt: list[int], answers: list[list[int]], send: Send, stopped: Callable[[], bool]
    ) -> None:
        if len(answers) == 2:
            send({"kind": "parted", "at": first_difference(answers)})
        for side, answer in enumerate(answers):
            if stopped():
                return
            is_repeated = side == 1 and answer == answers[0]
            send(
                {
                    "kind": "scored",
                    "side": side,
                    **({"as": 0} if is_repeated else score_answer(self.models, prompt, answer)),
                }
            )

    def _prompt(self, question: str, raw: bool) -> list[int]:
        tokenizer = self.models[0].tokenizer
        ids = (
            tokenizer.encode(question)
            if raw
            else tokenizer.encode_chat([{"role": "user", "content": question}])
        )
        room = min(model.engine.max_model_len for model in self.models)
        if len(ids) >= room:
            raise QuantkitError(
                f"the prompt has {len(ids)} tokens, the context holds {room}", "shorten it"
            )
        return ids

    @property
    def has_template(self) -> bool:
        return "default" in self.models[0].tokenizer.templates


def _check_same_tokens(first: PlayModel, second: PlayModel) -> None:
    vocabularies = [
        model.tokenizer.tokenizer.get_vocab(with_added_tokens=True) for model in (first, second)
    ]
    sizes = [model.engine.loaded.config.vocab_size for model in (first, second)]
    if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
        raise QuantkitError(
            f"{first.name} and {second.name} have different tokenizers",
            "compare models with the same tokenizer",
        )
