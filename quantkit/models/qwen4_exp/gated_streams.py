"""Qwen3.8-Flash-Next's residual streams: each is normed by itself, a sublayer reads their mean with
a gate for every channel of each, and adds its output to each with a weight of its own.

The gates are a low-rank linear of all normed streams, SiLU of its inner values over n, and a
sigmoid. There is no other norm before a sublayer, and none at the end: the head reads such a mean,
too. Symbols: T tokens, H hidden_size, n streams, R inner width of the gates.
"""

from dataclasses import dataclass, replace

import torch
from quantkit_kernels import MixingWeights
from quantkit_kernels.gating import sigmoid
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.hyper_connections import HyperConnectionSizes, LayerNames
from quantkit.models.table import Block, Parameter
from quantkit.models.weights import Weights

_NORM, _DOWN, _UP, _INJECT = (
    "hc_norm",
    "input_mix_weight_down",
    "input_mix_weight_up",
    "block_inject_weight",
)
NAMES = LayerNames(
    "attn_hyper_connection",
    "mlp_hyper_connection",
    f"attn_hyper_connection.{_NORM}",
    f"mlp_hyper_connection.{_NORM}",
)


@dataclass(frozen=True)
class GatedStreamSizes(HyperConnectionSizes):
    """rank: R; module: of the mean after the last layer."""

    rank: int = 1
    module: str = ""

    @classmethod
    def of(cls, count: int, hidden: int, eps: float, rank: int, module: str) -> "GatedStreamSizes":
        return cls(count, hidden, 0, 0.0, eps, rank=rank, module=module)

    def connection(self, prefix: str, weights: Weights) -> "GatedStreams":
        return GatedStreams(self, prefix, weights)

    def end(self, weights: Weights) -> "GatedStreamMerge":
        return GatedStreamMerge(self, weights)


def stream_parameters(
    sizes: GatedStreamSizes, prefix: str, layer: int | None = None, block: Block | None = None
) -> list[Parameter]:
    """Every tensor of the streams before one sublayer, or of the mean after the last layer."""
    width = sizes.count * sizes.hidden
    late = block == "router"
    norm = Parameter(
        f"{prefix}.{_NORM}.weight",
        (width,),
        "norm",
        layer=layer,
        block=block,
        gain_offset=1.0,
        after_experts=late,
    )
    down = replace(
        norm,
        name=f"{prefix}.{_DOWN}.weight",
        shape=(sizes.rank, width),
        role="streams",
        gain_offset=0.0,
    )
    up = replace(down, name=f"{prefix}.{_UP}.weight", shape=(width, sizes.rank))
    inject = replace(down, name=f"{prefix}.{_INJECT}.weight", shape=(sizes.count, width))
    return [norm, down, up] if layer is None else [norm, down, up, inject]


class GatedStreams:
    """Before one sublayer."""

    def __init__(self, sizes: GatedStreamSizes, prefix: str, weights: Weights) -> None:
        self.count, self.rank = sizes.count, sizes.rank
        self.down = torch.cat([weights.dequantized(f"{prefix}.{one}") for one in (_DOWN, _INJECT)])
        self.up = weights.dequantized(f"{prefix}.{_UP}")

    def __call__(self, streams: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, MixingWeights]:
        """streams [T, n, H], gain float32 [n H] -> the sublayer's input [T, H], and the weights for
        `mix_streams`."""
        normed = norm_streams(streams, gain, eps)
        low, inject = F.linear(normed.flatten(1), self.down).tensor_split([self.rank], dim=1)
        weights = MixingWeights(2 * sigmoid(inject.float() / self.count), None)
        return _gated_mean(normed, low, self.up), weights


class GatedStreamMerge:
    """After the last layer."""

    def __init__(self, sizes: GatedStreamSizes, weights: Weights) -> None:
        self.down, self.up = (
            weights.dequantized(f"{sizes.module}.{name}") for name in (_DOWN, _UP)
        )

    def __call__(self, streams: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """streams [T, n, H], gain float32 [n H] -> input of the head [T, H], twice: no norm comes
        after the mean."""
        normed = norm_streams(streams, gain, eps)
        merged = _gated_mean(normed, F.linear(normed.flatten(1), self.down), self.up)
        return merged, merged


def norm_streams(streams: Tensor, gain: Tensor, eps: float) -> Tensor:
    """streams [T, n, H], each normed by itself with its part of gain float32 [n H]."""
    wide = streams.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * gain.view(streams.shape[1], -1)).to(streams.dtype)


def _gated_mean(normed: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """normed [T, n, H], inner values of the gates low [T, R], up [n H, R] -> [T, H]."""
    gates = sigmoid(F.linear(F.silu(low / normed.shape[1]), up)).view_as(normed)
    return (gates * normed).mean(1)
