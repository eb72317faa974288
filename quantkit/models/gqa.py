"""Decoder-only transformers with grouped-query attention: what Llama, Qwen2, Qwen3 and Qwen3-MoE share.

An architecture file reads its config.json into `Config` and says what it has of: biases on q, k and v; norms on q and k; experts.
Symbols: T tokens, H hidden_size, D head_dim.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from quantkit_kernels import Norms, Routing
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models import decoder
from quantkit.models.architecture import KeyValueCache
from quantkit.models.config import DECIDED, CountOrNone, NumLayers, check_at_most, check_divides, read_fields, refusal
from quantkit.models.context import Context
from quantkit.models.mlp import Mlp, MoeMlp, expert_parameters, mlp_parameters, mlp_scale_groups, moe_scale_groups
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, Projection, Role, ScaleGroup, Split
from quantkit.models.weights import Weights


@dataclass(frozen=True)
class Config:
    """Fields as config.json names them; below `rope`, what the architecture file decides."""

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
    qk_norm: Annotated[bool, DECIDED] = False
    routing: Annotated[Routing | None, DECIDED] = None
    moe_intermediate_size: CountOrNone = 0
    dense_layers: Annotated[frozenset[int], DECIDED] = frozenset()
    num_nextn_predict_layers: Annotated[int, DECIDED] = 0

    def __post_init__(self) -> None:
        check_divides("num_key_value_heads", "num_attention_heads", self)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def cache(self) -> KeyValueCache:
        return KeyValueCache(self.num_key_value_heads, self.head_dim)

    @property
    def cache_width(self) -> int:
        return self.cache.width

    def is_moe(self, layer: int) -> bool:
        return self.routing is not None and layer not in self.dense_layers


_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    "use_sliding_window": (False, None),
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
"""Keys of config.json that change what decoders of this kind compute, and the values under which this file computes the same."""


def refuse_other_forwards(config: dict[str, Any]) -> None:
    """Raises QuantkitError naming the key where config.json asks for something that is not computed here."""
    for key, values in _COMPUTED.items():
        if key in config and config[key] not in values:
            raise QuantkitError(f"config.json has {key} = {config[key]!r}", f"quantkit computes {values[0]!r} only")
    listed = config.get("layer_types") or []
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise refusal("layer_types", listed, "a list of texts")
    kinds = {"full_attention", *listed}
    # Qwen's configs carry a window beside use_sliding_window: false. Where that is not said, engines disagree on what it means.
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    if windowed or len(kinds) > 1:
        told = f"sliding_window = {config['sliding_window']!r}" if windowed else f"layer_types {', '.join(sorted(kinds))}"
        raise QuantkitError(f"config.json has {told}", "quantkit computes full attention only")


def read_config(config: dict[str, Any]) -> dict[str, Any]:
    """The shared fields. Raises QuantkitError where a field is missing or asks for something not computed here."""
    refuse_other_forwards(config)
    values = read_fields(Config, config)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    if "head_dim" not in values:
        check_at_most("num_attention_heads", heads, "hidden_size", values["hidden_size"])
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["rope"] = Rope.from_dict(config, values["head_dim"], interleaved=False)
    return values


def parameters(config: Config) -> list[Parameter]:
    """Every tensor of the checkpoint in the order a forward pass meets them."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += _layer_parameters(config, layer)
    rows.append(Parameter("model.norm.weight", (h,), "norm"))
    if not config.tie_word_embeddings:
        rows.append(Parameter("lm_head.weight", (vocab, h), "head", "vocab"))
    return rows


def _layer_parameters(config: Config, layer: int) -> list[Parameter]:
    h, d = config.hidden_size, config.head_dim
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"
    rows = [Parameter(f"{p}.input_layernorm.weight", (h,), "norm", layer=layer)]

    def attention(name: str, shape: tuple[int, ...], role: Role, split: Split, projection: Projection | None = None) -> Parameter:
        fused = f"{a}.qkv_proj" if projection in ("q", "k", "v") else None
        return Parameter(f"{a}.{name}", shape, role, split, layer, fused=fused, block="attention", projection=projection)

    heads: dict[Projection, int] = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    for side, count in heads.items():
        rows.append(attention(f"{side}_proj.weight", (count * d, h), "linear", "column", side))
        if config.qkv_bias:
            rows.append(attention(f"{side}_proj.bias", (count * d,), "bias", "column"))
    if config.qk_norm:
        rows += [attention(f"{side}_norm.weight", (d,), "norm", "replicate") for side in ("q", "k")]
    rows.append(attention("o_proj.weight", (h, config.num_attention_heads * d), "linear", "row", "o"))
    rows.append(Parameter(f"{p}.post_attention_layernorm.weight", (h,), "norm", layer=layer))
    if config.routing is None or not config.is_moe(layer):
        return rows + mlp_parameters(f"{p}.mlp", h, config.intermediate_size, layer)
    experts = config.routing.n_routed_experts
    rows.append(Parameter(f"{p}.mlp.gate.weight", (experts, h), "router", layer=layer, block="router"))
    return rows + expert_parameters(f"{p}.mlp.experts", h, config.moe_intermediate_size, layer, experts)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer. v to o folds only where each query head has its own value head and v has no bias."""
    p = f"model.layers.{layer}"
    a = f"{p}.self_attn"
    groups = [ScaleGroup(f"{a}.qkv", f"{p}.input_layernorm", True, tuple(f"{a}.{side}_proj" for side in "qkv"), f"{a}.q_proj")]
    if config.num_key_value_heads == config.num_attention_heads and not config.qkv_bias:
        groups.append(ScaleGroup(f"{a}.v_o", f"{a}.v_proj", False, (f"{a}.o_proj",), f"{a}.o_proj"))
    norm = f"{p}.post_attention_layernorm"
    if config.routing is None or not config.is_moe(layer):
        return [*groups, *mlp_scale_groups(f"{p}.mlp", norm)]
    return groups + moe_scale_groups(f"{p}.mlp", norm, config.routing.n_routed_experts)


class Attention:
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        a = f"model.layers.{layer}.self_attn"
        self.config, self.layer = config, layer
        self.qkv = weights.fused_linear((f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"))
        biases = [weights.tensor(f"{a}.{side}_proj.bias") for side in "qkv"] if config.qkv_bias else []
        self.qkv_bias = torch.cat(biases) if biases else None
        self.norms = None
        if config.qk_norm:
            self.norms = Norms(weights.tensor(f"{a}.q_norm.weight"), weights.tensor(f"{a}.k_norm.weight"), config.rms_norm_eps)
        self.o = weights.linear(f"{a}.o_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        c = self.config
        qkv = self.qkv(x)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias
        queries_per_kv = c.num_attention_heads // c.num_key_value_heads
        kv_heads = qkv.shape[1] // c.head_dim // (queries_per_kv + 2)
        q = context.store_gqa(self.layer, qkv, kv_heads, c.head_dim, self.norms, c.rope)
        return self.o(context.attend_gqa(self.layer, q, c.softmax_scale).flatten(1))


class DecoderLayer(decoder.DecoderLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p = f"model.layers.{layer}"
        mlp: Mlp | MoeMlp
        if config.routing is not None and config.is_moe(layer):
            mlp = MoeMlp(config.routing, f"{p}.mlp", weights, bias_name=None, shared_prefix=None)
        else:
            mlp = Mlp(f"{p}.mlp", weights)
        super().__init__(p, config.rms_norm_eps, weights, Attention(config, layer, weights), mlp)


class Model(decoder.Model):
    layer_class = DecoderLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights, head="model.embed_tokens" if config.tie_word_embeddings else "lm_head")


MtpLayer = None
"""These architectures have no MTP layer."""
