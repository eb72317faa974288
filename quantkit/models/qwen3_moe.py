"""Qwen3-MoE: Qwen3's attention, softmax routing, no shared expert."""

from quantkit.common.result import JsonObject
from quantkit.models import gqa
from quantkit.models.config import check_count, check_flag, refusal
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import read_routing
from quantkit.models.sliding_window import read_switched_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

COUNT = ("num_experts", "num_local_experts")
"""Either spelling of the number of experts."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        values = gqa.read_config(config)
        check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
        num_layers, bias = values["num_hidden_layers"], check_flag(config, "attention_bias")
        return cls(
            **values,
            windows=read_switched_windows(config, num_layers, lambda layer: True),
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
            routing=read_routing(config, COUNT, check_flag(config, "norm_topk_prob"), "softmax"),
            dense_layers=dense_layers(config, num_layers),
        )


def dense_layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    """Layers of a Qwen model without experts."""
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    check_count("decoder_sparse_step", step)
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise refusal("mlp_only_layers", listed, "a list of integers")
    return frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
