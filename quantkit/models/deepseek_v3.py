"""DeepSeek-V3 and R1: multi-head latent attention, group-limited sigmoid routing, one shared
expert, an MTP layer.

Parameter table, AWQ scale groups and forward of arXiv 2412.19437 with the names of the published
checkpoints. Symbols: T tokens, H hidden_size, k num_experts_per_tok; attention head sizes nope,
rope, v.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from quantkit_kernels import Norms, Routing
from torch import Tensor

from quantkit.common.result import JsonObject
from quantkit.models import decoder, mtp
from quantkit.models.architecture import LatentCache, ModelConfig
from quantkit.models.config import (
    CountOrNone,
    NumExperts,
    NumLayers,
    NumLayersOrNone,
    check_flag,
    read_fields,
    refuse_attention_bias,
    refuse_other_values,
)
from quantkit.models.context import Context
from quantkit.models.hf_fallback import HfFallback
from quantkit.models.mlp import (
    MixtureNames,
    Mlp,
    MoeMlp,
    check_groups,
    mlp_parameters,
    mlp_scale_groups,
    moe_parameters,
    moe_scale_groups,
)
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, Projection, Role, ScaleGroup, Split, ValueHeads
from quantkit.models.weights import PrologOp, Weights

FALLBACK = HfFallback(
    null_fields={"q_lora_rank": ".q_a_proj."},
    true_fields=("attention_bias", "tie_word_embeddings"),
)
"""The published models have no biases and untied heads."""

_COMPUTED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
MIXTURE = MixtureNames(bias="gate.e_score_correction_bias", shared="shared_experts")


@dataclass(frozen=True)
class Config(ModelConfig):
    """Fields as config.json names them. q_lora_rank: 0 where queries have no low-rank projection,
    as in Moonlight; null in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: NumLayers
    num_attention_heads: int
    n_routed_experts: NumExperts
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: CountOrNone
    q_lora_rank: CountOrNone
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    num_nextn_predict_layers: NumLayersOrNone = 0
    scoring_func: str = "sigmoid"

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        refuse_other_values(config, _COMPUTED, "DeepSeek-V3")
        refuse_attention_bias(config)
        values = read_fields(cls, without_null_rank(config))
        rope = Rope.from_dict(
            config,
            values["qk_rope_head_dim"],
            interleaved=check_flag(config, "rope_interleave", default=True),
        )
        made = cls(rope=rope, **values)
        check_groups(made.routing)
        return made

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_factor

    @property
    def latent_eps(self) -> float:
        """Of the norms of latents."""
        return self.rms_norm_eps

    @property
    def cache(self) -> LatentCache:
        return LatentCache(self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def cache_width(self) -> int:
        return self.cache.width

    @property
    def routing(self) -> Routing:
        return Routing(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.norm_topk_prob,
            self.scoring_func,
            self.n_group,
            self.topk_group,
            self.routed_scaling_factor,
        )

    @property
    def mixture(self) -> MixtureNames:
        return MIXTURE

    @property
    def mixture_module(self) -> str:
        """A layer's module of the mixture of experts."""
        return "mlp"

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def without_null_rank(config: JsonObject) -> JsonObject:
    """config.json with q_lora_rank 0 for null."""
    return {**config, "q_lora_rank": 0} if config.get("q_lora_rank", 0) is None else config


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, MTP layers included, in the order of a forward pass."""
    return stack_parameters(config, lambda layer: attention_parameters(config, layer))


def stack_parameters(
    config: Config, attention: Callable[[int], Iterable[Parameter]]
) -> list[Parameter]:
    """As `parameters`, with the rows of a layer's attention."""
    h, vocab = config.hidden_size, config.vocab_size

    def rows_of(layer: int) -> list[Parameter]:
        p, drafts = f"model.layers.{layer}", layer >= config.num_hidden_layers
        norm = Parameter(f"{p}.input_layernorm.weight", (h,), "norm", layer=layer, mtp=drafts)
        after = replace(norm, name=f"{p}.post_attention_layernorm.weight")
        rows = [norm, *attention(layer), after]
        if not config.is_moe(layer):
            return rows + mlp_parameters(f"{p}.mlp", h, config.intermediate_size, layer, mtp=drafts)
        return rows + moe_parameters(
            f"{p}.{config.mixture_module}",
            h,
            config.moe_intermediate_size,
            layer,
            config.n_routed_experts,
            shared_width=config.moe_intermediate_size * config.n_shared_experts,
            mtp=drafts,
            names=config.mixture,
        )

    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += rows_of(layer)
    rows += [
        Parameter("model.norm.weight", (h,), "norm"),
        Parameter("lm_head.weight", (vocab, h), "head", "gathered"),
    ]
    for layer in mtp.mtp_layers(config):
        rows += mtp.mtp_parameters(h, vocab, layer, rows_of(layer))
    return rows


def attention_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    """Every tensor of one layer's latent attention."""
    h, heads = config.hidden_size, config.num_attention_heads
    a, mtp = f"model.layers.{layer}.self_attn", layer >= config.num_hidden_layers

    def norm(name: str, width: int) -> Parameter:
        return Parameter(
            f"{a}.{name}.weight", (width,), "norm", layer=layer, mtp=mtp, block="attention"
        )

    def attention(
        name: str, projection: Projection, shape: tuple[int, int], split: Split = "replicate"
    ) -> Parameter:
        role: Role = "kv_b" if projection == "kv_b" else "linear"
        down = config.q_lora_rank and projection in ("q_a", "kv_a")
        fused = f"{a}.fused_qkv_a_proj" if down else None
        return Parameter(
            f"{a}.{name}.weight",
            shape,
            role,
            split,
            layer,
            None,
            fused,
            mtp,
            block="attention",
            projection=projection,
        )

    if config.q_lora_rank:
        yield attention("q_a_proj", "q_a", (config.q_lora_rank, h))
        yield norm("q_a_layernorm", config.q_lora_rank)
        width = config.q_lora_rank
        yield attention("q_b_proj", "q_b", (heads * config.qk_head_dim, width), "column")
    else:
        yield attention("q_proj", "q", (heads * config.qk_head_dim, h), "column")
    yield attention(
        "kv_a_proj_with_mqa", "kv_a", (config.kv_lora_rank + config.qk_rope_head_dim, h)
    )
    yield norm("kv_a_layernorm", config.kv_lora_rank)
    yield attention(
        "kv_b_proj",
        "kv_b",
        (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "column",
    )
    yield attention("o_proj", "o", (h, heads * config.v_head_dim), "row")


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one decoder layer (MTP layers included), producers before their
    consumers' own groups."""
    return [*attention_scale_groups(config, layer), *feed_forward_scale_groups(config, layer)]


def feed_forward_scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of a layer's MLP or experts."""
    p = f"model.layers.{layer}"
    norm, experts = f"{p}.post_attention_layernorm", f"{p}.{config.mixture_module}"
    if not config.is_moe(layer):
        return mlp_scale_groups(f"{p}.mlp", norm, gating=config.mixture.dense_gating)
    return moe_scale_groups(experts, norm, config.n_routed_experts, config.mixture)


def attention_scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of latent attention: the norm before it, those on latents, values to
    o_proj."""
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"
    q = f"{a}.q_a_proj" if config.q_lora_rank else f"{a}.q_proj"
    readers = (q, f"{a}.kv_a_proj_with_mqa")
    values = ValueHeads(config.num_attention_heads, 1, config.v_head_dim, config.qk_nope_head_dim)
    groups = [ScaleGroup(f"{a}.qkv_a", f"{p}.input_layernorm", True, readers, q)]
    latents = ("q", "kv") if config.q_lora_rank else ("kv",)
    for side in latents:
        up = f"{a}.{side}_b_proj"
        groups.append(ScaleGroup(f"{a}.{side}_b", f"{a}.{side}_a_layernorm", True, (up,), up))
    o, made = f"{a}.o_proj", f"{a}.kv_b_proj"
    width = config.v_head_dim
    group = ScaleGroup(f"{a}.v_o", made, False, (o,), o, heads=values, head_width=width)
    return [*groups, group]


def gated_scale_groups(config: Config, layer: int, gate: str) -> list[ScaleGroup]:
    """With a linear `gate` that reads what the first linears do and multiplies the input of o_proj
    channel by channel."""
    first, *others = attention_scale_groups(config, layer)
    first = replace(first, consumers=(*first.consumers, gate))
    return [first, *(replace(group, head_width=0) for group in others)]


class Attention:
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        a = f"model.layers.{layer}.self_attn"
        self.config, self.layer = config, layer
        self.kv_b = weights.dequantized(f"{a}.kv_b_proj").view(
            -1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        self.o = weights.linear(f"{a}.o_proj")
        kv_a, k_gain = f"{a}.kv_a_proj_with_mqa", weights.tensor(f"{a}.kv_a_layernorm.weight")
        self.prolog: PrologOp | None = None
        if not config.q_lora_rank:
            self.norms = Norms(k_gain[:0], k_gain, config.latent_eps)
            self.q, self.kv_a = weights.linear(f"{a}.q_proj"), weights.linear(kv_a)
            return
        gains = (weights.tensor(f"{a}.q_a_layernorm.weight"), k_gain)
        self.norms = Norms(*gains, config.latent_eps)
        q_a, q_b = f"{a}.q_a_proj", f"{a}.q_b_proj"
        self.prolog = prolog = weights.mla_prolog(
            (q_a, q_b, kv_a), self.kv_b, gains, config.latent_eps, config.rope
        )
        self.qkv_a = prolog.qkv_a if prolog else weights.fused_linear((q_a, kv_a))
        self.q_b = prolog.q_b if prolog else weights.linear(q_b)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        c, attended = self.config, None
        if self.prolog is not None:
            attended = context.decode_mla(self.layer, x, self.prolog, c.rope, c.softmax_scale)
        if attended is None:
            q = self._queries(x, context).unflatten(-1, (-1, c.qk_head_dim))
            attended = context.attend_mla(self.layer, q, self.kv_b, c.rope, c.softmax_scale)
        return self.o(self.gated(attended.flatten(1), x))

    def gated(self, attended: Tensor, x: Tensor) -> Tensor:
        """Input of o_proj [T, heads * v], from the heads' outputs and the sublayer's input."""
        return attended

    def _queries(self, x: Tensor, context: Context) -> Tensor:
        """Stores latents and keys, and returns the queries [T, heads * qk_head_dim]."""
        rope = self.config.rope
        if self.config.q_lora_rank:
            return context.query_mla(self.layer, self.qkv_a(x), self.norms, self.q_b, rope)
        context.store_mla(self.layer, self.kv_a(x), self.norms, rope)
        return self.q(x)


def mlp_of(config: Config, layer: int, weights: Weights) -> Mlp | MoeMlp:
    """A layer's MLP or experts."""
    p, names = f"model.layers.{layer}", config.mixture
    if config.is_moe(layer):
        return MoeMlp(config.routing, f"{p}.{config.mixture_module}", weights, names)
    return Mlp(f"{p}.mlp", weights, gating=names.dense_gating)


class DecoderLayer(decoder.DecoderLayer):
    attention_class: Callable[[Any, int, Weights], Callable[[Tensor, Context], Tensor]] = Attention

    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        attention = self.attention_class(config, layer, weights)
        mlp = mlp_of(config, layer, weights)
        super().__init__(f"model.layers.{layer}", config.rms_norm_eps, weights, attention, mlp)


class Model(decoder.Model):
    layer_class = DecoderLayer


class MtpLayer(mtp.MtpLayer):
    layer_class = DecoderLayer
