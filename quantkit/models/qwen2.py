"""Qwen2 and Qwen2.5, including the Qwen-based R1 distills: biases on q, k and v."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.sliding_window import read_qwen_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        values = gqa.read_config(config)
        return cls(
            **values, windows=read_qwen_windows(config, values["num_hidden_layers"]), qkv_bias=True
        )
