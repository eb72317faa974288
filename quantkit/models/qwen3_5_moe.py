"""Qwen3.5-MoE: Qwen3.5 with Qwen2-MoE's experts in every layer."""

from typing import Any

from quantkit.models.config import check_count
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.qwen3_5 import (
    DecoderLayer,
    Model,
    MtpLayer,
    TextConfig,
    is_flat,
    parameters,
    read_decoder,
    read_text,
    scale_groups,
)
from quantkit.models.qwen3_moe import COUNT

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()


class Config(TextConfig):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        text = read_text(config)
        width = check_count("moe_intermediate_size", text.get("moe_intermediate_size"))
        return cls(
            **read_decoder({**text, "intermediate_size": width}),
            routing=read_routing(text, COUNT, True, "softmax"),
            mixture=MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate"),
            shared_width=check_count(
                "shared_expert_intermediate_size", text.get("shared_expert_intermediate_size")
            ),
            flat=is_flat(config),
        )
