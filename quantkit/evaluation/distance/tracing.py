"""Models that record hidden states and routed experts of a forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.executor.hf_engine import load_whole
from quantkit.executor.weights.expert_counter import ExpertCounter, watch_experts
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models import is_known
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer
from quantkit.models.hf_traced.full_model import TransformersModel


@dataclass
class Trace:
    """Records of one forward pass: hidden [T, H] after each layer, topk_ids [T, k] of each MoE
    layer, `final` [T, H] after the last norm."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    topk_ids: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))


class TracedLayer:
    """A decoder layer that passes its residual streams to `record`; the rest is the layer's."""

    def __init__(self, layer: DecoderLayer, record: Callable[[Tensor], None]) -> None:
        self.layer, self.record = layer, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._recorded(self.layer(*given, **named))

    def step(self, *given: Any, **named: Any) -> Any:
        """Of layers that are called so in a stack."""
        layer: Any = self.layer
        return self._recorded(layer.step(*given, **named))

    def _recorded(self, output: Any) -> Any:
        self.record(self.layer.streams_of(output))
        return output


class TracedModel:
    """A loaded model whose layers and experts record their outputs. The model is modified in
    place and is for this use only."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.trace = loaded, Trace()
        watch_experts(loaded.model, self._record_experts)
        layers: list[Any] = loaded.model.layers
        layers[:] = [
            TracedLayer(layer, partial(self._record_hidden, number))
            for number, layer in enumerate(layers)
        ]

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Logits of rows after the last norm."""
        made: Callable[[Tensor], Tensor] = self.loaded.model.head
        return made

    def _record_hidden(self, number: int, hidden: Tensor) -> None:
        self.trace.hidden[number] = hidden

    def _record_experts(self, number: int, topk_ids: Tensor) -> None:
        self.trace.topk_ids[number] = topk_ids

    def __call__(self, documents: list[Tensor]) -> Trace:
        """Run documents as independent sequences; T is their total number of tokens."""
        self.trace = Trace()
        device = self.loaded.device
        context = CausalContext(
            [len(ids) for ids in documents], device, self.loaded.codes, self.loaded.steps
        )
        self.trace.final = self.loaded.model(torch.cat(documents).to(device), context)
        return self.trace


class TracedTransformersModel:
    """The same for a model computed by transformers, without routed experts."""

    def __init__(self, model: TransformersModel) -> None:
        self.model, self.device, self.head = model, model.device, model.logits

    def __call__(self, documents: list[Tensor]) -> Trace:
        passes = [self.model.forward(ids) for ids in documents]
        layers = passes[0].hidden
        hidden = {number: torch.cat([one.hidden[number] for one in passes]) for number in layers}
        return Trace(hidden, {}, torch.cat([one.final for one in passes]))


def open_traced(
    path: Path, device: str, backend: str, cache: str | None = None
) -> TracedModel | TracedTransformersModel:
    if is_known(read_json(path / "config.json")):
        return TracedModel(load_model(path, device=device, backend=backend, cache=cache))
    if cache is not None:
        raise QuantkitError(
            f"{path} is computed by transformers, without this cache", "leave --cache out"
        )
    return TracedTransformersModel(load_whole(path, device))


def make_expert_counter(traced: TracedModel | TracedTransformersModel) -> ExpertCounter:
    if isinstance(traced, TracedTransformersModel):
        raise QuantkitError(
            "routed tokens are not counted for a model computed by transformers",
            "leave --count-experts out",
        )
    return ExpertCounter(traced.loaded)
