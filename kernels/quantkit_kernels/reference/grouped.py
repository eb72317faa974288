"""The operators of grouped.py in plain torch, float32 inside. Arguments arrive checked."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit_kernels.reference.functional import rms_norm, turned


def gqa_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    turned: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = turned,
) -> Tensor:
    """rms_norm, turned: another backend's, where it has them."""
    kv_heads, width = keys.shape[2:]
    heads = qkv.unflatten(1, (-1, width))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    rope = 2 * cos.shape[1]
    sides = []
    for side, norm in ((q, q_norm), (k, k_norm)):
        normed = side if norm is None else rms_norm(side, norm, eps)
        first = turned(normed[..., :rope], cos, sin, interleaved)
        sides.append(first if rope == width else torch.cat([first, normed[..., rope:]], dim=-1))
    for cache, side in ((keys, sides[1]), (values, v)):
        cache.view(-1, kv_heads, width).index_copy_(0, slots, side.to(cache.dtype))
    return sides[0]


def gqa_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    lengths: Sequence[int] | None,
) -> Tensor:
    slots = torch.arange(block_table.shape[1] * keys.shape[1], device=q.device)
    seen = slots < seq_lens.unsqueeze(1)  # [B, slots]
    if window:
        seen &= slots >= seq_lens.unsqueeze(1) - window
    # What is not seen is zeroed, not only masked: a probability of 0 times a stored NaN would still be NaN.
    k, v = (side[block_table].flatten(1, 2).float().masked_fill(~seen[:, :, None, None], 0.0) for side in (keys, values))
    grouped = (q.float() * scale).unflatten(1, (keys.shape[2], -1))  # [B, kv_heads, shared, D]
    scores = grouped @ k.permute(0, 2, 3, 1)
    masked = ~seen[:, None, None]
    # The second mask turns the NaN of an empty row into zeros.
    probabilities = scores.masked_fill(masked, float("-inf")).softmax(dim=-1).masked_fill(masked, 0.0)
    return (probabilities @ v.transpose(1, 2)).flatten(1, 2).to(q.dtype)
