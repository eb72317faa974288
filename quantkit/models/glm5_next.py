"""GLM-5.3-Flash: four residual streams; Kimi Delta Attention with a lower bound of its decay in
three of four layers, in the others GLM-5's sparse latent attention without rotary embedding, whose
indexer has a key for several tokens; clamped experts.

The text model is computed, the vision tower is copied. A layer that shares an indexer attends to
the tokens that the last one with an indexer selected. transformers drops the MTP layer: it has one
residual stream and reads the main model's normed output, as in vLLM, and it shares the embedding
and the head. Symbols: T tokens, H hidden_size, n streams.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from quantkit_kernels import Gating

from quantkit.common.result import JsonObject
from quantkit.models import decoder, deepseek_v3, deepseek_v32, glm_moe_dsa, hyper_connections, mtp
from quantkit.models.architecture import LatentCache
from quantkit.models.config import (
    DECIDED,
    CountOrNone,
    check_count,
    check_divides,
    check_flag,
    check_layer_kinds,
    read_fields,
    refusal,
    refuse_other_values,
)
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.hyper_connections import (
    HyperConnectionNames,
    HyperConnectionSizes,
    LayerNames,
    with_hyper_connections,
)
from quantkit.models.indexer import (
    POOLED_READERS,
    PooledIndexer,
    pooled_indexer_parameters,
    with_indexer,
)
from quantkit.models.kimi_delta import (
    attention_of,
    check_lower_bound,
    delta_parameters,
    delta_scale_groups,
    delta_units,
    read_delta_sizes,
)
from quantkit.models.mlp import MixtureNames, check_groups
from quantkit.models.rope import DEFAULT_THETA, Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

_COMPUTED: JsonObject = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "mhc": True,
    "mla_use_nope": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_DEFAULTS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "qk_rope_head_dim": 0}
_SIZES = (64, 128, 4)
_LOWER = -5.0
"""transformers' defaults; first_k_dense_replace does not matter where mlp_layer_types is."""
_KEYS = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
_STREAMS = HyperConnectionNames(end=None)
_LINEAR, _INDEXED, _DENSE, _SPARSE = "linear_attention", "indexed_attention", "dense", "sparse"
_ALIASES = {"full_attention": _INDEXED, "deepseek_sparse_attention": _INDEXED}
PREFIX = "model.language_model."
_PERIOD, _DENSE_LAYERS = 4, 3
"""transformers' defaults: each fourth layer has latent attention, the first three no experts."""


@dataclass(frozen=True)
class Config(glm_moe_dsa.Config):
    """index_kpool: tokens that share an index key. recurrent: sizes of Kimi Delta Attention. An MTP
    layer has one residual stream, latent attention and an indexer of its own."""

    qk_rope_head_dim: CountOrNone
    norm_topk_prob: bool
    index_kpool: int = 16
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    swiglu_limit: float = 10.0
    recurrent: Annotated[DeltaNet | None, DECIDED] = None

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json, whose text model is in text_config or at the top. Raises QuantkitError
        where a required field is missing or a value is not computed here."""
        text = config if config.get("text_config") is None else config["text_config"]
        if not isinstance(text, dict):
            raise refusal("text_config", text, "an object")
        for fields in (config, text):
            refuse_other_values(fields, _COMPUTED, "GLM-5.3-Flash", allow_null=True)
        named = {_KEYS.get(key, key): value for key, value in text.items()}
        named = _DEFAULTS | {key: value for key, value in named.items() if value is not None}
        named["norm_topk_prob"] = check_flag(named, "norm_topk_prob", default=True)
        values = read_fields(cls, named)
        layers = values["num_hidden_layers"]
        net = _read_delta_net(text, layers)
        made = cls(
            rope=Rope(0, DEFAULT_THETA, interleaved=False),
            recurrent=net,
            mlp_layer_types=_read_mlps(text, layers),
            indexer_types=glm_moe_dsa.read_types(text, layers, net.layers if net else ()),
            **values,
        )
        check_count("q_lora_rank", made.q_lora_rank)
        check_count("hc_sinkhorn_iters", made.hc_sinkhorn_iters)
        check_divides("index_kpool", "index_topk", made)
        check_groups(made.routing)
        keys = text.get("num_key_value_heads", made.num_attention_heads)
        if made.qk_rope_head_dim or keys != made.num_attention_heads:
            name = "qk_rope_head_dim" if made.qk_rope_head_dim else "num_key_value_heads"
            raise refusal(name, text[name], "latent attention of all heads that rotates nothing")
        return made

    @property
    def streams(self) -> HyperConnectionSizes:
        steps, eps = self.hc_sinkhorn_iters, self.hc_eps
        return HyperConnectionSizes(
            self.hc_mult, self.hidden_size, steps, eps, self.rms_norm_eps, _STREAMS
        )

    @property
    def cache(self) -> LatentCache:
        return LatentCache(self.kv_lora_rank, 0, self.index_head_dim, self.index_kpool)

    @property
    def gating(self) -> Gating:
        return Gating(limit=self.swiglu_limit)

    @property
    def mixture(self) -> MixtureNames:
        return replace(super().mixture, gating=self.gating)

    @property
    def tp_units(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_attention_heads, **delta_units(self.recurrent)}

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        drafts = (f"{PREFIX}layers.{layer}." for layer in mtp.mtp_layers(self))
        return "model.visual.", *drafts

    def is_moe(self, layer: int) -> bool:
        return self.mlp_layer_types[min(layer, self.num_hidden_layers - 1)] == _SPARSE


def _read_mlps(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        kinds = [_SPARSE if layer >= _DENSE_LAYERS else _DENSE for layer in range(num_layers)]
    return check_layer_kinds("mlp_layer_types", kinds, num_layers, (_DENSE, _SPARSE))


def _read_delta_net(text: JsonObject, num_layers: int) -> DeltaNet | None:
    """The linear attention that config.json describes, in the words of the release
    (linear_attn_config) or of transformers."""
    heads, dim, kernel = read_delta_sizes(text, _SIZES)
    own = text.get("linear_attn_config") or {}
    name = "linear_attn_config.gate_lower_bound" if own else "linear_lower_bound"
    lower = own.get("gate_lower_bound", text.get("linear_lower_bound", _LOWER))
    if lower is None and own and own.get("safe_gate", True):
        lower = _LOWER
    lower = check_lower_bound(name, lower)
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [_LINEAR if (n + 1) % _PERIOD else _INDEXED for n in range(num_layers)]
    kinds = [_ALIASES.get(str(one), one) for one in kinds] if isinstance(kinds, list) else kinds
    kinds = check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _INDEXED))
    if _INDEXED not in kinds:
        raise refusal("layer_types", list(kinds), f"{_INDEXED} in some layer")
    found = frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    return DeltaNet(heads, heads, dim, dim, kernel, found, False, lower) if found else None


_NAMES = LayerNames("hc_attn", "hc_ffn", "input_layernorm", "post_attention_layernorm")


def _rename(name: str) -> str:
    return f"{PREFIX}{name.removeprefix('model.')}" if name.startswith("model.") else name


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""

    def attention(layer: int) -> Iterable[Parameter]:
        a, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        if (net := config.delta(layer)) is not None:
            return delta_parameters(net, a, hidden, layer, (net.value_heads,))
        rows = [*deepseek_v3.attention_parameters(config, layer)]
        if config.has_indexer(layer):
            rows += pooled_indexer_parameters(
                config.indexer,
                config.index_kpool,
                f"{a}.indexer",
                hidden,
                config.q_lora_rank,
                layer,
                mtp=layer >= config.num_hidden_layers,
            )
        return rows

    rows = mtp.without_own_ends(deepseek_v3.stack_parameters(config, attention))
    rows = with_hyper_connections(rows, config.streams, _NAMES, config.is_moe)
    return rename_rows(rows, _rename)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups; no scale
    passes through clamped gates."""
    p = f"model.layers.{layer}"
    if (net := config.delta(layer)) is not None:
        groups = delta_scale_groups(net, f"{p}.self_attn", f"{p}.input_layernorm")
    else:
        groups = deepseek_v3.attention_scale_groups(config, layer)
        if config.has_indexer(layer):
            groups = with_indexer(groups, f"{p}.self_attn.indexer", POOLED_READERS)
    groups += deepseek_v3.feed_forward_scale_groups(config, layer)
    return rename_groups(groups, _rename)


class Attention(deepseek_v32.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        self.norms = self.norms._replace(eps=config.rms_norm_eps)

    def indexer_of(self, config: Config, layer: int, weights: Weights) -> PooledIndexer:
        prefix = f"model.layers.{layer}.self_attn.indexer"
        return PooledIndexer(config.indexer, layer, prefix, weights)


class StreamsLayer(hyper_connections.HyperConnectionLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p, weights = f"model.layers.{layer}", RenamedWeights(weights, _rename)
        mlp = deepseek_v3.mlp_of(config, layer, weights)
        attention = attention_of(Attention, config, layer, weights)
        super().__init__(p, config.streams, weights, attention, mlp, _NAMES)


class MtpBlock(deepseek_v3.DecoderLayer):
    """An MTP layer's block, with one residual stream."""

    attention_class = Attention


def layer_of(config: Config, layer: int, weights: Weights) -> decoder.DecoderLayer:
    """A layer by number; MTP layers follow the others."""
    if layer < config.num_hidden_layers:
        return StreamsLayer(config, layer, weights)
    return MtpBlock(config, layer, RenamedWeights(weights, _rename))


DecoderLayer = layer_of


class Model(hyper_connections.HyperConnectionModel):
    layer_class = StreamsLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        embedding, norm = (f"{PREFIX}{name}" for name in ("embed_tokens", "norm"))
        super().__init__(config, weights, embedding=embedding, norm=norm)


class MtpLayer(mtp.MtpLayer):
    layer_class = MtpBlock
    shares_embedding = True

    def __init__(self, config: Config, weights: Weights, index: int = 0) -> None:
        super().__init__(config, RenamedWeights(weights, _rename), index)
