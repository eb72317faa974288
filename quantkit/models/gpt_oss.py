"""gpt-oss: attention sinks, a sliding window in every other layer, biases everywhere, and experts
with a clamped gate.

Published with the experts of a layer stacked, in MXFP4 or in 16 bits; they are split into one
tensor per expert (checkpoint/stacked_experts.py).
"""

from typing import Any

from quantkit_kernels import Gating

from quantkit.models import gqa
from quantkit.models.config import check_count, check_flag, check_number
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.sliding_window import read_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
_ALPHA, _LIMIT, _THETA = 1.702, 7.0, 150000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' defaults."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        config = _DEFAULTS | config
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            config = {**config, "rope_parameters": _ROPE}
        values = gqa.read_config(config, default_theta=_THETA)
        values["moe_intermediate_size"] = check_count(
            "intermediate_size", values["intermediate_size"]
        )
        bias = check_flag(config, "attention_bias", default=True)
        alpha = check_number("swiglu_alpha", config.get("swiglu_alpha", _ALPHA))
        limit = check_number("swiglu_limit", config.get("swiglu_limit", _LIMIT))
        return cls(
            **values,
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
            windows=read_windows(config, values["num_hidden_layers"], lambda layer: layer % 2 == 0),
            routing=read_routing(config, ("num_local_experts", "num_experts"), True, "softmax"),
            mixture=MixtureNames(
                "router",
                logit_bias="router.bias",
                gating=Gating(alpha, limit, 1.0),
                expert_bias=True,
            ),
        )
