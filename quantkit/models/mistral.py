"""Mistral: Llama with a sliding window in every layer, or in none."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import refusal
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.sliding_window import read_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
"""transformers' defaults; null means as many KV heads as heads, and no window."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        if config.get("layer_types"):
            raise refusal("layer_types", config["layer_types"], "none: Mistral's layers are alike")
        config = _DEFAULTS | config
        values = gqa.read_config(config)
        return cls(
            **values, windows=read_windows(config, values["num_hidden_layers"], lambda layer: True)
        )
