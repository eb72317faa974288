"""Qwen3 dense: norms on q and k, no biases."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import refuse_attention_bias
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_attention_bias(config)
        return cls(**gqa.read_config({"head_dim": 128, **config}), qk_norm=True)  # transformers' own, not hidden_size / heads
