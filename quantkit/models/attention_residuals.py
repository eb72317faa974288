"""Attention over residuals (AttnRes, arXiv 2603.15031): a sublayer reads a weighted sum of the
outputs of earlier blocks of layers and of what its own block has put out so far.

The streams of a token: first the sum of the own block's outputs, then the sums of those blocks that
are complete; the embedding is the first one. A layer that begins a block keeps the sum as a stream
and starts another. Calibration holds all streams that there will be, 0 before they exist, packed as
hyper-connections are. Symbols: T tokens, H hidden_size, b complete blocks, n streams.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models import decoder
from quantkit.models.context import Context
from quantkit.models.decoder import embed
from quantkit.models.hyper_connections import (
    pack_streams,
    packed_width,
    repack_streams,
    unpack_streams,
)
from quantkit.models.mlp import Mlp, MoeMlp
from quantkit.models.table import Block, Parameter
from quantkit.models.weights import Weights

_END = "model.output_attn_res"
_ROWS = 1024
"""Tokens at once of a long prompt, of whose streams there are several copies in float32."""


@dataclass(frozen=True)
class AttentionResidualSizes:
    """block: layers of a block. layers: of the model. eps: of the norm before scores. prefix: of
    the model's names in the checkpoint."""

    block: int
    layers: int
    hidden: int
    eps: float
    prefix: str = ""

    @property
    def count(self) -> int:
        """As of `ResidualStreams`."""
        return 1 + self.before(self.layers)

    def before(self, layer: int) -> int:
        """Blocks that are complete before a layer."""
        return -(-layer // self.block)

    def begins_block(self, layer: int) -> bool:
        return layer % self.block == 0

    @property
    def packed_width(self) -> int:
        """As of `ResidualStreams`."""
        return packed_width(self.hidden, self.count)

    def first(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """As of `ResidualStreams`."""
        return pack_streams(self.padded(embedded[:, None]), token_ids)

    def merged(self, hidden: Tensor, weights: Weights, gain: Tensor, eps: float) -> Tensor:
        """As of `ResidualStreams`."""
        streams, _ = unpack_streams(hidden, self.count)
        return ResidualAttention(self, self.end, weights)(streams[:, 0], streams[:, 1:])

    def padded(self, streams: Tensor) -> Tensor:
        """The streams [T, n, H], of fewer of them."""
        return F.pad(streams, (0, 0, 0, self.count - streams.shape[1]))

    @property
    def end(self) -> str:
        """Name in the checkpoint of the attention before the final norm."""
        return f"{self.prefix}{_END}"


class ResidualAttention:
    """What a sublayer reads: of the streams, weighted by a softmax of their scores, one learned
    query for all tokens over each normed stream."""

    def __init__(self, sizes: AttentionResidualSizes, prefix: str, weights: Weights) -> None:
        gain, query = (weights.tensor(f"{prefix}_{name}.weight") for name in ("norm", "proj"))
        self.query, self.eps = (gain.float() * query.float()).view(-1), sizes.eps

    def __call__(self, current: Tensor, blocks: Tensor) -> Tensor:
        """current [T, H], blocks [T, b, H] -> [T, H]."""
        if len(current) > _ROWS:
            parts = zip(current.split(_ROWS), blocks.split(_ROWS))
            return torch.cat([self(*part) for part in parts])
        streams = torch.cat((blocks, current[:, None]), dim=1).float()
        norms = (streams.square().mean(-1) + self.eps).rsqrt()
        weights = ((streams * self.query).sum(-1) * norms).softmax(-1)
        return (weights[..., None] * streams).sum(1).to(current.dtype)


def with_attention_residuals(
    rows: Iterable[Parameter], sizes: AttentionResidualSizes, is_moe: Callable[[int], bool]
) -> list[Parameter]:
    """The rows of a stack with one residual stream, with those of the attention over streams before
    each sublayer's norm and the final norm."""

    def own(prefix: str, layer: int | None = None, block: Block | None = None) -> list[Parameter]:
        shapes: dict[str, tuple[int, ...]] = {"norm": (sizes.hidden,), "proj": (1, sizes.hidden)}
        return [
            Parameter(f"{prefix}_{name}.weight", shape, "streams", layer=layer, block=block)
            for name, shape in shapes.items()
        ]

    found: list[Parameter] = []
    for row in rows:
        prefix, layer = f"model.layers.{row.layer}", row.layer
        if row.name == "model.norm.weight":
            found += own(_END)
        elif layer is not None and row.module == f"{prefix}.input_layernorm":
            found += own(f"{prefix}.self_attention_res", layer, "attention")
        elif layer is not None and row.module == f"{prefix}.post_attention_layernorm":
            found += own(f"{prefix}.mlp_res", layer, "router" if is_moe(layer) else "mlp")
        found.append(row)
    return found


class AttentionResidualLayer(decoder.DecoderLayer):
    def __init__(
        self,
        layer: int,
        sizes: AttentionResidualSizes,
        weights: Weights,
        attention: Callable[[Tensor, Context], Tensor],
        mlp: Mlp | MoeMlp,
    ) -> None:
        prefix = f"model.layers.{layer}"
        super().__init__(prefix, sizes.eps, weights, attention, mlp)
        self.sizes, self.complete = sizes, sizes.before(layer)
        self.begins_block = sizes.begins_block(layer)
        self.before_attention = ResidualAttention(sizes, f"{prefix}.self_attention_res", weights)
        self.before_mlp = ResidualAttention(sizes, f"{prefix}.mlp_res", weights)

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        context: Context,
        next_norm: Tensor,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """normed [T, H]: what the layers of this block have put out; residual [T, b, H]: the
        complete blocks; both are returned. next_norm is unused, because the next sublayer first
        weighs the streams. rows: as in `decoder.DecoderLayer`."""
        current, blocks = self._attend(normed, residual, context)
        if rows is not None:
            current, blocks = current[rows], blocks[rows]
        return current + self.post_mlp(self.mlp_reduced(self._mlp_input(current, blocks))), blocks

    def streams_of(self, output: Any) -> Tensor:
        current, blocks = output
        return torch.cat((current[:, None], blocks), dim=1)

    def attend(self, hidden: Tensor, context: Context) -> Tensor:
        return self._packed(hidden, *self._attend(*self._unpacked(hidden, self.complete), context))

    def mlp_output(self, hidden: Tensor, context: Context) -> Tensor:
        return self.mlp_reduced(self._mlp_input(*self._unpacked(hidden, self._after_attention)))

    def add_mlp_output(self, hidden: Tensor, mlp_output: Tensor, context: Context) -> Tensor:
        current, blocks = self._unpacked(hidden, self._after_attention)
        return self._packed(hidden, current + self.post_mlp(mlp_output), blocks)

    @property
    def _after_attention(self) -> int:
        """Blocks that are complete after the attention sublayer."""
        return self.complete + self.begins_block

    def _attend(self, current: Tensor, blocks: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        read = rms_norm(self.before_attention(current, blocks), self.input_norm, self.eps)
        out = self.attention_output(read, context)
        if self.begins_block:
            return out, torch.cat((blocks, current[:, None]), dim=1)
        return current + out, blocks

    def _mlp_input(self, current: Tensor, blocks: Tensor) -> Tensor:
        return rms_norm(self.before_mlp(current, blocks), self.mlp_norm, self.eps)

    def _unpacked(self, hidden: Tensor, complete: int) -> tuple[Tensor, Tensor]:
        """Packed hidden states -> the first stream [T, H], and the complete blocks [T, b, H]."""
        streams, _ = unpack_streams(hidden, self.sizes.count)
        return streams[:, 0], streams[:, 1 : 1 + complete]

    def _packed(self, hidden: Tensor, current: Tensor, blocks: Tensor) -> Tensor:
        """Packed hidden states with other streams."""
        streams = torch.cat((current[:, None], blocks), dim=1)
        return repack_streams(hidden, self.sizes.padded(streams))


class AttentionResidualModel(decoder.Model):
    """`decoder.Model` without outputs for a draft model."""

    def __init__(
        self, config: decoder.StackConfig, sizes: AttentionResidualSizes, weights: Weights
    ) -> None:
        head, embedding, norm = (
            f"{sizes.prefix}{name}" for name in ("lm_head", "model.embed_tokens", "model.norm")
        )
        super().__init__(config, weights, head, embedding=embedding, norm=norm)
        self.end = ResidualAttention(sizes, sizes.end, weights)

    @by_own_backend
    def __call__(self, token_ids: Tensor, context: Context, rows: Tensor | None = None) -> Tensor:
        """As of `decoder.Model`: [T, H]."""
        current = embed(token_ids, self.embedding)
        blocks = current.new_empty(len(current), 0, current.shape[1])
        for layer in self.layers:
            last = rows if layer is self.layers[-1] else None
            current, blocks = layer(current, blocks, context, self.norm, last)
        return rms_norm(self.end(current, blocks), self.norm, self.config.rms_norm_eps)
