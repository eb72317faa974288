"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, selected by an indexer in each layer.

The published code multiplies the indexer's queries and keys by a Hadamard matrix, which changes no
product, and rounds them to FP8: so does an 8-bit cache, while in 16 bits both are omitted, as in
transformers. The indexer is not quantized.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models import decoder, deepseek_v3, mtp
from quantkit.models.architecture import LatentCache
from quantkit.models.config import (
    DECIDED,
    check_at_most,
    check_count,
    check_layer_kinds,
    refusal,
    refuse_other_values,
)
from quantkit.models.context import Context
from quantkit.models.indexer import Indexer, IndexerSizes, indexer_parameters, with_indexer
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

_DENSE, _SPARSE = "dense", "sparse"
_ALIASES = ("num_experts", "num_local_experts")
"""Names of n_routed_experts in transformers' configs."""
_LATENT_EPS = 1e-6
"""Of the norms inside latent attention, as in transformers whatever rms_norm_eps is; vLLM uses
rms_norm_eps."""
SHARING = ("index_topk_freq", "index_topk_pattern", "indexer_types")
"""Keys of config.json with which layers share an indexer."""


@dataclass(frozen=True)
class Config(deepseek_v3.Config):
    """mlp_layer_types: dense or sparse, for each layer before the MTP layers; empty where
    first_k_dense_replace decides."""

    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128
    mlp_layer_types: Annotated[tuple[str, ...], DECIDED] = ()

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        for name in SHARING:
            if config.get(name) not in (None, 1):
                raise QuantkitError(
                    f"config.json has {name} = {config[name]!r}",
                    "in deepseek_v32 each layer has an indexer of its own",
                )
        return cls.read(config, interleaved=False)

    @classmethod
    def read(cls, config: JsonObject, *, interleaved: bool) -> "Config":
        """interleaved: whether the indexer rotates adjacent channels; config.json must not
        differ."""
        computed = {
            "rope_interleave": True,
            "indexer_rope_interleave": interleaved,
            "mlp_bias": False,
        }
        refuse_other_values(config, computed, str(config.get("model_type")), allow_null=True)
        if config.get("layer_types") is not None and {*map(str, config["layer_types"])} != {
            "indexed_attention"
        }:
            raise refusal("layer_types", config["layer_types"], "indexed_attention for each layer")
        made = super().from_dict(_with_experts(config))
        assert isinstance(made, cls), made
        check_count("q_lora_rank", made.q_lora_rank)
        check_at_most(
            "qk_rope_head_dim", made.qk_rope_head_dim, "index_head_dim", made.index_head_dim
        )
        if (kinds := config.get("mlp_layer_types")) is None:
            return made
        kinds = check_layer_kinds(
            "mlp_layer_types", kinds, made.num_hidden_layers, (_DENSE, _SPARSE)
        )
        return replace(made, mlp_layer_types=kinds)

    @property
    def indexer(self) -> IndexerSizes:
        return IndexerSizes(self.index_n_heads, self.index_head_dim, self.index_topk)

    @property
    def cache(self) -> LatentCache:
        return LatentCache(self.kv_lora_rank, self.qk_rope_head_dim, self.index_head_dim)

    @property
    def indexer_interleaved(self) -> bool:
        """Whether the indexer rotates adjacent channels."""
        return False

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer has its own indexer; else it attends to the tokens selected by the
        layer before."""
        return True

    def is_moe(self, layer: int) -> bool:
        if layer < len(self.mlp_layer_types):
            return self.mlp_layer_types[layer] == _SPARSE
        return bool(self.mlp_layer_types) or super().is_moe(layer)


def _with_experts(config: JsonObject) -> JsonObject:
    """config.json with the number of experts as n_routed_experts."""
    for name in _ALIASES:
        if config.get(name) is not None:
            if config.get("n_routed_experts", config[name]) != config[name]:
                raise QuantkitError(
                    f"config.json has {name} = {config[name]!r} and another n_routed_experts",
                    "keep the one that is meant",
                )
            config = {**config, "n_routed_experts": config[name]}
    return config


def parameters(config: Config) -> list[Parameter]:
    """DeepSeek-V3's rows, with those of the indexers after each layer's latent attention."""
    rows = []
    for row in deepseek_v3.parameters(config):
        rows.append(row)
        if row.projection == "o" and row.layer is not None:
            prefix = f"model.layers.{row.layer}.self_attn.indexer"
            own = indexer_parameters(
                config.indexer,
                prefix,
                config.hidden_size,
                config.q_lora_rank,
                row.layer,
                mtp=row.mtp,
            )
            rows += (
                own
                if config.has_indexer(row.layer)
                else [replace(one, optional=True) for one in own]
            )
    return rows


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """DeepSeek-V3's groups; the indexer reads the input of the first linears, and the queries'
    latent."""
    groups = deepseek_v3.scale_groups(config, layer)
    return (
        with_indexer(groups, f"model.layers.{layer}.self_attn.indexer")
        if config.has_indexer(layer)
        else groups
    )


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        self.norms = self.norms._replace(eps=_LATENT_EPS)
        self.topk, self.indexer = config.index_topk, None
        if config.has_indexer(layer):
            self.indexer = self.indexer_of(config, layer, weights)

    def indexer_of(
        self, config: Any, layer: int, weights: Weights
    ) -> Callable[[Tensor, Tensor, Context], None]:
        rope = replace(config.rope, interleaved=config.indexer_interleaved)
        prefix = f"model.layers.{layer}.self_attn.indexer"
        return Indexer(config.indexer, layer, prefix, rope, weights)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        c = self.config
        q_a = context.store_mla(self.layer, self.qkv_a(x), self.norms, c.rope)
        if self.indexer is not None:
            self.indexer(x, q_a, context)
        q = self.q_b(q_a).unflatten(-1, (-1, c.qk_head_dim))
        return self.o(self.attend(x, q, context).flatten(1))

    def attend(self, x: Tensor, q: Tensor, context: Context) -> Tensor:
        """x [T, H], its queries q [T, heads, qk_head_dim] -> input of o_proj [T, heads, v]."""
        c = self.config
        return context.attend_mla(self.layer, q, self.kv_b, c.rope, c.softmax_scale, self.topk)


class DecoderLayer(deepseek_v3.DecoderLayer):
    attention_class = Attention


class Model(decoder.Model):
    layer_class = DecoderLayer


class MtpLayer(mtp.MtpLayer):
    layer_class = DecoderLayer
