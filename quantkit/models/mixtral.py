"""Mixtral: Mistral's attention, softmax routing over all experts with normalized weights of the
selected ones."""

from typing import Any

from quantkit.models import gqa
from quantkit.models.config import refusal
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import MixtureNames, MlpNames, read_routing
from quantkit.models.sliding_window import read_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

LINEARS = MlpNames("w1", "w3", "w2")
MODULE = "block_sparse_moe"
COUNT = ("num_local_experts", "num_experts")
"""Either spelling of the number of experts."""
_THETA = 1e6
"""transformers' default."""


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        if config.get("layer_types"):
            raise refusal("layer_types", config["layer_types"], "none: Mixtral's layers are alike")
        values = gqa.read_config({"num_key_value_heads": 8, **config}, default_theta=_THETA)
        values["moe_intermediate_size"] = values["intermediate_size"]
        return cls(
            **values,
            windows=read_windows(config, values["num_hidden_layers"], lambda layer: True),
            routing=read_routing(config, COUNT, True, "softmax"),
            mixture=MixtureNames(linears=LINEARS),
            mixture_module=MODULE,
        )
