"""Kimi-Linear (arXiv 2510.26692): Kimi Delta Attention in three of four layers, in the others
latent attention without rotary embedding and without a low-rank projection of queries;
DeepSeek-V3's routing.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from quantkit_kernels import Norms

from quantkit.models import decoder, deepseek_v3
from quantkit.models.config import (
    DECIDED,
    check_count,
    check_flag,
    check_layer_kinds,
    read_fields,
    refusal,
    refuse_attention_bias,
    refuse_other_values,
)
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.kimi_delta import KimiDeltaAttention, delta_parameters, delta_scale_groups
from quantkit.models.mlp import (
    MixtureNames,
    Mlp,
    MlpNames,
    MoeMlp,
    check_groups,
    mlp_parameters,
    mlp_scale_groups,
    moe_parameters,
    moe_scale_groups,
)
from quantkit.models.rope import DEFAULT_THETA, Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

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
    "hidden_act": "silu",
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "q_lora_rank": None,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
_DEFAULTS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
"""transformers' defaults."""
_LATENT_EPS = 1e-6
"""Of the norm of latents, as in the release's code and transformers, whatever rms_norm_eps is."""
_MIXTURE = "block_sparse_moe"
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
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        refuse_other_values(config, _COMPUTED, "Kimi-Linear")
        refuse_attention_bias(config)
        if config.get("rope_scaling") is not None:
            raise refusal("rope_scaling", config["rope_scaling"], "null: nothing is rotated")
        named = {_NAMES.get(key, key): value for key, value in config.items()}
        named = _DEFAULTS | named | {"q_lora_rank": 0}
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
    def mixture(self) -> MixtureNames:
        return _PARTS

    @property
    def num_cached_layers(self) -> int:
        return self.num_hidden_layers - len(self.recurrent.layers if self.recurrent else ())

    @property
    def tp_units(self) -> dict[str, int]:
        heads = {"linear_attn_config.num_heads": self.recurrent.key_heads} if self.recurrent else {}
        return {"num_attention_heads": self.num_attention_heads, **heads}

    def delta(self, layer: int) -> DeltaNet | None:
        """The linear attention of a layer; None for latent attention."""
        return self.recurrent if self.recurrent and layer in self.recurrent.layers else None

    def is_moe(self, layer: int) -> bool:
        return layer in self.sparse_layers


def _no_rotation(dim: int) -> Rope:
    """A rotary embedding whose frequencies are 0: the key that all heads share is not rotated."""
    return Rope(dim, DEFAULT_THETA, interleaved=False, kind="linear", factor=math.inf)


def _read_delta_net(config: dict[str, Any], num_layers: int) -> DeltaNet | None:
    """The linear attention that config.json describes, in the words of the release
    (linear_attn_config, layers from 1 on) or of transformers."""
    own = config.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        raise refusal("linear_attn_config", own, "an object")
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    heads, dim, kernel = (
        check_count(name, own.get(name, config.get(other))) for name, other in names.items()
    )
    kinds = config.get("layer_types")
    if kinds is None:
        layers = own.get("kda_layers")
        if not isinstance(layers, list) or not {*layers} <= {*range(1, num_layers + 1)}:
            raise refusal("linear_attn_config.kda_layers", layers, f"layers 1 to {num_layers}")
        kinds = [_LINEAR if layer + 1 in layers else _FULL for layer in range(num_layers)]
    kinds = check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _FULL))
    if _FULL not in kinds:
        raise refusal("layer_types", list(kinds), f"{_FULL} in some layer")
    found = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    return DeltaNet(heads, heads, dim, dim, kernel, found, joined=False) if found else None


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, in the order of a forward pass."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += _layer_parameters(config, layer)
    return [
        *rows,
        Parameter("model.norm.weight", (h,), "norm"),
        Parameter("lm_head.weight", (vocab, h), "head", "gathered"),
    ]


def _layer_parameters(config: Config, layer: int) -> list[Parameter]:
    h, p = config.hidden_size, f"model.layers.{layer}"
    before, after = (
        Parameter(f"{p}.{name}_layernorm.weight", (h,), "norm", layer=layer)
        for name in ("input", "post_attention")
    )
    net = config.delta(layer)
    attention = (
        deepseek_v3.attention_parameters(config, layer)
        if net is None
        else delta_parameters(net, f"{p}.self_attn", h, layer, (1, 1, net.value_heads, 1))
    )
    rows = [before, *attention, after]
    if not config.is_moe(layer):
        return rows + mlp_parameters(f"{p}.mlp", h, config.intermediate_size, layer)
    width = config.moe_intermediate_size
    return rows + moe_parameters(
        f"{p}.{_MIXTURE}",
        h,
        width,
        layer,
        config.n_routed_experts,
        shared_width=width * config.n_shared_experts,
        names=config.mixture,
    )


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups."""
    p = f"model.layers.{layer}"
    groups = (
        deepseek_v3.attention_scale_groups(config, layer)
        if config.delta(layer) is None
        else delta_scale_groups(f"{p}.self_attn", f"{p}.input_layernorm")
    )
    norm = f"{p}.post_attention_layernorm"
    if not config.is_moe(layer):
        return [*groups, *mlp_scale_groups(f"{p}.mlp", norm)]
    experts = moe_scale_groups(f"{p}.{_MIXTURE}", norm, config.n_routed_experts, config.mixture)
    return [*groups, *experts]


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        self.norms: Norms = self.norms._replace(eps=_LATENT_EPS)


class DecoderLayer(decoder.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p, net = f"model.layers.{layer}", config.delta(layer)
        attention = (
            Attention(config, layer, weights)
            if net is None
            else KimiDeltaAttention(net, layer, f"{p}.self_attn", config.rms_norm_eps, weights)
        )
        mlp = (
            MoeMlp(config.routing, f"{p}.{_MIXTURE}", weights, config.mixture)
            if config.is_moe(layer)
            else Mlp(f"{p}.mlp", weights)
        )
        super().__init__(p, config.rms_norm_eps, weights, attention, mlp)


class Model(decoder.Model):
    layer_class = DecoderLayer


MtpLayer = None
"""The release has no MTP layer."""
