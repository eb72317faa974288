"""Kimi-Linear (arXiv 2510.26692): Kimi Delta Attention in three of four layers, in the others
latent attention without rotary embedding and without a low-rank projection of queries;
DeepSeek-V3's routing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from quantkit.common.result import JsonObject
from quantkit.models import decoder, deepseek_v3
from quantkit.models.config import (
    DECIDED,
    check_flag,
    check_layer_kinds,
    read_fields,
    refusal,
    refuse_attention_bias,
    refuse_other_values,
)
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.kimi_delta import (
    attention_of,
    delta_parameters,
    delta_scale_groups,
    delta_units,
    read_delta_sizes,
)
from quantkit.models.mlp import MixtureNames, MlpNames, check_groups
from quantkit.models.rope import DEFAULT_THETA, Rope
from quantkit.models.table import Parameter, ScaleGroup

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""config.json keys of the release -> DeepSeek's names, which transformers also takes."""
_COMPUTED = {
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
_OWN = {
    "hidden_act": "silu",
    "q_lora_rank": None,
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "mla_use_output_gate": False,
}
"""Computed of this architecture alone; Kimi-K3's text model has the same model_type."""
_OWN_GATE = {"use_full_rank_gate": False, "gate_lower_bound": None}
_DEFAULTS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
"""transformers' defaults."""
_LATENT_EPS = 1e-6
"""Of the norm of latents, as in the release's code and transformers, whatever rms_norm_eps is."""
_PARTS = MixtureNames(
    bias="gate.e_score_correction_bias",
    shared="shared_experts",
    linears=MlpNames("w1", "w3", "w2"),
    shared_linears=MlpNames(),
)
_LINEAR, _FULL, _DENSE, _SPARSE = "linear_attention", "full_attention", "dense", "sparse"


@dataclass(frozen=True)
class Config(deepseek_v3.Config):
    """recurrent: sizes of Kimi Delta Attention. sparse_layers: layers with experts."""

    recurrent: Annotated[DeltaNet | None, DECIDED] = None
    sparse_layers: Annotated[frozenset[int], DECIDED] = frozenset()

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        refuse_other_values(config, _OWN, "Kimi-Linear", allow_null=True)
        gate = config.get("linear_attn_config") or {}
        if isinstance(gate, dict):
            refuse_other_values(gate, _OWN_GATE, "Kimi-Linear", allow_null=True)
        return cls.read({**config, "q_lora_rank": 0}, "Kimi-Linear")

    @classmethod
    def read(cls, config: JsonObject, architecture: str) -> "Config":
        """As `from_dict`, with what Kimi-K3's text model has in common."""
        refuse_other_values(config, _COMPUTED, architecture)
        refuse_attention_bias(config)
        if config.get("rope_scaling") is not None:
            raise refusal("rope_scaling", config["rope_scaling"], "null: nothing is rotated")
        named = _DEFAULTS | {_NAMES.get(key, key): value for key, value in config.items()}
        named["norm_topk_prob"] = check_flag(named, "norm_topk_prob", default=True)
        values = read_fields(cls, named)
        num_layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            kinds = [_DENSE if layer < dense else _SPARSE for layer in range(num_layers)]
        kinds = check_layer_kinds("mlp_layer_types", kinds, num_layers, (_DENSE, _SPARSE))
        made = cls(
            rope=_no_rotation(values["qk_rope_head_dim"]),
            recurrent=_read_delta_net(config, num_layers),
            sparse_layers=frozenset(n for n, kind in enumerate(kinds) if kind == _SPARSE),
            **values,
        )
        check_groups(made.routing)
        return made

    @property
    def latent_eps(self) -> float:
        return _LATENT_EPS

    @property
    def mixture(self) -> MixtureNames:
        return _PARTS

    @property
    def mixture_module(self) -> str:
        return "block_sparse_moe"

    @property
    def tp_units(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_attention_heads, **delta_units(self.recurrent)}

    def is_moe(self, layer: int) -> bool:
        return layer in self.sparse_layers


def _no_rotation(dim: int) -> Rope:
    """A rotary embedding whose frequencies are 0: the key that all heads share is not rotated."""
    return Rope(dim, DEFAULT_THETA, interleaved=False, kind="linear", factor=math.inf)


def _read_delta_net(config: JsonObject, num_layers: int) -> DeltaNet | None:
    """The linear attention that config.json describes, in the words of the release
    (linear_attn_config, layers from 1 on) or of transformers."""
    heads, dim, kernel = read_delta_sizes(config, (None, None, None))
    kinds = config.get("layer_types")
    if kinds is None:
        own, every = config.get("linear_attn_config") or {}, {*range(1, num_layers + 1)}
        layers = own.get("kda_layers")
        if not isinstance(layers, list) or not {*layers} <= every:
            raise refusal("linear_attn_config.kda_layers", layers, f"layers 1 to {num_layers}")
        others = own.get("full_attn_layers")
        if others is not None and (type(others) is not list or {*others} != every - {*layers}):
            raise refusal("linear_attn_config.full_attn_layers", others, "those not in kda_layers")
        kinds = [_LINEAR if layer + 1 in layers else _FULL for layer in range(num_layers)]
    kinds = check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _FULL))
    if _FULL not in kinds:
        raise refusal("layer_types", list(kinds), f"{_FULL} in some layer")
    found = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    return DeltaNet(heads, heads, dim, dim, kernel, found, joined=False) if found else None


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, in the order of a forward pass."""

    def attention(layer: int) -> Iterable[Parameter]:
        if (net := config.delta(layer)) is None:
            return deepseek_v3.attention_parameters(config, layer)
        decay, a = (1, 1, net.value_heads, 1), f"model.layers.{layer}.self_attn"
        return delta_parameters(net, a, config.hidden_size, layer, decay)

    return deepseek_v3.stack_parameters(config, attention)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups."""
    p = f"model.layers.{layer}"
    groups = (
        deepseek_v3.attention_scale_groups(config, layer)
        if (net := config.delta(layer)) is None
        else delta_scale_groups(net, f"{p}.self_attn", f"{p}.input_layernorm")
    )
    return [*groups, *deepseek_v3.feed_forward_scale_groups(config, layer)]


class DecoderLayer(deepseek_v3.DecoderLayer):
    attention_class = staticmethod(partial(attention_of, deepseek_v3.Attention))


class Model(decoder.Model):
    layer_class = DecoderLayer


MtpLayer = None
"""The release has no MTP layer."""
