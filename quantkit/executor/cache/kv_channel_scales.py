"""Channels of one size for a cache in 8 bits: a token, or a head of it, has one scale, which its
largest channel decides.

What a channel is divide_gains by before it is cached is multiplied back behind the cache, by weights
that are there already. Of latents the norm's gain is divide_gains and the columns of kv_b are
multiplied; of keys that are normed the gain of keys is divide_gains and that of queries multiplied,
alike for both channels that turn together. Divisors are power_of_two_ratios of two, so nothing is rounded, and
what the model computes without a cache in 8 bits stays the same to the last bit, but for numbers
too small for 16 bits.

How large a channel will be the weights tell: of a latent the gain times the norm of kv_a's row over
the input's own gains, of a key its gain. Values, and keys without a norm, stay as they are.
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
    """Change the attention of these layers in place. Every rank finds the same divisors."""
    kv_a = {
        row.layer: row.module for row in rows if row.projection == "kv_a" and row.role == "linear"
    }
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, deepseek_v3.Attention):
            weight = dequantize(checkpoint.weight(kv_a[attention.layer]), torch.float32)[
                : attention.config.kv_lora_rank
            ]
            spread = (weight.to(layer.input_norm.device) * layer.input_norm.float()).norm(dim=1)
            divisors = power_of_two_ratios(attention.norms.k.float().abs() * spread)
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
    """sizes [D] with the larger of the two for both channels of each pair that turns."""
    turned, rest = sizes[: rope.dim], sizes[rope.dim :]
    pairs = turned.unflatten(0, (-1, 2) if rope.interleaved else (2, -1))
    dim = 1 if rope.interleaved else 0
    return torch.cat([pairs.amax(dim=dim, keepdim=True).expand_as(pairs).flatten(), rest])
