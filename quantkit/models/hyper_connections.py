"""Hyper-connections (arXiv 2512.24880): n residual streams, mixed before and after each sublayer;
decoder layers, stack and MTP layer with them.

The operators are quantkit_kernels/streams.py. Between sublayers, calibration passes hidden states as
packed by `pack_streams`; the stack passes token ids and streams [T, n, H]. Symbols: T tokens, H
hidden_size, n streams.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from quantkit_kernels import (
    MixingWeights,
    StreamProduct,
    by_own_backend,
    merge_streams,
    mix_streams,
    rms_norm,
    weigh_streams,
)
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import decoder
from quantkit.models.context import Context
from quantkit.models.decoder import DecoderLayer, Model
from quantkit.models.mlp import Mlp, MoeMlp
from quantkit.models.mtp import MtpReads, MtpStackConfig
from quantkit.models.table import Block, Parameter
from quantkit.models.weights import LinearOp, Weights

ID_SCALE = 2.0**-24
"""Factor of a token's id in packed hidden states: float32 then holds every id below 2^24 exactly,
and the id is negligible among the streams' values."""


class ResidualStreams(Protocol):
    """Several residual streams of each token, and how calibration packs them between sublayers.
    count: how many; packed_width: values of a token."""

    @property
    def count(self) -> int: ...

    @property
    def packed_width(self) -> int: ...

    def first(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """embedded [T, H], token_ids int64 [T] -> packed before the first layer, float32 [T,
        packed_width]."""

    def merged(self, hidden: Tensor, weights: Weights, gain: Tensor, eps: float) -> Tensor:
        """Packed after the last layer -> input of the final norm, of this gain and eps, [T, H]."""


@dataclass(frozen=True)
class HyperConnectionNames:
    """An architecture's names of the tensors of a hyper-connection, after its prefix. gain: of the
    norm over all streams, None without. end: the merge after the last layer, None for the mean of
    the streams; ends: its names of fn, base and scale."""

    fn: str = "_fn"
    base: str = "_base"
    scale: str = "_scale"
    gain: str | None = None
    end: str | None = "hc_head"
    ends: tuple[str, str, str] = ("_fn", "_base", "_scale")


@dataclass(frozen=True)
class HyperConnectionSizes:
    """steps: Sinkhorn iterations, 0 where each stream keeps its own; eps: added in these and to
    stream weights; norm_eps: of the norm over all streams; magnitude: most that an output's weight
    is."""

    count: int
    hidden: int
    steps: int
    eps: float
    norm_eps: float
    names: HyperConnectionNames = HyperConnectionNames()
    magnitude: float = 2.0

    @property
    def packed_width(self) -> int:
        """Values of a token's hidden state between sublayers."""
        return packed_width(self.hidden, self.count)

    def connection(self, prefix: str, weights: Weights) -> Any:
        """What comes before one sublayer, called as `HyperConnection` is."""
        return HyperConnection(self, prefix, weights)

    def end(self, weights: Weights) -> "Merge":
        """What comes after the last layer."""
        return StreamMerge(self, weights)

    def first(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """As of `ResidualStreams`."""
        return pack_streams(expand_streams(embedded, self.count), token_ids)

    def merged(self, hidden: Tensor, weights: Weights, gain: Tensor, eps: float) -> Tensor:
        """As of `ResidualStreams`."""
        return self.end(weights)(unpack_streams(hidden, self.count)[0], gain, eps)[1]


Merge = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""As `StreamMerge.__call__`."""


def hyper_connection_parameters(
    sizes: HyperConnectionSizes, prefix: str, layer: int, block: Block
) -> list[Parameter]:
    """Every tensor of one hyper-connection. block: of the layer's sublayer; "router" for
    experts."""
    per, scales = (2 + sizes.count, 3) if sizes.steps else (2, 2)
    rows, names = per * sizes.count, sizes.names
    shapes = {
        names.fn: (rows, sizes.count * sizes.hidden),
        names.base: (rows,),
        names.scale: (scales,),
    } | _gain_shape(sizes)
    late = block == "router"
    return [
        Parameter(f"{prefix}{name}", shape, "streams", layer=layer, block=block, after_experts=late)
        for name, shape in shapes.items()
    ]


def merge_parameters(sizes: HyperConnectionSizes) -> list[Parameter]:
    """Every tensor of the merge after the last layer."""
    n, names = sizes.count, sizes.names
    if names.end is None:
        return []
    shapes = dict[str, tuple[int, ...]](zip(names.ends, ((n, n * sizes.hidden), (n,), (1,))))
    return [
        Parameter(f"{names.end}{name}", shape, "streams")
        for name, shape in (shapes | _gain_shape(sizes)).items()
    ]


def _gain_shape(sizes: HyperConnectionSizes) -> dict[str, tuple[int, ...]]:
    return {sizes.names.gain: (sizes.count * sizes.hidden,)} if sizes.names.gain else {}


class HyperConnection:
    """Of one sublayer."""

    def __init__(self, sizes: HyperConnectionSizes, prefix: str, weights: Weights) -> None:
        own = (sizes.names.fn, sizes.names.base, sizes.names.scale)
        self.product = _product(sizes, prefix, own, weights)

    def __call__(self, streams: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, MixingWeights]:
        """streams [T, n, H] -> the sublayer's input [T, H], normed, and the weights for
        `mix_streams`."""
        return weigh_streams(streams, self.product, gain, eps)


class StreamMerge:
    """Weighted sum, or mean, of the streams after the last layer."""

    def __init__(self, sizes: HyperConnectionSizes, weights: Weights) -> None:
        names = sizes.names
        self.product = names.end and _product(sizes, names.end, names.ends, weights)

    def __call__(self, streams: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """streams [T, n, H] -> [T, H] normed, and before the norm."""
        if isinstance(self.product, StreamProduct):
            return merge_streams(streams, self.product, gain, eps)
        merged = streams.mean(dim=1, dtype=torch.float32).to(streams.dtype)
        return rms_norm(merged, gain, eps), merged


def expand_streams(embedded: Tensor, count: int) -> Tensor:
    """embedded [T, H] -> the streams of the first layer [T, n, H]."""
    return embedded[:, None].expand(-1, count, -1).contiguous()


def stream_mean(streams: Tensor, rows: Tensor | None = None) -> Tensor:
    """The mean of streams [T, n, H], of the tokens `rows` if given: [T, H]."""
    mean = streams.mean(dim=1, dtype=torch.float32).to(streams.dtype)
    return mean if rows is None else mean[rows]


def packed_width(hidden_size: int, count: int) -> int:
    """Values of a token's hidden state between sublayers: of several streams with the token id."""
    return hidden_size * count + (count > 1)


def pack_streams(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Streams and token ids as hidden states between sublayers, float32 [T, n H + 1]."""
    return torch.cat((streams.flatten(1).float(), token_ids[:, None].float() * ID_SCALE), dim=-1)


def unpack_streams(hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The streams [T, n, H] and token ids int64 [T] of packed hidden states."""
    return hidden[:, :-1].unflatten(-1, (count, -1)), packed_ids(hidden)


def packed_ids(hidden: Tensor) -> Tensor:
    """The token ids int64 [T] of packed hidden states, which come last."""
    return (hidden[:, -1] / ID_SCALE).round().long()


def repack_streams(hidden: Tensor, streams: Tensor) -> Tensor:
    """Packed hidden states with other streams [T, n, H]."""
    return torch.cat((streams.flatten(1), hidden[:, -1:]), dim=-1)


def _product(
    sizes: HyperConnectionSizes, prefix: str, own: tuple[str, str, str], weights: Weights
) -> StreamProduct:
    """The linear over the normed streams, with the norm's gain folded in."""
    fn, base, scale = (weights.tensor(f"{prefix}{name}").float() for name in own)
    if gain := sizes.names.gain:
        fn = fn * weights.tensor(f"{prefix}{gain}").float()
    numbers = (sizes.norm_eps, sizes.eps, sizes.steps, sizes.magnitude)
    return StreamProduct(fn, base, scale, *numbers)


class HyperConnectionStackConfig(decoder.StackConfig, Protocol):
    @property
    def streams(self) -> HyperConnectionSizes: ...


class LayerNames(NamedTuple):
    """A layer's names of its hyper-connections, and of the norms after them."""

    before_attention: str
    before_mlp: str
    input_norm: str
    mlp_norm: str


def with_hyper_connections(
    rows: Iterable[Parameter],
    sizes: HyperConnectionSizes,
    names: LayerNames,
    is_moe: Callable[[int], bool],
) -> list[Parameter]:
    """The rows of a stack with one residual stream, with those of a hyper-connection before each
    sublayer's norm and of the merge before the final norm; MTP layers have neither."""
    found: list[Parameter] = []
    for row in rows:
        prefix, layer = f"model.layers.{row.layer}", row.layer
        if row.name == "model.norm.weight":
            found += merge_parameters(sizes)
        elif layer is not None and not row.mtp:
            if row.module == f"{prefix}.{names.input_norm}":
                at = f"{prefix}.{names.before_attention}"
                found += hyper_connection_parameters(sizes, at, layer, "attention")
            elif row.module == f"{prefix}.{names.mlp_norm}":
                block: Block = "router" if is_moe(layer) else "mlp"
                at = f"{prefix}.{names.before_mlp}"
                found += hyper_connection_parameters(sizes, at, layer, block)
        found.append(row)
    return found


class HyperConnectionLayer(decoder.DecoderLayer):
    def __init__(
        self,
        prefix: str,
        sizes: HyperConnectionSizes,
        weights: Weights,
        attention: Callable[[Tensor, Context], Tensor],
        mlp: Mlp | MoeMlp,
        names: LayerNames,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__(
            prefix,
            sizes.norm_eps,
            weights,
            attention,
            mlp,
            names.mlp_norm,
            norm_offset,
            names.input_norm,
        )
        self.count = sizes.count
        self.before_attention = sizes.connection(f"{prefix}.{names.before_attention}", weights)
        self.before_mlp = sizes.connection(f"{prefix}.{names.before_mlp}", weights)

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        context: Context,
        next_norm: Tensor,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """normed: the token ids [T]; residual: the streams [T, n, H]; both are returned. next_norm
        is unused, because the next sublayer first weighs the streams. rows: as in
        `decoder.DecoderLayer`."""
        streams = self._attend(self.enter(residual, normed, context), context)
        if rows is not None:
            normed, streams = normed[rows], streams[rows]
        own, weights = self.before_mlp(streams, self.mlp_norm, self.eps)
        return normed, self._add_mlp_output(streams, self.mlp_with_ids(own, normed), weights)

    def attend(self, hidden: Tensor, context: Context) -> Tensor:
        streams = self.enter(*unpack_streams(hidden, self.count), context)
        return repack_streams(hidden, self._attend(streams, context))

    def mlp_output(self, hidden: Tensor, context: Context) -> Tensor:
        streams, token_ids = unpack_streams(hidden, self.count)
        return self.mlp_with_ids(self.before_mlp(streams, self.mlp_norm, self.eps)[0], token_ids)

    def add_mlp_output(self, hidden: Tensor, mlp_output: Tensor, context: Context) -> Tensor:
        streams, _ = unpack_streams(hidden, self.count)
        weights = self.before_mlp(streams, self.mlp_norm, self.eps)[1]
        return repack_streams(hidden, self._add_mlp_output(streams, mlp_output, weights))

    def mlp_with_ids(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """Output of the MLP or of all experts together for normed [T, H], with token ids int64
        [T]."""
        return self.mlp_reduced(normed)

    def enter(self, streams: Tensor, token_ids: Tensor, context: Context) -> Tensor:
        """The streams [T, n, H] that the layer's sublayers work on, from those it is given."""
        return streams

    def finish(self, streams: Tensor) -> Tensor:
        """The layer's output streams [T, n, H]."""
        return streams

    def _attend(self, streams: Tensor, context: Context) -> Tensor:
        normed, weights = self.before_attention(streams, self.input_norm, self.eps)
        return mix_streams(streams, self.attention_output(normed, context), weights)

    def _add_mlp_output(
        self, streams: Tensor, mlp_output: Tensor, weights: MixingWeights
    ) -> Tensor:
        return self.finish(mix_streams(streams, self.post_mlp(mlp_output), weights))


class HyperConnectionModel(decoder.Model):
    num_mtp_vectors: ClassVar[int] = 0
    """Vectors of hidden_size per token that an MTP layer reads; 0 for all streams."""

    def __init__(
        self,
        config: HyperConnectionStackConfig,
        weights: Weights,
        head: str = "lm_head",
        *,
        embedding: str = "model.embed_tokens",
        norm: str = "model.norm",
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__(config, weights, head, norm_offset, embedding=embedding, norm=norm)
        self.end, self.count = config.streams.end(weights), config.streams.count
        self.outputs_mtp_input = False
        """Whether the input of an MTP layer is output after the hidden states, concatenated."""

    @property
    def width(self) -> int:
        """As `decoder.Model.width`."""
        return self.embedding.shape[1] * (
            1 + self.outputs_mtp_input * (self.num_mtp_vectors or self.count) + len(self.aux_layers)
        )

    @by_own_backend
    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """token_ids [T] -> [T, width]: hidden states [T, H] after the final norm, then the means of
        the streams before `aux_layers`, then the input of an MTP layer. rows int64 [R]: of these
        tokens only."""
        streams = expand_streams(F.embedding(token_ids, self.embedding), self.count)
        read: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if number in self.aux_layers:
                read.append(stream_mean(streams, rows))
            _, streams = layer(
                token_ids, streams, context, self.norm, rows if layer is self.layers[-1] else None
            )
        if len(self.layers) in self.aux_layers:
            read.append(stream_mean(streams))
        normed, merged = self.end(streams, self.norm, self.config.rms_norm_eps)
        read += [self.mtp_input(streams, merged)] if self.outputs_mtp_input else []
        return torch.cat((normed, *read), dim=-1) if read else normed

    def mtp_input(self, streams: Tensor, merged: Tensor) -> Tensor:
        """What an MTP layer reads, from the streams [T, n, H] after the last layer and their merge
        [T, H]."""
        return streams.flatten(1)


class HyperConnectionMtpConfig(MtpStackConfig, Protocol):
    @property
    def streams(self) -> HyperConnectionSizes: ...

    def prefix(self, layer: int) -> str:
        """Prefix of the names of a layer's tensors."""


def mtp_parameters(
    sizes: HyperConnectionSizes, prefix: str, layer: int, block: Iterable[Parameter]
) -> list[Parameter]:
    """Every tensor of one MTP layer. block: those of its decoder layer."""
    h = sizes.hidden
    rows = [
        Parameter(f"{prefix}.enorm.weight", (h,), "norm", layer=layer),
        Parameter(f"{prefix}.hnorm.weight", (h,), "norm", layer=layer),
        Parameter(f"{prefix}.e_proj.weight", (h, h), "mtp_proj", "gathered", layer=layer),
        Parameter(f"{prefix}.h_proj.weight", (h, h), "mtp_proj", "gathered", layer=layer),
        *block,
        *(replace(row, layer=layer) for row in merge_parameters(with_prefix(sizes, prefix))),
        Parameter(f"{prefix}.norm.weight", (h,), "norm", layer=layer),
    ]
    return [replace(row, mtp=True) for row in rows]


def with_prefix(sizes: HyperConnectionSizes, prefix: str) -> HyperConnectionSizes:
    """Those of a layer or head with a merge of its own."""
    return replace(sizes, names=replace(sizes.names, end=f"{prefix}.{sizes.names.end}"))


class MtpLayer:
    """DeepSeek-V4's MTP layer: predicts token i + 2 from the streams of token i and the embedding
    of token i + 1.

    A linear of the normed next-token embedding is added to a linear of each normed stream of the
    main model's last layer. The layer has its own merge; embedding and head are the main model's.
    """

    layer_class: ClassVar[type[Any]]
    reads: MtpReads = "streams"
    backend: str = "auto"
    """As in `decoder.Model`."""

    def __init__(self, config: HyperConnectionMtpConfig, weights: Weights, index: int = 0) -> None:
        layer = config.num_hidden_layers + index
        p = config.prefix(layer)
        self.eps = config.rms_norm_eps
        self.count = config.streams.count
        self.hidden_size = config.streams.hidden
        self.enorm, self.hnorm, self.norm = (
            weights.tensor(f"{p}.{name}.weight") for name in ("enorm", "hnorm", "norm")
        )
        self.e_proj, self.h_proj = weights.linear(f"{p}.e_proj"), weights.linear(f"{p}.h_proj")
        self.embedding: Tensor
        self.head: LinearOp
        self.block: DecoderLayer = self.layer_class(config, layer, weights)
        self.end = with_prefix(config.streams, p).end(weights)

    def follow(self, model: Model) -> None:
        """Share the main model's embedding and head, and make it output its streams after its
        hidden states."""
        assert isinstance(model, HyperConnectionModel), "an MTP layer for hyper-connections"
        self.embedding, self.head, model.outputs_mtp_input = model.embedding, model.head, True

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T], hidden [T, n H]: the main model's streams -> the block's input
        streams [T, n H]."""
        embedded = self.e_proj(
            rms_norm(F.embedding(next_token_ids, self.embedding), self.enorm, self.eps)
        )
        streams = rms_norm(
            hidden.unflatten(-1, (self.count, -1)).contiguous(), self.hnorm, self.eps
        )
        return (
            embedded[:, None] + self.h_proj(streams.flatten(0, 1)).unflatten(0, (-1, self.count))
        ).flatten(1)

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden [T, W] after the block, packed (`pack_streams`) -> input of the head, [T, H]."""
        return self.end(unpack_streams(hidden, self.count)[0], self.norm, self.eps)[0]

    @by_own_backend
    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, H + n H], as output by the main model -> the same shape, the input of a
        further MTP step. rows int64 [R]: of these tokens only."""
        inputs = self.inputs(next_token_ids, hidden[:, self.hidden_size :])
        _, streams = self.block(
            next_token_ids, inputs.unflatten(-1, (self.count, -1)), context, self.norm, rows
        )
        normed, _ = self.end(streams, self.norm, self.eps)
        return torch.cat((normed, streams.flatten(1)), dim=-1)

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H + n H] -> float32 [T, vocab]."""
        return self.head(hidden[:, : self.hidden_size].contiguous()).float()
