"""DeepSeek-V3 and R1: multi-head latent attention, group-limited sigmoid routing, one shared expert, an MTP layer.

Parameter table, AWQ groups and forward of arXiv 2412.19437 in the names of the published checkpoints.
Symbols: T tokens, H hidden_size, k num_experts_per_tok; attention head sizes nope, rope, v.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from quantkit_kernels import Norms, Routing, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.errors import QuantkitError
from quantkit.models import decoder
from quantkit.models.architecture import LatentCache
from quantkit.models.config import (
    CountOrNone,
    NumExperts,
    NumLayers,
    NumLayersOrNone,
    check_at_most,
    check_divides,
    check_flag,
    read_fields,
    refusal,
    refuse_attention_bias,
)
from quantkit.models.context import Context
from quantkit.models.mlp import Mlp, MoeMlp, expert_parameters, mlp_parameters, mlp_scale_groups, moe_scale_groups
from quantkit.models.rope import Rope
from quantkit.models.table import Block, Parameter, Projection, Role, ScaleGroup, Split
from quantkit.models.weights import Weights


@dataclass(frozen=True)
class Config:
    """Fields as config.json names them."""

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
    q_lora_rank: int
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
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is one this file does not compute."""
        required = {
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "tie_word_embeddings": False,
        }
        for key, value in required.items():
            if config.get(key, value) != value:
                raise QuantkitError(f"config.json has {key} = {config[key]!r}", f"deepseek_v3 here computes {value!r} only")
        refuse_attention_bias(config)
        if config.get("q_lora_rank", 0) is None:
            raise QuantkitError("config.json has q_lora_rank null", "deepseek_v3 here needs the low-rank query projection of V3 and R1")
        values = read_fields(cls, config)
        rope = Rope.from_dict(config, values["qk_rope_head_dim"], interleaved=check_flag(config, "rope_interleave", default=True))
        made = cls(rope=rope, **values)
        made.check_routing()
        return made

    def check_routing(self) -> None:
        """Raise QuantkitError where experts cannot be chosen so: each of the groups that are kept has its share of them."""
        check_divides("n_group", "n_routed_experts", self)
        check_at_most("topk_group", self.topk_group, "n_group", self.n_group)
        share = self.n_routed_experts // self.n_group
        if self.topk_group < self.n_group and share < 2:  # a group is judged by its two best
            raise refusal("n_group", self.n_group, f"groups of at least two of the {self.n_routed_experts} experts")
        check_at_most("num_experts_per_tok", self.num_experts_per_tok, "the experts of topk_group groups", self.topk_group * share)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_factor

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

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint, MTP layers included, in the order a forward pass meets them."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += _layer_parameters(config, layer, mtp=False)
    rows += [Parameter("model.norm.weight", (h,), "norm"), Parameter("lm_head.weight", (vocab, h), "head", "vocab")]
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        p = f"model.layers.{layer}"
        rows += [
            Parameter(f"{p}.embed_tokens.weight", (vocab, h), "embedding", layer=layer, mtp=True),
            Parameter(f"{p}.enorm.weight", (h,), "norm", layer=layer, mtp=True),
            Parameter(f"{p}.hnorm.weight", (h,), "norm", layer=layer, mtp=True),
            Parameter(f"{p}.eh_proj.weight", (h, 2 * h), "mtp_proj", layer=layer, mtp=True),
            *_layer_parameters(config, layer, mtp=True),
            Parameter(f"{p}.shared_head.norm.weight", (h,), "norm", layer=layer, mtp=True),
            Parameter(f"{p}.shared_head.head.weight", (vocab, h), "head", "vocab", layer=layer, mtp=True),
        ]
    return rows


def _layer_parameters(config: Config, layer: int, mtp: bool) -> Iterator[Parameter]:
    h, heads = config.hidden_size, config.num_attention_heads
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"

    def row(name: str, shape: tuple[int, ...], role: Role, block: Block | None = None) -> Parameter:
        return Parameter(name, shape, role, layer=layer, mtp=mtp, block=block)

    def attention(name: str, projection: Projection, shape: tuple[int, int], split: Split = "replicate") -> Parameter:
        role: Role = "kv_b" if projection == "kv_b" else "linear"
        fused = f"{a}.fused_qkv_a_proj" if projection in ("q_a", "kv_a") else None
        return Parameter(f"{a}.{name}.weight", shape, role, split, layer, None, fused, mtp, block="attention", projection=projection)

    yield row(f"{p}.input_layernorm.weight", (h,), "norm")
    yield attention("q_a_proj", "q_a", (config.q_lora_rank, h))
    yield row(f"{a}.q_a_layernorm.weight", (config.q_lora_rank,), "norm", "attention")
    yield attention("q_b_proj", "q_b", (heads * config.qk_head_dim, config.q_lora_rank), "column")
    yield attention("kv_a_proj_with_mqa", "kv_a", (config.kv_lora_rank + config.qk_rope_head_dim, h))
    yield row(f"{a}.kv_a_layernorm.weight", (config.kv_lora_rank,), "norm", "attention")
    yield attention("kv_b_proj", "kv_b", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), "column")
    yield attention("o_proj", "o", (h, heads * config.v_head_dim), "row")
    yield row(f"{p}.post_attention_layernorm.weight", (h,), "norm")
    if not config.is_moe(layer):
        yield from mlp_parameters(f"{p}.mlp", h, config.intermediate_size, layer, mtp=mtp)
        return
    yield row(f"{p}.mlp.gate.weight", (config.n_routed_experts, h), "router", "router")
    yield row(f"{p}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,), "router_bias", "router")
    yield from expert_parameters(f"{p}.mlp.experts", h, config.moe_intermediate_size, layer, config.n_routed_experts, mtp)
    width = config.moe_intermediate_size * config.n_shared_experts
    yield from mlp_parameters(f"{p}.mlp.shared_experts", h, width, layer, block="shared_expert", mtp=mtp)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one decoder layer (the MTP layer's included), producers before their consumers' own groups."""
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"

    groups = [
        ScaleGroup(f"{a}.qkv_a", f"{p}.input_layernorm", True, (f"{a}.q_a_proj", f"{a}.kv_a_proj_with_mqa"), f"{a}.q_a_proj"),
        ScaleGroup(f"{a}.q_b", f"{a}.q_a_layernorm", True, (f"{a}.q_b_proj",), f"{a}.q_b_proj"),
    ]
    norm = f"{p}.post_attention_layernorm"
    if not config.is_moe(layer):
        return [*groups, *mlp_scale_groups(f"{p}.mlp", norm)]
    return [*groups, *moe_scale_groups(f"{p}.mlp", norm, config.n_routed_experts, shared=f"{p}.mlp.shared_experts")]


class Attention:
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        a = f"model.layers.{layer}.self_attn"
        self.config, self.layer = config, layer
        gains = (weights.tensor(f"{a}.q_a_layernorm.weight"), weights.tensor(f"{a}.kv_a_layernorm.weight"))
        self.norms = Norms(*gains, config.rms_norm_eps)
        q_a, q_b, kv_a = f"{a}.q_a_proj", f"{a}.q_b_proj", f"{a}.kv_a_proj_with_mqa"
        self.kv_b = weights.dequantized(f"{a}.kv_b_proj").view(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.prolog = prolog = weights.mla_prolog((q_a, q_b, kv_a), self.kv_b, gains, config.rms_norm_eps, config.rope)
        self.qkv_a = prolog.qkv_a if prolog else weights.fused_linear((q_a, kv_a))
        self.q_b = prolog.q_b if prolog else weights.linear(q_b)
        self.o = weights.linear(f"{a}.o_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        c, attended = self.config, None
        if self.prolog is not None:
            attended = context.decode_mla(self.layer, x, self.prolog, c.rope, c.softmax_scale)
        if attended is None:
            q_a = context.store_mla(self.layer, self.qkv_a(x), self.norms, c.rope)
            q = self.q_b(q_a).unflatten(-1, (-1, c.qk_head_dim))
            attended = context.attend_mla(self.layer, q, self.kv_b, c.rope, c.softmax_scale)
        return self.o(attended.flatten(1))


def moe_mlp(config: Config, prefix: str, weights: Weights) -> MoeMlp:
    return MoeMlp(
        config.routing, prefix, weights, bias_name=f"{prefix}.gate.e_score_correction_bias", shared_prefix=f"{prefix}.shared_experts"
    )


class DecoderLayer(decoder.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p = f"model.layers.{layer}"
        mlp = moe_mlp(config, f"{p}.mlp", weights) if config.is_moe(layer) else Mlp(f"{p}.mlp", weights)
        super().__init__(p, config.rms_norm_eps, weights, Attention(config, layer, weights), mlp)


class Model(decoder.Model):
    layer_class = DecoderLayer


class MtpLayer:
    """Predicts token i + 2 from the hidden state of token i and the embedding of token i + 1."""

    layer_class: ClassVar[type[Any]] = DecoderLayer

    def __init__(self, config: Config, weights: Weights, index: int = 0) -> None:
        layer = config.num_hidden_layers + index
        p = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.embedding = weights.tensor(f"{p}.embed_tokens.weight")
        self.enorm = weights.tensor(f"{p}.enorm.weight")
        self.hnorm = weights.tensor(f"{p}.hnorm.weight")
        self.eh_proj = weights.linear(f"{p}.eh_proj")
        self.block: decoder.DecoderLayer = self.layer_class(config, layer, weights)
        self.norm = weights.tensor(f"{p}.shared_head.norm.weight")
        self.head = weights.linear(f"{p}.shared_head.head")

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T], hidden [T, H] after the main model's final norm -> the block's input [T, H]."""
        embedded = rms_norm(F.embedding(next_token_ids, self.embedding), self.enorm, self.eps)
        return self.eh_proj(torch.cat((embedded, rms_norm(hidden, self.hnorm, self.eps)), dim=-1))

    def __call__(self, next_token_ids: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """-> hidden [T, H] after shared_head.norm; also the `hidden` of a further MTP step."""
        inputs = self.inputs(next_token_ids, hidden)
        normed, _ = self.block(rms_norm(inputs, self.block.input_norm, self.eps), inputs, context, self.norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> float32 [T, vocab]."""
        return self.head(hidden).float()
