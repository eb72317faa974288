"""The operators of grouped.py in plain torch, float32 inside. Arguments arrive checked."""

import torch
from torch import Tensor

from quantkit_kernels.codes import CodedKeys, KeySteps, KeyValues, decode, store_keys
from quantkit_kernels.paged import Norms, PagedKeys, Rotation
from quantkit_kernels.reference.functional import PLAIN, AttentionSteps


def gqa_prepare(
    qkv: Tensor,
    norms: Norms | None,
    rotation: Rotation,
    cache: KeyValues,
    slots: Tensor,
    steps: AttentionSteps = PLAIN,
    code_steps: KeySteps | None = None,
) -> Tensor:
    kv_heads, width = cache[0].shape[2:]
    heads = qkv.unflatten(1, (-1, width))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    rope = 2 * rotation.cos.shape[1]
    sides = []
    for side, gain in ((q, norms and norms.q), (k, norms and norms.k)):
        normed = side if norms is None or gain is None else steps.rms_norm(side, gain, norms.eps)
        first = steps.rotated(normed[..., :rope], rotation)
        sides.append(first if rope == width else torch.cat([first, normed[..., rope:]], dim=-1))
    if isinstance(cache, CodedKeys):
        store_keys(cache, slots, sides[1], v, code_steps)
        return sides[0]
    for stored, side in zip(cache, (sides[1], v)):
        stored.view(-1, kv_heads, width).index_copy_(0, slots, side.to(stored.dtype))
    return sides[0]


def gqa_decode(
    q: Tensor, pages: PagedKeys, scale: float, window: int, sinks: Tensor | None = None
) -> Tensor:
    keys, block_table, seq_lens = pages.keys, pages.block_table, pages.seq_lens
    slots = torch.arange(block_table.shape[1] * keys.shape[1], device=q.device)
    seen = slots < seq_lens.unsqueeze(1)  # [B, slots]
    if window:
        seen &= slots >= seq_lens.unsqueeze(1) - window
    # What is not seen is zeroed, not only masked: a probability of 0 times a stored NaN would still
    # be NaN.
    k, v = (
        side.flatten(1, 2).masked_fill(~seen[:, :, None, None], 0.0)
        for side in picked(pages.cache, block_table)
    )
    grouped = (q.float() * scale).unflatten(1, (keys.shape[2], -1))  # [B, kv_heads, shared, D]
    scores = grouped @ k.permute(0, 2, 3, 1)
    masked = ~seen[:, None, None]
    scores = scores.masked_fill(masked, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.view(1, keys.shape[2], -1, 1).expand(*scores.shape[:3], 1)], dim=-1
        )
    # The second mask turns the NaN of an empty row into zeros.
    probabilities = scores.softmax(dim=-1)[..., : masked.shape[-1]].masked_fill(masked, 0.0)
    return (probabilities @ v.transpose(1, 2)).flatten(1, 2).to(q.dtype)


def picked(cache: KeyValues, index: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values float32 [..., kv_heads, D] of what the index picks of their first
    dimension."""
    keys, values = cache[0][index], cache[1][index]
    if isinstance(cache, CodedKeys):
        return decode(keys, cache.key_scales[index]), decode(values, cache.value_scales[index])
    return keys.float(), values.float()
