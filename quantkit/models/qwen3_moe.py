"""Qwen3-MoE: Qwen3's attention, experts chosen by softmax, no shared expert."""

from typing import Any

from quantkit_kernels import Routing

from quantkit.errors import QuantkitError
from quantkit.models import gqa
from quantkit.models.config import refuse_attention_bias
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_SOURCE = "use the config.json that came with the model"


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_attention_bias(config)
        values = gqa.read_config(config)
        step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if type(step) is not int or step < 1:
            raise QuantkitError(f"config.json has decoder_sparse_step = {step!r}, not a number above 0", _SOURCE)
        dense = {layer for layer in range(values["num_hidden_layers"]) if layer in listed or (layer + 1) % step}
        named = {"num_experts": config.get("num_local_experts"), **config}
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if named.get(key) is None:
                raise QuantkitError(f"config.json lacks {key}", _SOURCE)
        routing = Routing(named["num_experts"], named["num_experts_per_tok"], bool(config.get("norm_topk_prob", False)), "softmax")
        return cls(**values, qk_norm=True, routing=routing, dense_layers=frozenset(dense))
