"""Solar-Open: GLM-4.5's mixture of experts in every layer, whole heads rotated, no norms on q and
k, no MTP layer."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import check_count, check_flag, refusal
from quantkit.models.deepseek_v3 import MIXTURE
from quantkit.models.glm4_moe import read_grouped_routing
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.sliding_window import refuse_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

_THETA, _ROTARY_SHARE = 1e6, 1.0
"""transformers' defaults."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        refuse_windows(config)
        if config.get("first_k_dense_replace"):
            raise refusal(
                "first_k_dense_replace",
                config["first_k_dense_replace"],
                "0: every layer of Solar-Open has experts",
            )
        width = check_count("moe_intermediate_size", config.get("moe_intermediate_size"))
        # The release has an intermediate_size that no layer uses, transformers none.
        config = {"head_dim": 128, **config, "intermediate_size": width}
        values = gqa.read_config(config, default_theta=_THETA, partial_rotary_factor=_ROTARY_SHARE)
        return cls(
            **values,
            qkv_bias=check_flag(config, "attention_bias"),
            routing=read_grouped_routing(config),
            mixture=MIXTURE,
            shared_width=width * check_count("n_shared_experts", config.get("n_shared_experts", 1)),
        )
