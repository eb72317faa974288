"""Qwen3-Next: linear attention in three of four layers, gated attention in the others, norm gains
around 1, Qwen2-MoE's experts.

The release's MTP layer (mtp.*) is copied for engines that run it; transformers has no forward of
it.
"""

from quantkit.common.result import JsonObject
from quantkit.models import gqa
from quantkit.models.config import check_count, check_flag, check_layer_kinds, refusal
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.gqa import DecoderLayer, Model, MtpLayer, parameters, scale_groups
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import MixtureNames, read_routing
from quantkit.models.qwen3_moe import COUNT, dense_layers
from quantkit.models.sliding_window import refuse_windows

__all__ = ["Config", "DecoderLayer", "Model", "MtpLayer", "parameters", "scale_groups"]
FALLBACK = HfFallback()

DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2}
_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ROTARY_SHARE, _INTERVAL = 0.25, 4
"""transformers' defaults."""
_LINEAR, _FULL = "linear_attention", "full_attention"


class Config(gqa.Config):
    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        config = DEFAULTS | config
        refuse_windows({key: value for key, value in config.items() if key != "layer_types"})
        values = gqa.read_config(config, partial_rotary_factor=ROTARY_SHARE)
        num_layers, bias = values["num_hidden_layers"], check_flag(config, "attention_bias")
        check_count("moe_intermediate_size", values.get("moe_intermediate_size"))
        return cls(
            **values,
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
            routing=read_routing(
                config, COUNT, check_flag(config, "norm_topk_prob", default=True), "softmax"
            ),
            mixture=MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate"),
            shared_width=check_count(
                "shared_expert_intermediate_size", config.get("shared_expert_intermediate_size")
            ),
            dense_layers=dense_layers(config, num_layers),
            recurrent=read_delta_net(config, num_layers, joined=True),
            output_gate=True,
            norm_offset=1.0,
            copied_prefixes=("mtp.",),
        )


def read_delta_net(config: JsonObject, num_layers: int, *, joined: bool) -> DeltaNet | None:
    """The linear attention that config.json describes; None where no layer has it. joined: as in
    `DeltaNet`."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = check_count(
            "full_attention_interval", config.get("full_attention_interval", _INTERVAL)
        )
        kinds = [_FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(num_layers)]
    kinds = check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _FULL))
    if _FULL not in kinds:
        raise refusal("layer_types", kinds, f"{_FULL} in some layer")
    sizes = {key: check_count(key, config.get(key, default)) for key, default in _NET.items()}
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise refusal(
            "linear_num_value_heads", values, f"a multiple of linear_num_key_heads = {keys}"
        )
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    key_dim, value_dim, kernel = (
        sizes[f"linear_{name}_dim"] for name in ("key_head", "value_head", "conv_kernel")
    )
    return DeltaNet(keys, values, key_dim, value_dim, kernel, layers, joined) if layers else None
