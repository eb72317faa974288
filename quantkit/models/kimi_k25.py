"""Kimi-K2.5 and K2.6: the text model is Kimi-K2; the vision tower and its projector are copied."""

from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.models import deepseek_v3
from quantkit.models.config import refusal
from quantkit.models.deepseek_v3 import MtpLayer
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]


def _rename(name: str) -> str:
    return f"language_model.{name}"


class Config(deepseek_v3.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise refusal("text_config", text, "an object")
        made = deepseek_v3.Config.from_dict(text)
        if made.num_nextn_predict_layers:
            raise QuantkitError(
                "config.json has MTP layers in text_config", "quantkit computes Kimi-K2.5 without"
            )
        return cls(**vars(made))

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return "vision_tower.", "mm_projector.", "multi_modal_projector."


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""
    return rename_rows(deepseek_v3.parameters(config), _rename)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """Kimi-K2's groups."""
    return rename_groups(deepseek_v3.scale_groups(config, layer), _rename)


class DecoderLayer(deepseek_v3.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, RenamedWeights(weights, _rename))


class Model(deepseek_v3.Model):
    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, RenamedWeights(weights, _rename))
