"""Llama 2 and 3, including the Llama-based R1 distills."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_flag
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.sliding_window import refuse_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_windows(config)
        bias = check_flag(config, "attention_bias")
        return cls(
            **gqa.read_config(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=check_flag(config, "mlp_bias"),
        )
