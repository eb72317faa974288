"""Counting what the tokens of a running model ask of its routed experts, on its device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.weights.load import LoadedModel
from quantkit.models.expert_counts import ExpertCounts
from quantkit.models.mlp import MoeMlp


class ExpertCounter:
    """Counts in every decoder layer with experts of a loaded model, from now on; MTP layers are not
    counted.

    The model is changed in place. Captured graphs have rows of padding, which would be counted:
    decode steps must be launched one by one. Raises QuantkitError where the model has no routed
    experts.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._counts: dict[int, Tensor] = {}
        self._first: int | None = None
        self._tokens = 0
        layers: list[Any] = loaded.model.layers
        for number, layer in enumerate(layers):
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, MoeMlp):
                self._counts[number] = torch.zeros(
                    mlp.routing.n_routed_experts, dtype=torch.int64, device=loaded.device
                )
                mlp.experts = self._counting(number, mlp.experts, mlp.routing.num_experts_per_tok)
        if not self._counts:
            raise QuantkitError(
                f"{loaded.checkpoint.path} has no routed experts to count",
                "leave out --count-experts",
            )
        self._first = min(self._counts)

    def _counting(
        self, number: int, experts: Callable[..., Tensor], chosen: int
    ) -> Callable[..., Tensor]:
        counts = self._counts[number]

        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            asked = topk_ids[:, :chosen].flatten().long()  # a shared expert may follow
            counts.scatter_add_(0, asked, torch.ones_like(asked))
            if number == self._first:
                self._tokens += len(topk_ids)
            return experts(x, topk_ids, topk_weights)

        return run

    @property
    def counts(self) -> ExpertCounts:
        """Of all passes so far."""
        layers = {number: counts.tolist() for number, counts in self._counts.items()}
        return ExpertCounts.of(
            self._loaded.checkpoint.config.get("model_type"),
            self._loaded.config,
            self._tokens,
            layers,
        )
