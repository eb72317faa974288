"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention, softmax routing, a shared expert with
its own gate."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_count, check_flag
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.qwen3_moe import COUNT, dense_layers
from quantkit.models.sliding_window import max_window_layers, read_switched_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        values = gqa.read_config(config)
        num_layers = values["num_hidden_layers"]
        check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
        full_from = max_window_layers(config)
        return cls(
            **values,
            windows=read_switched_windows(
                config, num_layers, lambda layer: layer % 2 == 0 and layer < full_from
            ),
            qkv_bias=check_flag(config, "qkv_bias", default=True),
            routing=read_routing(config, COUNT, check_flag(config, "norm_topk_prob"), "softmax"),
            mixture=MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate"),
            shared_width=check_count(
                "shared_expert_intermediate_size", config.get("shared_expert_intermediate_size")
            ),
            dense_layers=dense_layers(config, num_layers),
        )
