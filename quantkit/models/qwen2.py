"""Qwen2 and Qwen2.5, and so the Qwen-based R1 distills: biases on q, k and v."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        return cls(**gqa.read_config(config), qkv_bias=True)
