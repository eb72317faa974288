"""A model of the playground: it answers like any engine, and reads a text at once to say what it
thinks of every token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from quantkit.executor.engine import Engine
from quantkit.models.context import CausalContext
from quantkit.models.mlp import MoeMlp


@dataclass(frozen=True)
class TextReading:
    """What a model makes of a text of T tokens: `final` [T, H] behind the last norm, and the
    experts topk_ids [T, k] of each MoE layer."""

    final: Tensor
    topk_ids: dict[int, Tensor]


class PlayModel:
    """name: as it is shown. The engine's experts tell what was chosen, while a text is read."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self.tokenizer = name, engine, engine.tokenizer
        self._model = engine.loaded.model
        self._chosen: dict[int, Tensor] | None = None
        layers: list[Any] = self._model.layers
        for number, layer in enumerate(layers):
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, MoeMlp):
                mlp.experts = self._watched(number, mlp.experts, mlp.routing.num_experts_per_tok)

    def _watched(
        self, number: int, experts: Callable[..., Tensor], chosen: int
    ) -> Callable[..., Tensor]:
        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            if self._chosen is not None:
                self._chosen[number] = topk_ids[:, :chosen].cpu()  # a shared expert may follow
            return experts(x, topk_ids, topk_weights)

        return run

    @torch.inference_mode()
    def read(self, ids: list[int]) -> TextReading:
        """The whole text in one pass, without the cache."""
        device = self.engine.loaded.device
        self._chosen = {}
        try:
            final = self._model(torch.tensor(ids, device=device), CausalContext([len(ids)], device))
            return TextReading(final, self._chosen)
        finally:
            self._chosen = None

    @torch.inference_mode()
    def logprobs(self, reading: TextReading, begin: int, end: int) -> Tensor:
        """What may follow the tokens begin..end: log-probabilities float32 [end - begin, V], on the
        CPU."""
        return self._model.logits(reading.final[begin:end]).float().log_softmax(dim=-1).cpu()

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token, special ones too; a character of several tokens stands with the
        last of them."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.tokenizer.tokenizer, token) or "" for token in ids]
