"""Qwen3-MoE: Qwen3's attention, experts chosen by softmax, no shared expert."""

from typing import Any

from quantkit_kernels import Routing

from quantkit.models import gqa
from quantkit.models.config import MOST_EXPERTS, check_at_most, check_count, check_flag, refusal, refuse_attention_bias
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_attention_bias(config)
        values = gqa.read_config(config)
        experts = check_count("num_experts", config.get("num_experts", config.get("num_local_experts")), most=MOST_EXPERTS)
        chosen = check_count("num_experts_per_tok", config.get("num_experts_per_tok"))
        check_at_most("num_experts_per_tok", chosen, "num_experts", experts)
        check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
        routing = Routing(experts, chosen, check_flag(config, "norm_topk_prob"), "softmax")
        dense = _dense_layers(config, values["num_hidden_layers"])
        return cls(**values, qk_norm=True, routing=routing, dense_layers=dense)


def _dense_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    check_count("decoder_sparse_step", step)
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise refusal("mlp_only_layers", listed, "a list of integers")
    return frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
