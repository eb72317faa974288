"""One question to one or two models: their greedy answers as they are generated, then the scores of
both answers under each model."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Delta
from quantkit.playground.model import PlayModel, first_difference, score_answer

MAX_NEW_TOKENS = 2048

Send = Callable[[dict[str, Any]], None]


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
