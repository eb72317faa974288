"""Equalize the channels of an 8-bit KV cache: a token, or a head of it, has one scale, which its
largest channel determines.

The factor that a channel is divided by before it is cached is multiplied back after the cache, by
weights that exist already. For latents the norm's gain is divided and the columns of kv_b are
multiplied; for normed keys the gain of keys is divided and that of queries multiplied, with one
factor for both channels of a rotary pair. Factors are powers of two, so nothing is rounded, and
results without an 8-bit cache stay the same to the last bit, except for numbers too small for 16
bits.

The size of a channel is estimated from weights: of a latent, its gain times the norm of kv_a's row
over the input's own gains; of a key, its gain. Values, and keys without a norm, are not changed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.models import deepseek_v3, gqa
from quantkit.models.cache_scales import divide_gains, power_of_two_ratios
from quantkit.models.decoder import DecoderLayer
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter


def equalize_kv_channels(
    layers: Iterable[DecoderLayer], rows: list[Parameter], checkpoint: Checkpoint
) -> None:
    """Change the attention of these layers in place, with the same factors on every rank."""
    kv_a = {
        row.layer: row.module for row in rows if row.projection == "kv_a" and row.role == "linear"
    }
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, deepseek_v3.Attention):
            weight = dequantize(checkpoint.weight(kv_a[attention.layer]), torch.float32)[
                : attention.config.kv_lora_rank
            ]
            channel_sizes = (weight.to(layer.input_norm.device) * layer.input_norm.float()).norm(
                dim=1
            )
            divisors = power_of_two_ratios(attention.norms.k.float().abs() * channel_sizes)
            attention.kv_b = attention.kv_b * divisors.to(attention.kv_b.dtype)
            attention.norms = attention.norms._replace(k=divide_gains(attention.norms.k, divisors))
        elif isinstance(attention, gqa.Attention) and attention.norms is not None:
            divisors = power_of_two_ratios(
                max_over_rotary_pairs(attention.norms.k.float().abs(), attention.config.rope)
            )
            q = (attention.norms.q.float() * divisors).to(attention.norms.q.dtype)
            attention.norms = attention.norms._replace(
                q=q, k=divide_gains(attention.norms.k, divisors)
            )


def max_over_rotary_pairs(sizes: Tensor, rope: Rope) -> Tensor:
    """sizes [D] with the larger one for both channels of each rotary pair."""
    rotary, rest = sizes[: rope.dim], sizes[rope.dim :]
    pairs = rotary.unflatten(0, (-1, 2) if rope.interleaved else (2, -1))
    dim = 1 if rope.interleaved else 0
    return torch.cat([pairs.amax(dim=dim, keepdim=True).expand_as(pairs).flatten(), rest])
