"""Hyper-connections (quantkit_kernels/streams.py) in plain torch, in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.gating import sigmoid
from quantkit_kernels.reference.functional import rms_norm
from quantkit_kernels.streams import MixingWeights, StreamProduct


def weigh_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float
) -> tuple[Tensor, MixingWeights]:
    pre, weights = stream_weights(streams, product)
    return rms_norm(_weighted_sum(streams, pre), gain, eps), weights


def weigh_streams_ahead(
    streams: Tensor, before: Tensor, product: StreamProduct, gain: Tensor, eps: float
) -> tuple[Tensor, MixingWeights, Tensor]:
    """As `weigh_streams`, but the input is the sum of the streams under the weights `before`,
    float32 [T, n], which the sublayer before this one computed; third: the weights float32 [T, n]
    for the next one. Of every backend: DeepSeek-V4.1 has no kernel of its own."""
    pre, weights = stream_weights(streams, product)
    return rms_norm(_weighted_sum(streams, before), gain, eps), weights, pre


def stream_weights(streams: Tensor, product: StreamProduct) -> tuple[Tensor, MixingWeights]:
    """Weights of the streams in an input float32 [T, n], and those for `mix_streams`."""
    n, small, scale = streams.shape[1], product.eps, product.scale
    sizes = [n, n, len(product.fn) - 2 * n]
    pre, post, mixing = _projected(streams, product).split(sizes, dim=-1)
    pre_base, post_base, mixing_base = product.base.split(sizes)
    pre = sigmoid(pre * scale[0] + pre_base) + small
    post = product.magnitude * sigmoid(post * scale[1] + post_base)
    if not product.steps:
        return pre, MixingWeights(post + small, None)
    mixing = (mixing * scale[2] + mixing_base).unflatten(-1, (n, n)).softmax(dim=-1) + small
    mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + small)
    for _ in range(product.steps - 1):
        mixing = mixing / (mixing.sum(dim=-1, keepdim=True) + small)
        mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + small)
    return pre, MixingWeights(post, mixing)


def merge_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    projected = _projected(streams, product) * product.scale + product.base
    merged = _weighted_sum(streams, sigmoid(projected) + product.eps)
    return rms_norm(merged, gain, eps), merged


def mix_streams(streams: Tensor, output: Tensor, weights: MixingWeights) -> Tensor:
    mixed = streams.float()
    if weights.mixing is not None:
        mixed = weights.mixing.mT @ mixed
    return torch.addcmul(mixed, weights.post[..., None], output[:, None].float()).to(streams.dtype)


def _projected(streams: Tensor, product: StreamProduct) -> Tensor:
    """fn times all streams of a token as one vector of mean square 1."""
    flat = streams.flatten(1).float()
    factor = torch.rsqrt(flat.square().mean(-1, keepdim=True) + product.norm_eps)
    return F.linear(flat * factor, product.fn)


def _weighted_sum(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights[..., None] * streams).sum(dim=1).to(streams.dtype)
