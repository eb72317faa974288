"""Answers' newest tokens and prompts' chunks in one pass: weights are read once for both, and each
attends by its own operators."""

import torch
from torch import Tensor

from quantkit.executor.runner.attention_context import CachedContext, DecodeContext, PromptContext
from quantkit.models.compressed_attention import CompressedAttention, CompressedInputs
from quantkit.models.delta_rule import DeltaInputs, DeltaWeights
from quantkit.models.latent_window import LatentWindow
from quantkit.models.rope import Rope
from quantkit.models.sparse import IndexInputs


class MixedContext(CachedContext):
    """The rows of `answers`, then the tokens of `prompts`, both over one cache."""

    def __init__(self, answers: DecodeContext, prompts: PromptContext) -> None:
        both = (answers, prompts)
        super().__init__(
            answers.cache,
            torch.cat([one.positions for one in both]),
            torch.cat([one.slots for one in both]),
        )
        self.answers, self.prompts, self._rows = answers, prompts, len(answers.positions)

    def select(self, layer: int, inputs: IndexInputs, topk: int) -> None:
        """As `models.context.Context.select`."""
        answers, prompts = (
            IndexInputs(*one) for one in zip(*(side.tensor_split([self._rows]) for side in inputs))
        )
        self.answers.select(layer, answers, topk)
        self.prompts.select(layer, prompts, topk)

    def attend_mla(
        self, layer: int, q: Tensor, kv_b: Tensor, rope: Rope, scale: float, topk: int = 0
    ) -> Tensor:
        """As `models.context.Context.attend_mla`: answers absorbed, prompts expanded."""
        answers = self.answers.attend_mla(layer, q[: self._rows], kv_b, rope, scale, topk)
        return torch.cat(
            (answers, self.prompts.attend_mla(layer, q[self._rows :], kv_b, rope, scale, topk))
        )

    def attend_seen(self, layer: int, q: Tensor, attention: LatentWindow) -> Tensor:
        """As `models.context.Context.attend_seen`."""
        answers = self.answers.attend_seen(layer, q[: self._rows], attention)
        return torch.cat((answers, self.prompts.attend_seen(layer, q[self._rows :], attention)))

    def convolve(self, layer: int, part: int, x: Tensor, kernel: Tensor) -> Tensor:
        """As `models.context.Context.convolve`."""
        answers = self.answers.convolve(layer, part, x[: self._rows], kernel)
        return torch.cat((answers, self.prompts.convolve(layer, part, x[self._rows :], kernel)))

    def attend_delta(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> Tensor:
        """As `models.context.Context.attend_delta`."""
        answers, prompts = (
            DeltaInputs(*one) for one in zip(*(side.tensor_split([self._rows]) for side in inputs))
        )
        return torch.cat(
            (
                self.answers.attend_delta(layer, answers, weights),
                self.prompts.attend_delta(layer, prompts, weights),
            )
        )

    def attend_compressed(
        self, layer: int, inputs: CompressedInputs, attention: CompressedAttention
    ) -> Tensor:
        """As `models.context.Context.attend_compressed`."""
        answers, prompts = inputs.part(slice(self._rows)), inputs.part(slice(self._rows, None))
        return torch.cat(
            (
                self.answers.attend_compressed(layer, answers, attention),
                self.prompts.attend_compressed(layer, prompts, attention),
            )
        )

    def attend_gqa(
        self, layer: int, q: Tensor, scale: float, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """As `models.context.Context.attend_gqa`."""
        answers = self.answers.attend_gqa(layer, q[: self._rows], scale, window, sinks)
        return torch.cat(
            (answers, self.prompts.attend_gqa(layer, q[self._rows :], scale, window, sinks))
        )
