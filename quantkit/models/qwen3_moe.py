"""Qwen3-MoE: Qwen3's attention, experts chosen by softmax, no shared expert."""

from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models import gqa
from quantkit.models.config import refuse_attention_bias
from quantkit.models.gqa import Model, parameters, scale_groups
from quantkit.models.mlp import Routing

__all__ = ["Config", "Model", "parameters", "scale_groups"]


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_attention_bias(config)
        values = gqa.read_config(config)
        step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        dense = {layer for layer in range(values["num_hidden_layers"]) if layer in listed or (layer + 1) % step}
        experts = config.get("num_experts", config.get("num_local_experts"))
        if experts is None:
            raise QuantkitError("config.json lacks num_experts", "use the config.json that came with the model")
        routing = Routing(experts, config["num_experts_per_tok"], bool(config.get("norm_topk_prob", False)), "softmax")
        return cls(**values, qk_norm=True, routing=routing, dense_layers=frozenset(dense))
