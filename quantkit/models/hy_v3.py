"""Hy3: norms on q and k, sigmoid routing with a bias, a shared expert, an MTP layer that shares
embedding and head.

The MTP layer is computed as in vLLM 0.32 (model_executor/models/hy_v3_mtp.py); transformers has no
forward of it.
"""

from dataclasses import replace

from quantkit.common.result import JsonObject
from quantkit.models import gqa, mtp
from quantkit.models.config import (
    MOST_LAYERS,
    check_count,
    check_layer_kinds,
    check_number,
    refuse_other_values,
)
from quantkit.models.gqa import DecoderLayer, Model, scale_groups
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.qwen3_moe import COUNT
from quantkit.models.sliding_window import refuse_windows
from quantkit.models.table import Parameter

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]

_COMPUTED = {
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_cla": False,
}
_THETA, _SCALING, _SHARED = 11_158_840.0, 2.826, 1
"""transformers' defaults."""
_DENSE, _SPARSE = "dense", "sparse"
_MTP = "num_nextn_predict_layers"


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        refuse_other_values(config, _COMPUTED, "Hy3")
        refuse_windows(config)
        values = gqa.read_config(
            {"head_dim": 128, "num_key_value_heads": 8, **config}, default_theta=_THETA
        )
        width = check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
        scaling = check_number(
            "router_scaling_factor", config.get("router_scaling_factor", _SCALING)
        )
        return cls(
            **values,
            qk_norm="head",
            routing=replace(
                read_routing(config, COUNT, True, "sigmoid"), routed_scaling_factor=scaling
            ),
            mixture=MixtureNames(router="router.gate", bias="expert_bias", shared="shared_mlp"),
            shared_width=width
            * check_count("num_shared_experts", config.get("num_shared_experts", _SHARED)),
            dense_layers=_dense_layers(config, values["num_hidden_layers"]),
            num_nextn_predict_layers=check_count(
                _MTP, config.get(_MTP) or 0, least=0, most=MOST_LAYERS
            ),
        )


def _dense_layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    """Layers without experts: as listed in mlp_layer_types, else the first
    first_k_dense_replace."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        count = config.get("first_k_dense_replace", 1)
        return frozenset(
            range(min(check_count("first_k_dense_replace", count, least=0), num_layers))
        )
    kinds = check_layer_kinds("mlp_layer_types", kinds, num_layers, (_DENSE, _SPARSE))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _DENSE)


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, MTP layers included, in the order of a forward pass."""
    rows = gqa.parameters(config)
    for layer in mtp.mtp_layers(config):
        block = [replace(row, mtp=True) for row in gqa.layer_parameters(config, layer)]
        rows += mtp.sharing_mtp_parameters(config.hidden_size, layer, block, MtpLayer.final_norm)
    return rows


class MtpLayer(mtp.MtpLayer):
    layer_class = DecoderLayer
    final_norm = "final_layernorm"
    shares_embedding = True
