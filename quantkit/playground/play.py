"""A question to one model or two: their greedy answers as they are written, and then what each
makes of both."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Delta
from quantkit.playground.compare import parting, scored
from quantkit.playground.model import PlayModel

MAX_NEW_TOKENS = 2048

Tell = Callable[[dict[str, Any]], None]


class Playground:
    """One model, or two that read the same tokens. Not for several threads at once."""

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
        context: int = 4096,
    ) -> "Playground":
        """models: names and folders. context: tokens of a prompt and its answer, at most. Raises
        QuantkitError."""
        opened = []
        for name, path in models:
            options = EngineOptions(
                path, device=device, backend=backend, max_batch=1, max_model_len=context
            )
            opened.append(PlayModel(name, Engine.open(options)))
        return cls(opened)

    def play(
        self,
        question: str,
        *,
        raw: bool,
        max_new_tokens: int,
        tell: Tell,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Tell the answers piece by piece, side by side, then their tokens. raw: continue the text
        itself, without the chat template.

        Ends between two tokens once `stopped` says so. Raises QuantkitError for a question that
        cannot be answered.
        """
        prompt = self._prompt(question, raw)
        params = SamplingParams(max_new_tokens=max_new_tokens)
        answers: list[list[int]] = [[] for _ in self.models]
        began, open_streams = time.perf_counter(), dict(enumerate(self._streams(prompt, params)))
        try:
            while open_streams and not stopped():
                for side, stream in list(open_streams.items()):
                    delta = next(stream)
                    if delta.text:
                        tell({"kind": "text", "side": side, "text": delta.text})
                    if delta.completion is not None:
                        del open_streams[side]
                        answers[side] = delta.completion.token_ids
                        seconds, reason = (
                            time.perf_counter() - began,
                            delta.completion.finish_reason,
                        )
                        tell(
                            {
                                "kind": "done",
                                "side": side,
                                "count": len(answers[side]),
                                "seconds": seconds,
                                "reason": reason,
                            }
                        )
        finally:
            for stream in open_streams.values():
                stream.close()
        if not stopped():
            self._tell_scores(prompt, answers, tell, stopped)

    def _streams(self, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        for model in self.models:
            found: Iterator[Delta] = model.engine.stream(prompt, params)
            yield found

    def _tell_scores(
        self, prompt: list[int], answers: list[list[int]], tell: Tell, stopped: Callable[[], bool]
    ) -> None:
        if len(answers) == 2:
            tell({"kind": "parted", "at": parting(answers)})
        for side, answer in enumerate(answers):
            if stopped():
                return
            again = side == 1 and answer == answers[0]
            tell(
                {
                    "kind": "scored",
                    "side": side,
                    **({"as": 0} if again else scored(self.models, prompt, answer)),
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
            f"{first.name} and {second.name} read different tokens",
            "compare models of one tokenizer",
        )
