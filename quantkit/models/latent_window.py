"""Latent attention over part of the tokens, a window or those selected by an indexer, and over
learned tokens that all tokens see, or with a learned score that takes part of each head's weight.

Absorbed form in plain torch on every device: queries are projected to the latent space, and cached
latents are read directly. Symbols: T tokens, S tokens read, n learned tokens, L kv_lora_rank, R
rotary channels, N and V channels of a head's keys and values.
"""

from typing import NamedTuple

import torch
from quantkit_kernels import Latents
from quantkit_kernels.paged import by_slot, entries
from torch import Tensor

from quantkit.models.rope import Rope

_SCORES = 1 << 24
"""Scores, gathered values and heads' latents held at once."""


class LatentWindow(NamedTuple):
    """One layer's parameters. kv_b [heads, N + V, L]; sinks [n, L + R]: learned latents and keys
    that all tokens see, in cache layout; topk: number of tokens that the layer's indexer selects,
    else 0; window: tokens that each sees, itself included, 0 for all; lost float32 [heads]: score
    of a virtual token without a value."""

    kv_b: Tensor
    rope: Rope
    scale: float
    sinks: Tensor
    topk: int = 0
    window: int = 0
    lost: Tensor | None = None


class VisibleTokens(NamedTuple):
    """Tokens read by T tokens: slots int64 [S] shared by all or [T, S] per token, in a cache with
    consecutive blocks; mask bool [T, S]: which of them each token sees."""

    slots: Tensor
    mask: Tensor


def window_mask(positions: Tensor, at: Tensor, window: int) -> Tensor:
    """Which of the tokens at positions `at` int64 [S] or [T, S] are seen from positions [T], bool
    [T, S]: up to themselves, and at most `window` of them; 0 for all."""
    distance = positions[:, None] - at
    seen = (distance >= 0) & (at >= 0)
    return seen & (distance < window) if window else seen


def attend_latent_window(
    q: Tensor, cache: Latents, seen: VisibleTokens, attention: LatentWindow
) -> Tensor:
    """q [T, heads, N + R], its rotary part rotated -> [T, heads, V]."""
    flat, sinks, latent = by_slot(cache), attention.sinks.to(q.dtype), attention.kv_b.shape[2]
    nope = q.shape[2] - attention.rope.dim
    keys_up, values_up = attention.kv_b[:, :nope], attention.kv_b[:, nope:]
    own = seen.slots.dim() == 2
    widest = max(q.shape[1], sinks.shape[1] if own else 1)
    columns = max(seen.mask.shape[1] + len(sinks), sinks.shape[1])
    step, out = max(1, _SCORES // (columns * widest)), []
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        mask = seen.mask[part]
        read = entries(flat, seen.slots[part] if own else seen.slots).to(q.dtype)
        # A slot that was never written may hold NaN, which a weight of 0 would not remove.
        read.masked_fill_(~(mask if own else mask.any(dim=0))[..., None], 0)
        keys = torch.cat((sinks.expand(*read.shape[:-2], -1, -1), read), dim=-2)
        plain = (q[part, :, :nope].transpose(0, 1) @ keys_up).transpose(0, 1)
        queries = torch.cat((plain, q[part, :, nope:]), dim=-1)
        scores = (queries @ keys.mT).float() * attention.scale
        scores[..., len(sinks) :].masked_fill_(~mask[:, None], -torch.inf)
        if attention.lost is not None:
            lost = attention.lost[:, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, lost), dim=-1)
        shares = scores.softmax(dim=-1)[..., : keys.shape[-2]].to(q.dtype)
        summed = shares @ keys[..., :latent]
        out.append((summed.transpose(0, 1) @ values_up.mT).transpose(0, 1))
    return torch.cat(out)
