"""Attention over a window and compressed KV entries (quantkit_kernels/compressed.py) in plain
torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels.compressed import (
    ChosenEntries,
    EntryPages,
    EntryPool,
    HeadNorm,
    RecentTokens,
)
from quantkit_kernels.paged import Rotation
from quantkit_kernels.reference.functional import rotated

_READ = 1 << 24
"""Values gathered at once."""


def rotate_heads(x: Tensor, rotation: Rotation, norm: HeadNorm | None, back: bool) -> Tensor:
    if norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        x = (wide if norm.gain is None else wide * norm.gain.float()).to(x.dtype)
    width = 2 * rotation.cos.shape[1]
    by = rotation._replace(sin=-rotation.sin) if back else rotation
    return torch.cat((x[..., :-width], rotated(x[..., -width:], by)), dim=-1)


def rotate_queries(
    q: Tensor, key: Tensor, rotation: Rotation, norm: HeadNorm | None, key_norm: HeadNorm
) -> tuple[Tensor, Tensor]:
    keys = rotate_heads(key[:, None], rotation, key_norm, False)[:, 0]
    return rotate_heads(q, rotation, norm, False), keys


def store_recent(
    x: Tensor, rings: Tensor, ends: Tensor, places: Tensor, positions: Tensor
) -> Tensor:
    which, length = (ends[1, places] > ends[0, places]).long(), rings.shape[2]
    rings[which, places, positions % length] = x.to(rings.dtype)
    ends[which, places] = positions + 1
    # A tensor, because captures do not take numbers of the host.
    ends[1 - which, places] = torch.full_like(positions, -1)
    return (which * rings.shape[1] + places) * length


def pool_entries(
    raw: RecentTokens, positions: Tensor, pools: Sequence[EntryPool], rotation: Rotation
) -> None:
    rate, reach = pools[0].pages.rate, pools[0].reach
    numbers, step = positions // rate, torch.arange(reach, device=positions.device)
    at = (numbers[:, None] + 1) * rate - reach + step
    tokens = raw.kv[raw.first[:, None] + at % raw.period].float()
    parts = tokens.split([2 * pool.bias.shape[1] for pool in pools], dim=-1)
    for pool, (values, weights) in zip(pools, (part.chunk(2, dim=-1) for part in parts)):
        dim, ends = pool.pages.kv.shape[1], (positions + 1) % rate == 0
        weights = weights + pool.bias.repeat(reach // rate, 1)
        if pool.overlap:
            values, weights = (
                torch.cat((one[:, :rate, :dim], one[:, rate:, dim:]), dim=1)
                for one in (values, weights)
            )
        before = (at < 0)[..., None]  # the first group has no tokens before it
        shares = weights.masked_fill(before, -torch.inf).softmax(dim=1)
        pooled = (shares * values.masked_fill(before, 0.0)).sum(dim=1).to(raw.kv.dtype)
        if pool.gain is not None:
            norm = HeadNorm(pool.gain, pool.eps)
            pooled = rotate_heads(pooled[:, None], rotation, norm, False)[:, 0]
        rows = pool.pages.rows(numbers[:, None])[:, 0].where(ends, 0)
        pool.pages.kv[rows] = pooled


def compressed_attend(
    q: Tensor,
    positions: Tensor,
    recent: RecentTokens,
    pages: EntryPages | None,
    chosen: ChosenEntries | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    count = recent.window + (
        0 if pages is None else pages.most if chosen is None else chosen.rows.shape[1]
    )
    step, out = max(1, _READ // (count * max(q.shape[1:]))), []
    back = torch.arange(recent.window - 1, -1, -1, device=q.device)
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        at = positions[part, None] - back
        keys = [recent.kv[recent.first[part, None] + at % recent.period]]
        seen = [at >= 0]
        if pages is not None:
            own = pages if len(pages.table) == 1 else pages._replace(table=pages.table[part])
            rows, there = _entries(
                positions[part], own, chosen and ChosenEntries(*(one[part] for one in chosen))
            )
            keys.append(pages.kv[rows])
            seen.append(there)
        mask = torch.cat(seen, dim=1)
        # A row that was never written may hold NaN, which a weight of 0 would not remove.
        read = torch.cat(keys, dim=1).float().masked_fill_(~mask[..., None], 0.0)
        scores = (q[part].float() @ read.mT * scale).masked_fill(~mask[:, None], -torch.inf)
        sunk = torch.cat((scores, sinks.expand(len(scores), -1)[..., None]), dim=-1)
        out.append((sunk.softmax(dim=-1)[..., :-1] @ read).to(q.dtype))
    return torch.cat(out) if out else q


def _entries(
    positions: Tensor, pages: EntryPages, chosen: ChosenEntries | None
) -> tuple[Tensor, Tensor]:
    """Rows int64 [T, E] of pages.kv, and which of them each token reads."""
    if chosen is not None:
        number = torch.arange(chosen.rows.shape[1], device=positions.device)
        return chosen.rows.long(), number < chosen.counts[:, None]
    number = torch.arange(pages.most, device=positions.device).expand(len(positions), -1)
    return pages.rows(number), number < (positions[:, None] + 1) // pages.rate
