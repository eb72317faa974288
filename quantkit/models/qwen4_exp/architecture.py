"""Qwen3.8-Flash-Next: four gated residual streams (gated_streams.py); Qwen3.5's gated delta net in
three of four layers, in the others its gated attention over tokens that an indexer with a key for
several of them selects; Qwen2-MoE's experts; n-gram embeddings before some layers (ngrams.py).

The text model is computed. The vision tower is copied, and so is the MTP layer (mtp.*), for engines
that run it; transformers has no forward of it. No scale moves to the inputs of a sublayer: each
stream has a gain of its own there, and all would have to round alike. Symbols: T tokens, H
hidden_size, D indexer_head_dim.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from quantkit_kernels import HeadNorm, rotate_heads
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.result import JsonObject
from quantkit.models import gqa, hyper_connections
from quantkit.models.architecture import KeyValueCache
from quantkit.models.config import (
    DECIDED,
    check_at_most,
    check_count,
    check_divides,
    check_flag,
    check_layer_kinds,
    refusal,
    refuse_other_values,
)
from quantkit.models.context import Context
from quantkit.models.decoder import gain_of
from quantkit.models.delta_net import GatedDeltaNet
from quantkit.models.mlp import MixtureNames, MoeMlp, read_routing
from quantkit.models.pooled_index import IndexPooling, PooledInputs
from quantkit.models.qwen3_5 import ROPES, TextConfig, is_flat, plain_ropes, read_text
from quantkit.models.qwen3_next import ROTARY_SHARE, read_delta_net
from quantkit.models.qwen4_exp.gated_streams import NAMES, GatedStreamSizes, stream_parameters
from quantkit.models.qwen4_exp.ngrams import NGramEmbedding, NGramSizes, ngram_parameters
from quantkit.models.short_conv import buffer_index
from quantkit.models.sliding_window import refuse_windows
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

_DEFAULTS: JsonObject = {
    "vocab_size": 248320,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_COUNTS = {"hc_count": 4, "hc_lowrank": 320}
"""transformers' defaults."""
_COMPUTED: JsonObject = {"hidden_act": "silu", "indexer_kv_heads": 1}
_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_FULL, _LINEAR = "full_attention", "linear_attention"
_ALIASES = {"indexed_attention": _FULL, "qwen_sparse_attention": _FULL}
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class Config(TextConfig):
    """hc_count: residual streams; hc_lowrank: inner width of the gates of their input. indexer_*:
    heads and width of the indexer, tokens that share a key, tokens selected. ngrams: sizes of the
    n-gram tables, by layer."""

    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int = 1
    indexer_head_dim: int = 1
    indexer_budget: int = 1
    indexer_compress_ratio: int = 1
    ngrams: Annotated[Mapping[int, NGramSizes], DECIDED] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, config: JsonObject) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed here."""
        text = read_text(config)
        given = {key: value for key, value in text.items() if value is not None}
        text = _DEFAULTS | plain_ropes(given)
        refuse_other_values(text, _COMPUTED, "Qwen3.8-Flash-Next")
        refuse_windows({key: value for key, value in text.items() if key != "layer_types"})
        width = check_count("moe_intermediate_size", text["moe_intermediate_size"])
        values = gqa.read_config(
            {**text, "intermediate_size": width}, partial_rotary_factor=ROTARY_SHARE
        )
        if not any(_SHARE in (text.get(place) or {}) for place in ROPES) and _SHARE not in text:
            place = "rope_parameters"
            raise refusal(place, text.get(place), f"{_SHARE}, of which engines have other defaults")
        layers, bias = values["num_hidden_layers"], check_flag(text, "attention_bias")
        kinds = _read_kinds(text, layers)
        net = read_delta_net({**text, "layer_types": kinds}, layers, joined=False)
        for name in (*_COUNTS, *_INDEXER):
            values[name] = check_count(name, text.get(name, _COUNTS.get(name)))
        made = cls(
            **values,
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
            routing=read_routing(
                text,
                ("num_experts",),
                check_flag(text, "norm_topk_prob", default=True),
                "softmax",
            ),
            mixture=MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate"),
            shared_width=check_count(
                "shared_expert_intermediate_size", text["shared_expert_intermediate_size"]
            ),
            recurrent=net and replace(net, sigmoid=_gated_by_sigmoid(text)),
            output_gate=True,
            norm_offset=1.0,
            copied_prefixes=("mtp.", "model.visual."),
            ngrams=_read_ngrams(text, values["hidden_size"], kinds),
            flat=is_flat(config),
        )
        if made.hc_count < 2:
            raise refusal("hc_count", made.hc_count, "at least 2 residual streams")
        check_divides("indexer_compress_ratio", "indexer_budget", made)
        check_at_most(
            "the rotated part of head_dim", made.rope.dim, "indexer_head_dim", made.indexer_head_dim
        )
        return made

    @property
    def streams(self) -> GatedStreamSizes:
        end = self.name("model.hyper_connection_mixer")
        return GatedStreamSizes.of(
            self.hc_count, self.hidden_size, self.rms_norm_eps, self.hc_lowrank, end
        )

    @property
    def cache(self) -> KeyValueCache:
        pool = self.indexer_compress_ratio
        return KeyValueCache(self.num_key_value_heads, self.head_dim, self.indexer_head_dim, pool)

    @property
    def recent_tokens(self) -> dict[int, tuple[int, int]]:
        channels = self.hc_count * self.hidden_size
        return {
            buffer_index(layer, 0): (sizes.reach, channels) for layer, sizes in self.ngrams.items()
        }


def _read_kinds(text: JsonObject, num_layers: int) -> list[str] | None:
    """layer_types in the words of Qwen3-Next."""
    kinds = text.get("layer_types")
    if kinds is None:
        return None
    kinds = [_ALIASES.get(str(one), one) for one in kinds] if isinstance(kinds, list) else kinds
    return [*check_layer_kinds("layer_types", kinds, num_layers, (_LINEAR, _FULL))]


def _gated_by_sigmoid(text: JsonObject) -> bool:
    """Whether the output of linear attention is gated by a sigmoid, not by SiLU."""
    gate = text.get("output_gate_type", "silu")
    if gate not in ("sigmoid", "silu"):
        raise refusal("output_gate_type", gate, "'sigmoid' or 'silu'")
    return bool(gate == "sigmoid")


def _read_ngrams(text: JsonObject, hidden: int, kinds: list[str] | None) -> dict[int, NGramSizes]:
    """Of the layers that ple_layer_ids counts from 1."""
    listed, layers = text.get("ple_layer_ids", []), text["num_hidden_layers"]
    if not isinstance(listed, list) or not all(
        type(one) is int and 1 <= one <= layers for one in listed
    ):
        raise refusal("ple_layer_ids", listed, f"layers counted from 1 to {layers}")
    numbers = sorted({one - 1 for one in listed})
    if kinds is not None and any(kinds[number] != _LINEAR for number in numbers):
        raise refusal("ple_layer_ids", listed, f"layers with {_LINEAR}")
    return {layer: NGramSizes.from_dict(text, hidden, place) for place, layer in enumerate(numbers)}


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""
    h, vocab = config.hidden_size, config.vocab_size
    rows = [Parameter("model.embed_tokens.weight", (vocab, h), "embedding")]
    for layer in range(config.num_hidden_layers):
        rows += _layer_parameters(config, layer)
    rows = rename_rows(rows, config.name)
    rows += stream_parameters(config.streams, config.streams.module)
    if not config.tie_word_embeddings:
        rows.append(Parameter("lm_head.weight", (vocab, h), "head", "gathered"))
    return rows


def _layer_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    p, sizes = f"model.layers.{layer}", config.streams
    if (ngrams := config.ngrams.get(layer)) is not None:
        yield from ngram_parameters(ngrams, f"{p}.ple", sizes.count, sizes.hidden, layer)
    yield from stream_parameters(sizes, f"{p}.{NAMES.before_attention}", layer, "attention")
    yield from gqa.attention_parameters(config, layer)
    if config.delta(layer) is None:
        yield from _indexer_parameters(config, f"{p}.self_attn.indexer", layer)
    yield from stream_parameters(sizes, f"{p}.{NAMES.before_mlp}", layer, "router")
    yield from gqa.feed_forward_parameters(config, layer)


def _indexer_parameters(config: Config, prefix: str, layer: int) -> Iterator[Parameter]:
    heads, dim = config.indexer_n_heads, config.indexer_head_dim
    shape = ((heads + 1) * dim, config.hidden_size)
    name = f"{prefix}.index_qk_proj.weight"
    yield Parameter(name, shape, "indexer", layer=layer, block="attention")
    for side in ("q", "k"):
        yield Parameter(
            f"{prefix}.{side}_layernorm.weight",
            (dim,),
            "norm",
            layer=layer,
            block="attention",
            gain_offset=config.norm_offset,
        )


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer: values to o, up to down."""
    groups = [one for one in gqa.scale_groups(config, layer) if not one.producer_is_norm]
    return rename_groups(groups, config.name)


class BlockIndexer:
    """Of an indexer with a key for several tokens: the mean of theirs, normed and rotated as the
    first of them. All heads count alike. Rotated channels come last here."""

    def __init__(self, config: Config, layer: int, prefix: str, weights: Weights) -> None:
        self.layer, self.rope, eps = layer, config.rope, config.rms_norm_eps
        self.heads, self.dim = config.indexer_n_heads, config.indexer_head_dim

        def ordered(channels: Tensor) -> Tensor:
            return channels.unflatten(0, (-1, self.dim)).roll(-self.rope.dim, dims=1).flatten(0, 1)

        self.weight = ordered(weights.dequantized(f"{prefix}.index_qk_proj"))
        of_queries, of_keys = (
            ordered(gain_of(weights, f"{prefix}.{side}_layernorm.weight", config.norm_offset))
            for side in ("q", "k")
        )
        self.norm = HeadNorm(of_queries, eps)
        equal = of_keys.new_zeros(config.indexer_compress_ratio, self.dim)
        self.pooling = IndexPooling(equal, config.indexer_budget, of_keys, eps, self.rope)

    def __call__(self, x: Tensor, context: Context) -> None:
        """Make the context select tokens. x [T, H]: the layer's input."""
        both = F.linear(x, self.weight).unflatten(-1, (-1, self.dim))
        queries, keys = both[:, :-1].contiguous(), both[:, -1]
        inputs = PooledInputs(
            rotate_heads(queries, context.rotation(self.rope), self.norm),
            torch.cat((keys, torch.zeros_like(keys)), dim=-1),
            x.new_full((len(x), self.heads), self.dim**-0.5, dtype=torch.float32),
        )
        context.select_pooled(self.layer, inputs, self.pooling)


class Attention(gqa.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        prefix = f"model.layers.{layer}.self_attn.indexer"
        self.indexer = BlockIndexer(config, layer, prefix, weights)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        self.indexer(x, context)
        return super().__call__(x, context)

    def attend(self, q: Tensor, context: Context) -> Tensor:
        topk, scale = self.indexer.pooling.topk, self.config.softmax_scale
        return context.attend_gqa(self.layer, q, scale, topk=topk)


class FlashNextLayer(hyper_connections.HyperConnectionLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        p, weights = f"model.layers.{layer}", RenamedWeights(weights, config.name)
        eps, offset = config.rms_norm_eps, config.norm_offset
        assert config.routing is not None, "every layer has experts"
        mlp = MoeMlp(config.routing, f"{p}.{config.mixture_module}", weights, config.mixture)
        attention: Attention | GatedDeltaNet
        if (net := config.delta(layer)) is None:
            attention = Attention(config, layer, weights)
        else:
            attention = GatedDeltaNet(net, layer, f"{p}.linear_attn", eps, weights)
        super().__init__(p, config.streams, weights, attention, mlp, NAMES, offset)
        self.ngrams: NGramEmbedding | None = None
        if (sizes := config.ngrams.get(layer)) is not None:
            self.ngrams = NGramEmbedding(sizes, layer, f"{p}.ple", eps, weights)
            self.ngram_rows = self.ngrams.rows

    def enter(self, streams: Tensor, token_ids: Tensor, context: Context) -> Tensor:
        return streams if self.ngrams is None else self.ngrams(streams, token_ids, context)


DecoderLayer = FlashNextLayer


class Model(hyper_connections.HyperConnectionModel):
    layer_class = FlashNextLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        embedding = config.name("model.embed_tokens")
        head = embedding if config.tie_word_embeddings else "lm_head"
        norm = f"{config.streams.module}.hc_norm"
        offset = config.norm_offset
        super().__init__(config, weights, head, embedding=embedding, norm=norm, norm_offset=offset)


MtpLayer = None
"""The release's MTP layer is copied."""
