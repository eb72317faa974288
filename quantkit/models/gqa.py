"""Decoder-only transformers with grouped-query attention, shared by Llama, Mistral, Mixtral, the
Qwen models, GLM-4.5 and MiniMax-M2.

An architecture file reads its config.json into `Config` and sets its variants: biases, norms on q
and k, sliding windows, experts. Symbols: T tokens, H hidden_size, D head_dim.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from quantkit_kernels import Gating, Norms, Routing
from quantkit_kernels.gating import sigmoid
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models import decoder
from quantkit.models.architecture import KeyValueCache, ModelConfig
from quantkit.models.config import (
    DECIDED,
    CountOrNone,
    NumLayers,
    check_at_most,
    check_divides,
    read_fields,
)
from quantkit.models.context import Context
from quantkit.models.decoder import gain_of
from quantkit.models.delta_net import GatedDeltaNet, delta_parameters, delta_scale_groups
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.mlp import (
    DEFAULT_MIXTURE,
    MixtureNames,
    Mlp,
    MoeMlp,
    add_bias,
    bias_of,
    biased,
    fusing,
    mlp_parameters,
    mlp_scale_groups,
    moe_parameters,
    moe_scale_groups,
)
from quantkit.models.rope import DEFAULT_THETA, Rope
from quantkit.models.table import Parameter, Projection, Role, ScaleGroup, Split, ValueHeads
from quantkit.models.weights import Weights

QkNorm = Literal["head", "all"]
"""What a norm on queries and keys covers: each head by itself, or all of them together."""


@dataclass(frozen=True)
class Config(ModelConfig):
    """Fields as config.json names them; after `tie_word_embeddings`, what the architecture file
    decides.

    sinks: each head has a score for a virtual key without a value. windows: tokens that each
    layer's attention sees, the token itself included, 0 for all; empty for full attention in all
    layers. mixture_module: a layer's module of the mixture of experts. shared_width: of the shared
    expert. dense_layers: layers without experts. recurrent: linear attention of some layers.
    output_gate: q_proj also computes a gate for each head's attention output. norm_offset: added to
    stored norm gains. copied_prefixes: as in `ModelConfig`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: NumLayers
    num_attention_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    num_key_value_heads: int = 0
    head_dim: int = 0
    tie_word_embeddings: bool = False
    qkv_bias: Annotated[bool, DECIDED] = False
    o_bias: Annotated[bool, DECIDED] = False
    mlp_bias: Annotated[bool, DECIDED] = False
    qk_norm: Annotated[QkNorm | None, DECIDED] = None
    sinks: Annotated[bool, DECIDED] = False
    windows: Annotated[tuple[int, ...], DECIDED] = ()
    routing: Annotated[Routing | None, DECIDED] = None
    mixture: Annotated[MixtureNames, DECIDED] = DEFAULT_MIXTURE
    mixture_module: Annotated[str, DECIDED] = "mlp"
    moe_intermediate_size: CountOrNone = 0
    shared_width: Annotated[int, DECIDED] = 0
    dense_layers: Annotated[frozenset[int], DECIDED] = frozenset()
    num_nextn_predict_layers: Annotated[int, DECIDED] = 0
    recurrent: Annotated[DeltaNet | None, DECIDED] = None
    output_gate: Annotated[bool, DECIDED] = False
    norm_offset: Annotated[float, DECIDED] = 0.0
    copied_prefixes: Annotated[tuple[str, ...], DECIDED] = ()

    def __post_init__(self) -> None:
        check_divides("num_key_value_heads", "num_attention_heads", self)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def cache(self) -> KeyValueCache:
        return KeyValueCache(self.num_key_value_heads, self.head_dim)

    @property
    def tp_units(self) -> dict[str, int]:
        heads = {"num_attention_heads": self.num_attention_heads}
        return (
            heads
            if self.recurrent is None
            else heads | {"linear_num_key_heads": self.recurrent.key_heads}
        )

    @property
    def cache_width(self) -> int:
        return self.cache.width

    @property
    def gating(self) -> Gating:
        return self.mixture.gating

    def window(self, layer: int) -> int:
        """Tokens that a layer's attention sees, 0 for all. MTP layers have full attention."""
        return self.windows[layer] if layer < len(self.windows) else 0

    def is_moe(self, layer: int) -> bool:
        return self.routing is not None and layer not in self.dense_layers


_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "no_rope_layers": (None, []),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "attention_multiplier": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
}
"""Keys of config.json that change the forward pass of such decoders, and the values under which
this file computes the same."""


def refuse_other_forwards(config: JsonObject, own: Collection[str] = ()) -> None:
    """Raises QuantkitError naming the key where config.json has a value that is not computed here.
    own: keys that the architecture reads itself."""
    for key, values in _COMPUTED.items():
        if key in config and key not in own and config[key] not in values:
            raise QuantkitError(
                f"config.json has {key} = {config[key]!r}",
                f"use another engine: quantkit computes {values[0]!r} only",
            )


def read_config(
    config: JsonObject,
    *,
    default_theta: float | None = DEFAULT_THETA,
    partial_rotary_factor: float | None = None,
    own: Collection[str] = (),
) -> JsonObject:
    """The shared fields, without windows.

    default_theta: rope_theta where config.json has none; None if it must have one.
    partial_rotary_factor: default fraction of a head that is rotated; None for an architecture that
    rotates whole heads. own: as in `refuse_other_forwards`. Raises QuantkitError where a field is
    missing or has a value that is not computed here.
    """
    refuse_other_forwards(config, own)
    values = read_fields(Config, config)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    if "head_dim" not in values:
        check_at_most("num_attention_heads", heads, "hidden_size", values["hidden_size"])
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["rope"] = Rope.from_dict(
        config, values["head_dim"], False, default_theta, partial_rotary_factor
    )
    return values


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, in the order of a forward pass."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += layer_parameters(config, layer)
    rows.append(Parameter("model.norm.weight", (h,), "norm", gain_offset=config.norm_offset))
    if not config.tie_word_embeddings:
        rows.append(Parameter("lm_head.weight", (vocab, h), "head", "gathered"))
    return rows


_NORMED: tuple[Projection, Projection] = ("q", "k")


def layer_parameters(config: Config, layer: int) -> list[Parameter]:
    h, p = config.hidden_size, f"model.layers.{layer}"
    before, after = (
        Parameter(
            f"{p}.{name}_layernorm.weight",
            (h,),
            "norm",
            layer=layer,
            gain_offset=config.norm_offset,
        )
        for name in ("input", "post_attention")
    )
    attention, mlp = attention_parameters(config, layer), feed_forward_parameters(config, layer)
    return [before, *attention, after, *mlp]


def feed_forward_parameters(config: Config, layer: int) -> list[Parameter]:
    """A layer's MLP, or its mixture of experts."""
    h, p = config.hidden_size, f"model.layers.{layer}"
    if config.routing is None or not config.is_moe(layer):
        return mlp_parameters(f"{p}.mlp", h, config.intermediate_size, layer, bias=config.mlp_bias)
    experts = config.routing.n_routed_experts
    width = config.moe_intermediate_size
    names = config.mixture
    return moe_parameters(
        f"{p}.{config.mixture_module}",
        h,
        width,
        layer,
        experts,
        shared_width=config.shared_width,
        names=names,
    )


def attention_parameters(config: Config, layer: int) -> list[Parameter]:
    """A layer's attention, linear or not."""
    h, d, p = config.hidden_size, config.head_dim, f"model.layers.{layer}"
    a = f"{p}.self_attn"
    if (net := config.delta(layer)) is not None:
        return delta_parameters(net, f"{p}.linear_attn", h, layer)
    rows = []

    def attention(
        name: str,
        shape: tuple[int, ...],
        role: Role,
        split: Split,
        projection: Projection | None = None,
    ) -> Parameter:
        fused = f"{a}.qkv_proj" if projection in ("q", "k", "v") else None
        return Parameter(
            f"{a}.{name}",
            shape,
            role,
            split,
            layer,
            fused=fused,
            block="attention",
            projection=projection,
        )

    heads: dict[Projection, int] = {
        "q": config.num_attention_heads,
        "k": config.num_key_value_heads,
        "v": config.num_key_value_heads,
    }
    key_heads = heads | {"q": 0}
    for side, count in heads.items():
        wide = 2 if side == "q" and config.output_gate else 1
        linear = attention(f"{side}_proj.weight", (wide * count * d, h), "linear", "column", side)
        linear = replace(linear, key_heads=key_heads[side])
        rows += [linear, bias_of(linear)] if config.qkv_bias else [linear]
    if config.qk_norm == "head":
        norms = [attention(f"{side}_norm.weight", (d,), "norm", "replicate") for side in ("q", "k")]
        rows += [replace(norm, gain_offset=config.norm_offset) for norm in norms]
    elif config.qk_norm == "all":
        norms = [
            attention(f"{side}_norm.weight", (heads[side] * d,), "norm", "column")
            for side in _NORMED
        ]
        rows += [replace(norm, key_heads=key_heads[side]) for norm, side in zip(norms, _NORMED)]
    output = attention("o_proj.weight", (h, config.num_attention_heads * d), "linear", "row", "o")
    rows += [output, bias_of(output)] if config.o_bias else [output]
    if config.sinks:
        rows.append(attention("sinks", (config.num_attention_heads,), "bias", "column"))
    return rows


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer. v to o folds if v has no bias."""
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"
    groups = [
        ScaleGroup(
            f"{a}.qkv",
            f"{p}.input_layernorm",
            True,
            tuple(f"{a}.{side}_proj" for side in "qkv"),
            f"{a}.q_proj",
        )
    ]
    if (net := config.delta(layer)) is not None:
        groups = delta_scale_groups(net, f"{p}.linear_attn", f"{p}.input_layernorm")
    elif not config.qkv_bias:
        readers = config.num_attention_heads // config.num_key_value_heads
        values = (
            ValueHeads(config.num_key_value_heads, readers, config.head_dim)
            if readers > 1
            else None
        )
        groups.append(
            ScaleGroup(
                f"{a}.v_o",
                f"{a}.v_proj",
                False,
                (f"{a}.o_proj",),
                f"{a}.o_proj",
                heads=values,
                head_width=0 if config.output_gate else config.head_dim,
            )
        )
    norm = f"{p}.post_attention_layernorm"
    if config.routing is None or not config.is_moe(layer):
        return [*groups, *mlp_scale_groups(f"{p}.mlp", norm, bias=config.mlp_bias)]
    return groups + moe_scale_groups(
        f"{p}.{config.mixture_module}", norm, config.routing.n_routed_experts, config.mixture
    )


class Attention:
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        a = f"model.layers.{layer}.self_attn"
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.qkv = weights.fused_linear((f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"))
        biases = (
            [weights.tensor(f"{a}.{side}_proj.bias") for side in "qkv"] if config.qkv_bias else []
        )
        self.qkv_bias = torch.cat(biases) if biases else None
        self.norms, self.joint_norms = None, None
        if config.qk_norm:
            gains = [
                gain_of(weights, f"{a}.{side}_norm.weight", config.norm_offset)
                for side in ("q", "k")
            ]
            norms = Norms(gains[0], gains[1], config.rms_norm_eps)
            self.norms, self.joint_norms = (
                (norms, None) if config.qk_norm == "head" else (None, norms)
            )
        self.o = weights.linear(f"{a}.o_proj")
        self.o_bias = weights.tensor(f"{a}.o_proj.bias") if config.o_bias else None
        self.sinks = weights.tensor(f"{a}.sinks").float() if config.sinks else None
        self.all_reduce = weights.all_reduce

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        qkv = biased(self.qkv, x, self.qkv_bias)
        return biased(self.o, self.attended(qkv, context), self.o_bias)

    def attended(self, qkv: Tensor, context: Context) -> Tensor:
        """What the linear qkv gives, with its bias [T, N] -> what o reads [T, K]."""
        c = self.config
        if self.joint_norms is not None:
            qkv = self._norm_queries_and_keys(qkv, self.joint_norms)
        queries_per_kv, gate = c.num_attention_heads // c.num_key_value_heads, None
        # A rank has some KV heads with all of their queries, or a replicated one with some of its
        # queries.
        kv_heads = max(
            qkv.shape[1] // c.head_dim // (queries_per_kv * (2 if c.output_gate else 1) + 2), 1
        )
        if c.output_gate:
            kv_width = 2 * kv_heads * c.head_dim
            both, rest = qkv.split([qkv.shape[1] - kv_width, kv_width], dim=-1)
            q, gate = both.unflatten(-1, (-1, 2, c.head_dim)).unbind(-2)
            qkv = torch.cat((q, rest.unflatten(-1, (-1, c.head_dim))), dim=1).flatten(1)
        q = context.store_gqa(self.layer, qkv, kv_heads, c.head_dim, self.norms, c.rope)
        attended = self.attend(q, context)
        if gate is not None:
            attended = attended * sigmoid(gate)
        return attended.flatten(1)

    def attend(self, q: Tensor, context: Context) -> Tensor:
        """Rotated queries [T, heads, D] -> [T, heads, D]."""
        scale = self.config.softmax_scale
        return context.attend_gqa(self.layer, q, scale, self.window, self.sinks)

    def _norm_queries_and_keys(self, qkv: Tensor, norms: Norms) -> Tensor:
        """Queries and keys [T, heads * D] normed over all heads; the sums of squares are added up
        over the ranks. A key head that is replicated on several ranks counts once for each of
        them."""
        c = self.config
        q, k, v = qkv.split(
            [len(norms.q), len(norms.k), qkv.shape[1] - len(norms.q) - len(norms.k)], dim=-1
        )
        squares = self.all_reduce(
            torch.stack([side.float().square().sum(-1) for side in (q, k)], dim=-1)
        ).unbind(-1)
        ranks = c.num_attention_heads * c.head_dim // len(norms.q)
        widths = (ranks * len(norms.q), ranks * len(norms.k))
        factors = [(one / width + norms.eps).rsqrt() for one, width in zip(squares, widths)]
        normed = [
            (side.float() * factor[:, None]).to(qkv.dtype) * gain
            for side, factor, gain in zip((q, k), factors, norms)
        ]
        return torch.cat((*normed, v), dim=-1)


class DecoderLayer(decoder.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p = f"model.layers.{layer}"
        mlp: Mlp | MoeMlp
        if config.routing is not None and config.is_moe(layer):
            mlp = MoeMlp(config.routing, f"{p}.{config.mixture_module}", weights, config.mixture)
        else:
            mlp = Mlp(f"{p}.mlp", weights, bias=config.mlp_bias)
        attention: Attention | GatedDeltaNet
        if (net := config.delta(layer)) is not None:
            eps = config.rms_norm_eps
            attention = GatedDeltaNet(net, layer, f"{p}.linear_attn", eps, weights)
        else:
            attention = Attention(config, layer, weights)
        super().__init__(
            p, config.rms_norm_eps, weights, attention, mlp, norm_offset=config.norm_offset
        )

    def fused(self, residual: Tensor, context: Context) -> Tensor | None:
        a, mlp = self.attention, self.mlp
        if type(a) is not Attention or not isinstance(mlp, Mlp) or not mlp.is_plain:
            return None
        linears = fusing(len(residual), a.qkv, a.o, mlp.gate_up, mlp.down)
        if not linears:
            return None
        qkv, o, gate_up, down = linears
        both = add_bias(qkv.fused(residual, self.input_norm, self.eps), a.qkv_bias)
        attended = a.attended(both, context)
        residual = add_bias(o.fused(attended, residual=residual), a.o_bias)
        both = add_bias(gate_up.fused(residual, self.mlp_norm, self.eps), mlp.gate_up_bias)
        return add_bias(down.fused(both, residual=residual), mlp.down_bias)


class Model(decoder.Model):
    layer_class = DecoderLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        super().__init__(config, weights, head, config.norm_offset)


MtpLayer = None
"""These architectures have no MTP layer."""
