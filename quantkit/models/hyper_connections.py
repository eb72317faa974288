"""Hyper-connections: several residual streams beside each other, mixed before and after each half
of a layer (arXiv 2512.24880).

From the n streams of a token, normed together, a small product makes three weights: what each
stream counts in the half's input, what the half's output counts in each stream, and how the streams
are mixed, a matrix that is brought near rows and columns of sum 1 by Sinkhorn's
steps. All in float32. Symbols: T tokens, H hidden_size, n streams.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.table import Block, Parameter
from quantkit.models.weights import Weights

_ID_SCALE = 2.0**-24
"""What a token's id is multiplied by beside its streams: float32 holds each id below 2^24 so, and
none counts among the streams' values."""


@dataclass(frozen=True)
class StreamNames:
    """What an architecture calls the three tensors of a hyper-connection, behind its own name.
    gain: of the norm over all streams, None for
    one without. end: the one behind the last layer, whose base and scale have `at_end` behind their
    names."""

    fn: str = "_fn"
    base: str = "_base"
    scale: str = "_scale"
    gain: str | None = None
    end: str = "hc_head"
    at_end: str = ""


@dataclass(frozen=True)
class StreamSizes:
    """steps: of Sinkhorn; eps: added in these, and to what streams count; norm_eps: of the norm
    over all streams."""

    count: int
    hidden: int
    steps: int
    eps: float
    norm_eps: float
    names: StreamNames = StreamNames()


class StreamWeights(NamedTuple):
    """post [T, n]: what a half's output counts in each stream. mixing [T, n, n]: stream j
    afterwards is the sum over i of mixing[i, j] times stream i."""

    post: Tensor
    mixing: Tensor


def stream_parameters(sizes: StreamSizes, prefix: str, layer: int, block: Block) -> list[Parameter]:
    """Every tensor of one hyper-connection. block: of the layer's half; the router's stands for
    experts."""
    rows, names = (2 + sizes.count) * sizes.count, sizes.names
    shapes = {
        names.fn: (rows, sizes.count * sizes.hidden),
        names.base: (rows,),
        names.scale: (3,),
    } | _gain_shape(sizes)
    late = block == "router"
    return [
        Parameter(
            f"{prefix}{name}", shape, "streams", layer=layer, block=block, behind_experts=late
        )
        for name, shape in shapes.items()
    ]


def end_parameters(sizes: StreamSizes) -> list[Parameter]:
    """Every tensor of what ends the streams."""
    n, names = sizes.count, sizes.names
    shapes = {
        names.fn: (n, n * sizes.hidden),
        f"{names.base}{names.at_end}": (n,),
        f"{names.scale}{names.at_end}": (1,),
    }
    return [
        Parameter(f"{names.end}{name}", shape, "streams")
        for name, shape in (shapes | _gain_shape(sizes)).items()
    ]


def _gain_shape(sizes: StreamSizes) -> dict[str, tuple[int, ...]]:
    return {sizes.names.gain: (sizes.count * sizes.hidden,)} if sizes.names.gain else {}


class HyperConnection:
    """Of one half of a layer."""

    def __init__(self, sizes: StreamSizes, prefix: str, weights: Weights) -> None:
        self.sizes, names = sizes, sizes.names
        self.fn = _product(sizes, prefix, weights)
        self.base, self.scale = (
            weights.tensor(f"{prefix}{name}").float() for name in (names.base, names.scale)
        )

    def __call__(self, streams: Tensor) -> tuple[Tensor, StreamWeights]:
        """streams [T, n, H] -> the half's input [T, H], and what `joined` wants."""
        n, eps = self.sizes.count, self.sizes.eps
        made = F.linear(_normed(streams, self.sizes.norm_eps), self.fn)
        pre, post, mixing = made.split([n, n, n * n], dim=-1)
        pre_base, post_base, mixing_base = self.base.split([n, n, n * n])
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        mixing = (mixing * self.scale[2] + mixing_base).unflatten(-1, (n, n)).softmax(dim=-1) + eps
        mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.sizes.steps - 1):
            mixing = mixing / (mixing.sum(dim=-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        return _collapsed(streams, pre), StreamWeights(post, mixing)


class StreamsEnd:
    """Behind the last layer: the streams' sum, weighed."""

    def __init__(self, sizes: StreamSizes, weights: Weights) -> None:
        self.sizes, names = sizes, sizes.names
        self.fn = _product(sizes, names.end, weights)
        self.base, self.scale = (
            weights.tensor(f"{names.end}{name}{names.at_end}").float()
            for name in (names.base, names.scale)
        )

    def __call__(self, streams: Tensor) -> Tensor:
        """streams [T, n, H] -> [T, H]."""
        made = F.linear(_normed(streams, self.sizes.norm_eps), self.fn)
        return _collapsed(streams, torch.sigmoid(made * self.scale + self.base) + self.sizes.eps)


def joined(streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
    """streams [T, n, H] before a half and its output [T, H] -> the streams after it."""
    mixed = weights.mixing.to(streams.dtype).transpose(-1, -2) @ streams
    return weights.post.to(streams.dtype)[..., None] * output[:, None] + mixed


def begun(embedded: Tensor, count: int) -> Tensor:
    """embedded [T, H] -> the streams of the first layer [T, n, H]."""
    return embedded[:, None].expand(-1, count, -1).contiguous()


def packed(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Streams and ids of the tokens as hidden states between sublayers, float32 [T, n H + 1]."""
    return torch.cat((streams.flatten(1).float(), token_ids[:, None].float() * _ID_SCALE), dim=-1)


def unpacked(hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The streams [T, n, H] and token ids int64 [T] of `packed` ones."""
    return hidden[:, :-1].unflatten(-1, (count, -1)), (hidden[:, -1] / _ID_SCALE).round().long()


def repacked(hidden: Tensor, streams: Tensor) -> Tensor:
    """`hidden`, as `packed` made it, with other streams [T, n, H]."""
    return torch.cat((streams.flatten(1), hidden[:, -1:]), dim=-1)


def _product(sizes: StreamSizes, prefix: str, weights: Weights) -> Tensor:
    """What the normed streams are multiplied by, float32 [rows, n H], the norm's gain in it."""
    fn = weights.tensor(f"{prefix}{sizes.names.fn}").float()
    return fn * weights.tensor(f"{prefix}{sizes.names.gain}").float() if sizes.names.gain else fn


def _normed(streams: Tensor, eps: float) -> Tensor:
    """All streams of a token as one vector of mean square 1, float32 [T, n H]."""
    flat = streams.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _collapsed(streams: Tensor, counts: Tensor) -> Tensor:
    return (counts[..., None] * streams).sum(dim=1).to(streams.dtype)
