"""Layers over several residual streams (hyper.py), and the stack of them.

Hidden states between sublayers, as calibration walks them, are `hyper.packed`. The stack hands on
token ids and streams [T, n, H].
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import decoder
from quantkit.models.context import Context
from quantkit.models.hyper_connections import (
    HyperConnection,
    StreamsEnd,
    StreamSizes,
    begun,
    joined,
    repacked,
    unpacked,
)
from quantkit.models.mlp import Mlp, MoeMlp
from quantkit.models.weights import Weights


class StreamsConfig(decoder.StackConfig, Protocol):
    @property
    def streams(self) -> StreamSizes: ...


class LayerNames(NamedTuple):
    """What a layer calls the hyper-connections of its halves, and the norms before these."""

    before_attention: str
    before_mlp: str
    input_norm: str
    mlp_norm: str


class StreamsLayer(decoder.DecoderLayer):
    def __init__(
        self,
        prefix: str,
        sizes: StreamSizes,
        weights: Weights,
        attention: Callable[[Tensor, Context], Tensor],
        mlp: Mlp | MoeMlp,
        names: LayerNames,
    ) -> None:
        super().__init__(
            prefix,
            sizes.norm_eps,
            weights,
            attention,
            mlp,
            names.mlp_norm,
            input_norm=names.input_norm,
        )
        self.count = sizes.count
        self.before_attention = HyperConnection(
            sizes, f"{prefix}.{names.before_attention}", weights
        )
        self.before_mlp = HyperConnection(sizes, f"{prefix}.{names.before_mlp}", weights)

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        context: Context,
        next_norm: Tensor,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """normed: the token ids [T]; residual: the streams [T, n, H], which are returned so.
        next_norm is not read: what comes next has weights of its own before its norm. rows: as in
        `decoder.DecoderLayer`."""
        streams = self._attend(residual, context)
        if rows is not None:
            normed, streams = normed[rows], streams[rows]
        return normed, self._joined(streams, self._summed(streams, normed))

    def attend(self, hidden: Tensor, context: Context) -> Tensor:
        streams, _ = unpacked(hidden, self.count)
        return repacked(hidden, self._attend(streams, context))

    def summed(self, hidden: Tensor, context: Context) -> Tensor:
        return self._summed(*unpacked(hidden, self.count))

    def with_sum(self, hidden: Tensor, summed: Tensor, context: Context) -> Tensor:
        streams, _ = unpacked(hidden, self.count)
        return repacked(hidden, self._joined(streams, summed))

    def made(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """What the MLP, or the experts together, make of normed [T, H], the tokens' ids int64 [T]
        beside it."""
        return self.mlp_sum(normed)

    def ended(self, streams: Tensor) -> Tensor:
        """The streams [T, n, H] as the layer leaves them."""
        return streams

    def _attend(self, streams: Tensor, context: Context) -> Tensor:
        collapsed, weights = self.before_attention(streams)
        return joined(
            streams,
            self.attention_output(rms_norm(collapsed, self.input_norm, self.eps), context),
            weights,
        )

    def _summed(self, streams: Tensor, token_ids: Tensor) -> Tensor:
        return self.made(rms_norm(self.before_mlp(streams)[0], self.mlp_norm, self.eps), token_ids)

    def _joined(self, streams: Tensor, summed: Tensor) -> Tensor:
        return self.ended(joined(streams, self.as_added(summed), self.before_mlp(streams)[1]))


class StreamsModel(decoder.Model):
    num_handed: ClassVar[int] = 0
    """Vectors of hidden_size that an MTP layer reads of a token; 0 for all streams."""

    def __init__(
        self,
        config: StreamsConfig,
        weights: Weights,
        head: str = "lm_head",
        *,
        embedding: str = "model.embed_tokens",
        norm: str = "model.norm",
    ) -> None:
        super().__init__(config, weights, head, embedding=embedding, norm=norm)
        self.end, self.count = StreamsEnd(config.streams, weights), config.streams.count
        self.hands_on = False
        """Whether what an MTP layer reads is handed out behind the hidden states, side by side."""

    @property
    def width(self) -> int:
        """As `decoder.Model.width`."""
        return self.embedding.shape[1] * (1 + self.hands_on * (self.num_handed or self.count))

    @by_own_backend
    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """token_ids [T] -> hidden [T, H] after the final norm, and what is handed on, [T, width];
        rows int64 [R]: of these tokens."""
        streams = begun(F.embedding(token_ids, self.embedding), self.count)
        for layer in self.layers:
            _, streams = layer(
                token_ids, streams, context, self.norm, rows if layer is self.layers[-1] else None
            )
        merged = self.end(streams)
        normed = rms_norm(merged, self.norm, self.config.rms_norm_eps)
        return (
            torch.cat((normed, self.handed(streams, merged)), dim=-1) if self.hands_on else normed
        )

    def handed(self, streams: Tensor, merged: Tensor) -> Tensor:
        """What an MTP layer reads of the streams [T, n, H] behind the last layer and of these
        merged, [T, H]."""
        return streams.flatten(1)
