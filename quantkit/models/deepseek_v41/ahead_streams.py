"""DeepSeek-V4.1's residual streams: each sublayer computes the weights under which they are summed
for the next one, and the last sublayer those of the output.

Symbols: T tokens, H hidden_size, n streams, S values of a token that later layers read.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from quantkit.models.hyper_connections import (
    ID_SCALE,
    HyperConnectionSizes,
    expand_streams,
    packed_ids,
)
from quantkit.models.weights import Weights


@dataclass(frozen=True)
class AheadSizes(HyperConnectionSizes):
    """shared: S, packed with the streams while calibrating, as the weights are."""

    shared: int = 0

    @property
    def packed_width(self) -> int:
        return super().packed_width + self.count + self.shared

    def first(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        return AheadStreams.first(embedded, token_ids, self).pack()

    def merged(self, hidden: Tensor, weights: Weights, gain: Tensor, eps: float) -> Tensor:
        return AheadStreams.unpack(hidden, self).merged()


class AheadStreams(NamedTuple):
    """Hidden states between sublayers that weigh the streams for the next one. streams [T, n, H];
    before float32 [T, n]: their weights in the next sublayer's input; shared [T, S]; token_ids
    int64 [T]."""

    streams: Tensor
    before: Tensor
    shared: Tensor
    token_ids: Tensor

    @classmethod
    def first(cls, embedded: Tensor, token_ids: Tensor, sizes: AheadSizes) -> Self:
        """Before the first layer, which reads stream 0. embedded [T, H]."""
        before = torch.zeros(len(embedded), sizes.count, device=embedded.device)
        before[:, 0].fill_(1)
        shared = embedded.new_zeros(len(embedded), sizes.shared)
        return cls(expand_streams(embedded, sizes.count), before, shared, token_ids)

    @classmethod
    def unpack(cls, hidden: Tensor, sizes: AheadSizes) -> Self:
        """hidden [T, sizes.packed_width], as `pack` made it."""
        widths = [sizes.count * sizes.hidden, sizes.count, sizes.shared, 1]
        flat, before, shared, _ = hidden.split(widths, dim=-1)
        streams = flat.unflatten(-1, (sizes.count, -1))
        return cls(streams, before, shared, packed_ids(hidden))

    def pack(self) -> Tensor:
        """float32 [T, packed_width]."""
        ids = self.token_ids[:, None].float() * ID_SCALE
        return torch.cat(
            (self.streams.flatten(1).float(), self.before, self.shared.float(), ids), dim=-1
        )

    def merged(self) -> Tensor:
        """The weighted sum [T, H] of streams' dtype."""
        return (self.before[..., None] * self.streams).sum(dim=1).to(self.streams.dtype)
