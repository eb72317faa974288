"""Kimi-K2.5 and K2.6: Kimi-K2 as the text model, which is computed; the vision tower and its projector are copied."""

from dataclasses import replace
from typing import Any

from quantkit_kernels import SILU, Gating
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models import deepseek_v3
from quantkit.models.config import refusal
from quantkit.models.deepseek_v3 import MtpLayer
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import ExpertsOp, LinearOp, PrologOp, Weights

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_PREFIX = "language_model."


class Config(deepseek_v3.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise refusal("text_config", text, "an object")
        made = deepseek_v3.Config.from_dict(text)
        if made.num_nextn_predict_layers:
            raise QuantkitError("config.json has MTP layers in text_config", "quantkit computes Kimi-K2.5 without")
        return cls(**vars(made))

    @property
    def copied(self) -> tuple[str, ...]:
        return "vision_tower.", "mm_projector.", "multi_modal_projector."


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors in the order a forward pass meets them."""
    rows = deepseek_v3.parameters(config)
    return [replace(row, name=_PREFIX + row.name, fused=None if row.fused is None else _PREFIX + row.fused) for row in rows]


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """Kimi-K2's groups."""
    return [
        replace(
            group,
            name=_PREFIX + group.name,
            producer=_PREFIX + group.producer,
            consumers=tuple(_PREFIX + module for module in group.consumers),
            observe=_PREFIX + group.observe,
        )
        for group in deepseek_v3.scale_groups(config, layer)
    ]


class DecoderLayer(deepseek_v3.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, TextWeights(weights))


class Model(deepseek_v3.Model):
    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, TextWeights(weights))


class TextWeights:
    """The weights of the text model by the names that it has alone."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.all_reduce = weights.all_reduce

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(_PREFIX + name)

    def has(self, name: str) -> bool:
        return self.weights.has(_PREFIX + name)

    def linear(self, module: str) -> LinearOp:
        return self.weights.linear(_PREFIX + module)

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        return self.weights.fused_linear(tuple(_PREFIX + module for module in modules))

    def mla_prolog(
        self, modules: tuple[str, str, str], kv_b: Tensor, gains: tuple[Tensor, Tensor], eps: float, rope: Rope
    ) -> PrologOp | None:
        q_a, q_b, kv_a = (_PREFIX + module for module in modules)
        return self.weights.mla_prolog((q_a, q_b, kv_a), kv_b, gains, eps, rope)

    def dequantized(self, module: str) -> Tensor:
        return self.weights.dequantized(_PREFIX + module)

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        return self.weights.experts(_PREFIX + prefix, num_experts, gating)

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return self.weights.experts_with_shared(_PREFIX + prefix, num_experts, _PREFIX + shared)
