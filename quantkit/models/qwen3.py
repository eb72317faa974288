"""Qwen3 dense: norms on q and k."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_flag
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.sliding_window import read_qwen_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        # 128 is transformers' default, not hidden_size / num_attention_heads.
        values = gqa.read_config({"head_dim": 128, **config})
        windows = read_qwen_windows(config, values["num_hidden_layers"])
        bias = check_flag(config, "attention_bias")
        return cls(**values, windows=windows, qk_norm="head", qkv_bias=bias, o_bias=bias)
