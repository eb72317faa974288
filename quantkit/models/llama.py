"""Llama 2 and 3, and so the Llama-based R1 distills."""

from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models import gqa
from quantkit.models.config import refuse_attention_bias
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_attention_bias(config)
        if config.get("mlp_bias"):
            raise QuantkitError("config.json has mlp_bias", "quantkit computes Llama without biases")
        return cls(**gqa.read_config(config))
