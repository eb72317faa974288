"""Qwen3.8-Flash-Next: four gated residual streams (gated_streams.py); Qwen3.5's gated delta net in
three of four layers, in the others its gated attention over tokens that an indexer with a key for
several of them selects; Qwen2-MoE's experts; n-gram embeddings before some layers (ngrams.py).

The text model is computed. The vision tower is copied, and so is the MTP layer (mtp.*), for engines
that run it; transformers has no forward of it. No scale moves to the inputs of a sublayer: each
stream has a gain of its own there, and all would have to round alike. Symbols: T tokens, H
hidden_size, D indexer_head_dim.
"""

from collections.abc import Iterator

import torch
from quantkit_kernels import HeadNorm, rotate_heads
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import gqa, hyper_connections
from quantkit.models.context import Context
from quantkit.models.decoder import gain_of
from quantkit.models.delta_net import GatedDeltaNet
from quantkit.models.mlp import MoeMlp
from quantkit.models.pooled_index import IndexPooling, PooledInputs
from quantkit.models.qwen4_exp.config import Config
from quantkit.models.qwen4_exp.gated_streams import NAMES, stream_parameters
from quantkit.models.qwen4_exp.ngrams import NGramEmbedding, ngram_parameters
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights


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
