"""Counting what the tokens of a running model ask of its routed experts, on its device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.executor.weights.load import LoadedModel
from quantkit.models.expert_counts import ExpertCounts
from quantkit.models.mlp import MoeMlp


def watch_experts(model: Any, record: Callable[[int, Tensor], None]) -> dict[int, MoeMlp]:
    """From now on call `record` with the number of a decoder layer and the routed experts of its
    tokens, topk_ids [T, k], before they are computed. The layers with experts, by number; the model
    is changed in place."""
    found = {
        number: mlp
        for number, layer in enumerate(model.layers)
        if isinstance(mlp := getattr(layer, "mlp", None), MoeMlp)
    }
    for number, mlp in found.items():
        mlp.experts = _recording(mlp, partial(record, number))
    return found


def _recording(mlp: MoeMlp, record: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    experts, chosen = mlp.experts, mlp.routing.num_experts_per_tok

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        record(topk_ids[:, :chosen])  # a shared expert may follow
        return experts(x, topk_ids, topk_weights)

    return run


class ExpertCounter:
    """Counts in every decoder layer with experts of a loaded model, from now on; MTP layers are not
    counted.

    The model is changed in place. Captured graphs have rows of padding, which would be counted:
    decode steps must be launched one by one. Raises QuantkitError where the model has no routed
    experts.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tokens = 0
        found = watch_experts(loaded.model, self._count)
        if not found:
            raise QuantkitError(
                f"{loaded.checkpoint.path} has no routed experts to count",
                "leave out --count-experts",
            )
        self._counts = {
            number: torch.zeros(
                mlp.routing.n_routed_experts, dtype=torch.int64, device=loaded.device
            )
            for number, mlp in found.items()
        }
        self._first = min(found)

    def _count(self, layer: int, topk_ids: Tensor) -> None:
        experts = topk_ids.flatten().long()
        self._counts[layer].scatter_add_(0, experts, torch.ones_like(experts))
        if layer == self._first:
            self._tokens += len(topk_ids)

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
