"""The layer that predicts one token further behind several residual streams, as DeepSeek-V4's
published code has it.

A linear over the normed embedding of the next token is added to one over each of the main model's
streams, normed, as its last layer leaves them. What ends the layer's own streams is its own;
embedding and head are the main model's. Symbols: T tokens, H hidden_size, n streams.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.context import Context
from quantkit.models.decoder import DecoderLayer, Model
from quantkit.models.hyper_connections import StreamsEnd, StreamSizes, end_parameters
from quantkit.models.hyper_connections_decoder import StreamsModel
from quantkit.models.mtp import MtpReads, MtpStackConfig
from quantkit.models.table import Parameter
from quantkit.models.weights import LinearOp, Weights


class StreamsMtpConfig(MtpStackConfig, Protocol):
    @property
    def streams(self) -> StreamSizes: ...

    def prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""


def mtp_parameters(
    sizes: StreamSizes, prefix: str, layer: int, block: Iterable[Parameter]
) -> list[Parameter]:
    """Every tensor of one MTP layer. block: those of its decoder layer."""
    h = sizes.hidden
    rows = [
        Parameter(f"{prefix}.enorm.weight", (h,), "norm", layer=layer),
        Parameter(f"{prefix}.hnorm.weight", (h,), "norm", layer=layer),
        Parameter(f"{prefix}.e_proj.weight", (h, h), "mtp_proj", "gathered", layer=layer),
        Parameter(f"{prefix}.h_proj.weight", (h, h), "mtp_proj", "gathered", layer=layer),
        *block,
        *(replace(row, layer=layer) for row in end_parameters(_ended_at(sizes, prefix))),
        Parameter(f"{prefix}.norm.weight", (h,), "norm", layer=layer),
    ]
    return [replace(row, mtp=True) for row in rows]


def _ended_at(sizes: StreamSizes, prefix: str) -> StreamSizes:
    return replace(sizes, names=replace(sizes.names, end=f"{prefix}.{sizes.names.end}"))


class MtpLayer:
    """Predicts token i + 2 from the streams of token i and the embedding of token i + 1."""

    layer_class: ClassVar[type[Any]]
    reads: MtpReads = "streams"
    backend: str = "auto"
    """As `decoder.Model` has it."""

    def __init__(self, config: StreamsMtpConfig, weights: Weights, index: int = 0) -> None:
        layer = config.num_hidden_layers + index
        p = config.prefix(layer)
        self.eps, self.count, self.hidden_size = (
            config.rms_norm_eps,
            config.streams.count,
            config.streams.hidden,
        )
        self.enorm, self.hnorm, self.norm = (
            weights.tensor(f"{p}.{name}.weight") for name in ("enorm", "hnorm", "norm")
        )
        self.e_proj, self.h_proj = weights.linear(f"{p}.e_proj"), weights.linear(f"{p}.h_proj")
        self.embedding: Tensor
        self.head: LinearOp
        self.block: DecoderLayer = self.layer_class(config, layer, weights)
        self.end = StreamsEnd(_ended_at(config.streams, p), weights)

    def follow(self, model: Model) -> None:
        """Share the main model's embedding and head, and have it hand out its streams behind its
        hidden states."""
        assert isinstance(model, StreamsModel), "a layer behind streams"
        self.embedding, self.head, model.hands_on = model.embedding, model.head, True

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T], hidden [T, n H]: the main model's streams -> the block's, [T, n
        H]."""
        embedded = self.e_proj(
            rms_norm(F.embedding(next_token_ids, self.embedding), self.enorm, self.eps)
        )
        streams = rms_norm(
            hidden.unflatten(-1, (self.count, -1)).contiguous(), self.hnorm, self.eps
        )
        return (
            embedded[:, None] + self.h_proj(streams.flatten(0, 1)).unflatten(0, (-1, self.count))
        ).flatten(1)

    @by_own_backend
    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, H + n H]: as the main model hands it out, and as it is returned, for a further
        step. rows int64 [R]: of these tokens alone."""
        inputs = self.inputs(next_token_ids, hidden[:, self.hidden_size :])
        _, streams = self.block(
            next_token_ids, inputs.unflatten(-1, (self.count, -1)), context, self.norm, rows
        )
        return torch.cat(
            (rms_norm(self.end(streams), self.norm, self.eps), streams.flatten(1)), dim=-1
        )

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H + n H] -> float32 [T, vocab]."""
        return self.head(hidden[:, : self.hidden_size].contiguous()).float()
