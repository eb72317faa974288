"""DeepSeek-V4.1: compressed attention whose entries few layers make and the others share, residual
streams that each sublayer weighs for the next one, n-gram tables (engram.py), experts.

Names are those of the published checkpoint; transformers has no such model. As for DeepSeek-V4,
queries, keys and entries are not rounded to the formats in which the release's kernels hold them.
The text model is computed, the vision tower copied; dspark.py has the head in mtp.*. Symbols: T
tokens, H hidden_size, n streams, D head_dim.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from quantkit_kernels import (
    ChosenEntries,
    EntryPages,
    MixingWeights,
    by_own_backend,
    mix_streams,
    rms_norm,
)
from quantkit_kernels.reference.streams import weigh_streams_ahead
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import hyper_connections
from quantkit.models.compressed_attention import (
    Candidates,
    Carried,
    CompressedAttention,
    IndexKeys,
    Pooling,
    SharedEntries,
)
from quantkit.models.context import CausalContext, Context
from quantkit.models.decoder import embed
from quantkit.models.deepseek_v4 import architecture as deepseek_v4
from quantkit.models.deepseek_v41.ahead_streams import AheadStreams
from quantkit.models.deepseek_v41.config import Config
from quantkit.models.deepseek_v41.engram import SCALE_GROUP, Engram
from quantkit.models.hyper_connections import (
    ID_SCALE,
)
from quantkit.models.mlp import MoeMlp
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights

_NAMES = hyper_connections.LayerNames("hc_attn", "hc_ffn", "attn_norm", "ffn_norm")


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""

    def rows_of(layer: int) -> list[Parameter]:
        has_table = config.engram is not None and layer in config.engram.layers
        table = _engram_parameters(config, layer) if has_table else ()
        return [*table, *layer_parameters(config, layer)]

    return deepseek_v4.stack_parameters(config, rows_of)


def layer_parameters(config: Config, layer: int) -> list[Parameter]:
    """Every tensor of a layer, or of a stage of the DSpark head, without an n-gram table's."""
    config = config.of_layer(layer)
    return deepseek_v4.block_parameters(
        config, layer, _attention_parameters(config, layer), _expert_parameters(config, layer)
    )


def _engram_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    layout, e = config.engram, f"{config.prefix(layer)}.engram"
    assert layout is not None, "a layer with a table"
    n, h, count = config.hc_mult, config.hidden_size, layout.rows[layout.layers.index(layer)]
    yield Parameter(f"{e}.embed.weight", (count, layout.head_dim), "ngram_table")
    scales = (count, -(-layout.head_dim // SCALE_GROUP))
    yield Parameter(f"{e}.embed.scale", scales, "ngram_table", optional=True)
    row = Parameter(f"{e}.wkv.weight", ((n + 1) * h, layout.width), "indexer", layer=layer)
    for one in (row, *(_gain(f"{e}.{side}_weight", (n, h), layer) for side in ("q", "k"))):
        yield replace(one, block="attention")


def _gain(name: str, shape: tuple[int, ...], layer: int) -> Parameter:
    return Parameter(name, shape, "streams", layer=layer)


def _attention_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    """Those of DeepSeek-V4 but for the entries and the indexer, which come before wo_a there."""
    a, d, h = f"{config.prefix(layer)}.attn", config.head_dim, config.hidden_size
    without = replace(config, sources=(-1,) * len(config.sources))
    *before, o_a, o_b = deepseek_v4.attention_parameters(without, layer)
    yield from before
    row = replace(o_a, split="replicate")
    if config.sources[layer] == layer:
        for name in _pooled(config, layer):
            yield replace(row, name=f"{a}.compressor.{name}.weight", shape=(d, h))
        yield replace(row, name=f"{a}.compressor.norm.weight", shape=(d,), role="norm")
    if layer in config.selecting:
        i, heads, width = f"{a}.indexer", config.index_n_heads, config.index_head_dim
        yield replace(row, name=f"{i}.wq_b.weight", shape=(heads * width, config.q_lora_rank))
        yield replace(row, name=f"{i}.weights_proj.weight", shape=(heads, h), role="indexer_gate")
        if config.sources[layer] == layer:
            yield replace(row, name=f"{i}.wk.weight", shape=(width, d))
            yield replace(row, name=f"{i}.k_norm.weight", shape=(width,), role="norm")
    yield from (o_a, o_b)


def _expert_parameters(config: Config, layer: int) -> Iterator[Parameter]:
    router, bias, *others = deepseek_v4.expert_parameters(config, layer)
    # Of tokens of images, which are not computed.
    images = replace(bias, name=f"{bias.name}_vl", optional=True)
    yield from (router, bias, images, *others)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """As of DeepSeek-V4."""
    config, readers = config.of_layer(layer), list[str]()
    if config.sources[layer] == layer:
        readers += [f"compressor.{one}" for one in _pooled(config, layer)]
    selects = layer in config.selecting
    readers += ["indexer.weights_proj"] if selects else []
    return deepseek_v4.block_groups(config, layer, readers, ["indexer.wq_b"] if selects else [])


def _pooled(config: Config, layer: int) -> tuple[str, ...]:
    """Linears whose outputs the layer's entries are made of: a single token of a group needs no
    weight."""
    return ("wkv", "wgate") if config.ratios[layer] > 1 else ("wkv",)


class Attention(deepseek_v4.Attention):
    config: Config
    norms_heads = False

    def with_entries(
        self, plain: CompressedAttention, prefix: str, weights: Weights
    ) -> CompressedAttention:
        c, layer = self.config, self.layer
        source = c.sources[layer]
        if source < 0:
            return plain
        rate, pooling, keys, candidates = c.ratios[layer], None, None, None
        if source == layer:
            gain = weights.tensor(f"{prefix}.compressor.norm.weight")
            bias = torch.zeros(rate, c.head_dim, device=gain.device)
            pooling = Pooling(rate, False, bias, gain, c.rms_norm_eps, self.rope)
            names = [f"{prefix}.compressor.{name}" for name in _pooled(c, layer)]
            self.raw = torch.cat([weights.dequantized(name) for name in names])
            keys = IndexKeys(
                weights.dequantized(f"{prefix}.indexer.wk"),
                weights.tensor(f"{prefix}.indexer.k_norm.weight"),
                c.rms_norm_eps,
            )
        if layer in c.selecting:
            self.read_indexer(f"{prefix}.indexer", weights)
        if 0 <= c.candidate_source <= layer:
            found = layer == c.candidate_source
            candidates = Candidates(c.candidate_topk_blocks, c.candidate_block_size, found)
        shared = SharedEntries(source, rate, keys, layer in c.selecting, candidates)
        return replace(plain, pooling=pooling, topk=c.index_topk, shared=shared)

    def raw_of(self, x: Tensor) -> Tensor:
        """A single token of a group needs no weight."""
        raw = super().raw_of(x)
        missing = 2 * self.config.head_dim - raw.shape[1]
        return F.pad(raw, (0, missing)) if raw.shape[1] and missing else raw


class DecoderLayer(hyper_connections.HyperConnectionLayer):
    mlp: MoeMlp
    attention: Attention

    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        config = config.of_layer(layer)
        p = config.prefix(layer)
        mixture = MoeMlp(config.routing, f"{p}.ffn", weights, config.mixture)
        attention = Attention(config, layer, weights)
        super().__init__(p, config.streams, weights, attention, mixture, _NAMES)
        self.sizes, self.engram = config.streams, None
        if config.engram and layer in config.engram.layers:
            self.engram = Engram(config.engram, f"{p}.engram", layer, self.eps, weights)
            self.ngram_rows = self.engram.rows

    def step(self, state: AheadStreams, context: Context, rows: Tensor | None) -> AheadStreams:
        """One layer in a stack, after `with_ngrams`; its layers share entries in the context. rows
        int64 [R]: as in `decoder.DecoderLayer`."""
        state = self._attended(state, context)
        if rows is not None:
            state = AheadStreams(*(side[rows] for side in state))
        own, weights, before = self._weigh_for_mlp(state)
        mixed = mix_streams(state.streams, self.mlp_reduced(own), weights)
        return state._replace(streams=mixed, before=before)

    def streams_of(self, output: Any) -> Tensor:
        streams: Tensor = output.streams
        return streams

    def attend(self, hidden: Tensor, context: Context) -> Tensor:
        """What layers share is packed with the streams (`_Shared`)."""
        state, attention = AheadStreams.unpack(hidden, self.sizes), self.attention
        reads = attention.attention.shared
        if reads is None:
            return self._attended(self.with_ngrams(state, context), context).pack()
        assert isinstance(context, CausalContext), "whole sequences"
        lengths = context.seq_lens
        shared = state.shared.clone()
        for part, carried in zip(shared.split(lengths), context.carried):
            _Shared(part, attention.config).give(carried, reads, reads.layer == attention.layer)
        state = self._attended(self.with_ngrams(state, context), context)
        for part, carried in zip(shared.split(lengths), context.carried):
            _Shared(part, attention.config).take(carried, reads)
        return state._replace(shared=shared).pack()

    def with_ngrams(self, state: AheadStreams, context: Context) -> AheadStreams:
        """The layer's input with what its n-gram table adds, if it has one."""
        if self.engram is None:
            return state
        found = context.ngrams(state.token_ids, self.engram.rows)
        return state._replace(streams=self.engram(state.streams, found))

    def mlp_output(self, hidden: Tensor, context: Context) -> Tensor:
        own, _, _ = self._weigh_for_mlp(AheadStreams.unpack(hidden, self.sizes))
        return self.mlp_reduced(own)

    def add_mlp_output(self, hidden: Tensor, mlp_output: Tensor, context: Context) -> Tensor:
        state = AheadStreams.unpack(hidden, self.sizes)
        _, weights, before = self._weigh_for_mlp(state)
        mixed = mix_streams(state.streams, mlp_output, weights)
        return state._replace(streams=mixed, before=before).pack()

    def _attended(self, state: AheadStreams, context: Context) -> AheadStreams:
        streams = state.streams.contiguous()
        product = self.before_attention.product
        normed, weights, before = weigh_streams_ahead(
            streams, state.before.contiguous(), product, self.input_norm, self.eps
        )
        mixed = mix_streams(streams, self.attention_output(normed, context), weights)
        return state._replace(streams=mixed, before=before)

    def _weigh_for_mlp(self, state: AheadStreams) -> tuple[Tensor, MixingWeights, Tensor]:
        product = self.before_mlp.product
        return weigh_streams_ahead(
            state.streams.contiguous(),
            state.before.contiguous(),
            product,
            self.mlp_norm,
            self.eps,
        )


class _Shared:
    """What layers of one sequence share, as a view of packed values [T, shared_width]: at the last
    token of each group its entry and index key, and for each token the last selection, as numbers
    of entries, and how many of them; 0 for all."""

    def __init__(self, part: Tensor, config: Config) -> None:
        widths = [config.head_dim, config.index_head_dim, config.index_topk, 1]
        self.entries, self.keys, self.rows, self.counts = part.split(widths, dim=-1)

    def give(self, carried: Carried, reads: SharedEntries, makes: bool) -> None:
        """To a layer that is computed alone. makes: whether the entries are its own."""
        if reads.layer not in carried.entries and not makes:
            rate = reads.rate
            kv, keys = (one[rate - 1 :: rate].contiguous() for one in (self.entries, self.keys))
            table = torch.arange(len(kv), device=kv.device)[None]
            pages = EntryPages(kv, table, rate, rate)
            carried.entries[reads.layer] = pages, pages._replace(kv=keys)
        if carried.chosen is None and bool(self.counts.any()):
            rows, counts = ((one / ID_SCALE).round().int() for one in (self.rows, self.counts))
            carried.chosen = ChosenEntries(rows, counts[:, 0])

    def take(self, carried: Carried, reads: SharedEntries) -> None:
        """What a layer left."""
        if reads.layer in carried.entries:
            pages, index = carried.entries[reads.layer]
            self.entries[reads.rate - 1 :: reads.rate] = pages.kv
            self.keys[reads.rate - 1 :: reads.rate] = index.kv
        if reads.selects:
            self.counts.zero_()
        if carried.chosen is not None:
            self.rows.copy_(carried.chosen.rows * ID_SCALE)
            self.counts.copy_(carried.chosen.counts[:, None] * ID_SCALE)


class Model(hyper_connections.HyperConnectionModel):
    layer_class = DecoderLayer
    layers: list[DecoderLayer]  # type: ignore[assignment]

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights, "head", embedding="embed", norm="norm")
        self.sizes = replace(config.streams, shared=0)

    @by_own_backend
    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """token_ids [T] -> [T, width]: after the final norm, then the mean of the streams before
        `aux_layers`. rows int64 [R]: of these tokens only."""
        state, read = self._first(token_ids), list[Tensor]()
        for number, layer in enumerate(self.layers):
            state = layer.with_ngrams(state, context)
            if number in self.aux_layers:
                read.append(hyper_connections.stream_mean(state.streams, rows))
            state = layer.step(state, context, rows if layer is self.layers[-1] else None)
        normed = rms_norm(state.merged(), self.norm, self.config.rms_norm_eps)
        return torch.cat((normed, *read), dim=-1) if read else normed

    def _first(self, token_ids: Tensor) -> AheadStreams:
        return AheadStreams.first(embed(token_ids, self.embedding), token_ids, self.sizes)


MtpLayer = None
