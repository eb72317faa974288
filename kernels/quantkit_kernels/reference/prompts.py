"""Attention of prompts in plain torch: some queries over some keys at a time, whose results are
merged by their log-sum-exp (online softmax), so that what is in memory does not grow with the
prompt. Arithmetic is float32. Arguments arrive checked."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.codes import KeyValues, decode
from quantkit_kernels.paged import Latents, Rotation, by_slot, entries, pairs_apart, parts_of
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference.functional import rotated

_QUERIES, _KEYS = 128, 4096
"""Taken at a time."""

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""slots [S] -> keys [S, kv_heads, D] and values [S, kv_heads, E] of the tokens there."""


AttendOne = Callable[[Tensor, Tensor, int, Expand, float, int], Tensor]
"""q [t, heads, D] of the last t of the tokens at slots [S], E, expand, scale, window -> [t, heads,
E]."""


def attend_one(
    q: Tensor,
    slots: Tensor,
    width: int,
    expand: Expand,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `AttendOne`. sinks float32 [heads]: as in `gqa_decode`."""
    new, seen = q.shape[0], len(slots)
    best = q.new_full((new, q.shape[1], 1), float("-inf"), dtype=torch.float32)
    total, weighted = torch.zeros_like(best), q.new_zeros(*q.shape[:2], width, dtype=torch.float32)
    if sinks is not None:
        best, total = sinks.view(1, -1, 1).repeat(new, 1, 1), total + 1
    earliest = max(0, seen - new + 1 - window) if window else 0
    for first in range(earliest, seen, _KEYS):
        k, v = expand(slots[first : first + _KEYS])
        keys, values = (
            side.float().transpose(0, 1)[:, None] for side in (k, v)
        )  # [kv_heads, 1, S, D]
        for start in range(0, new, _QUERIES):
            stop = min(start + _QUERIES, new)
            last = min(len(k), seen - new + stop - first)  # what the newest of these sees
            if last <= 0:
                continue
            part = slice(start, stop)
            queries = (
                (q[part].float() * scale).unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
            )  # [kv_heads, shared, t, D]
            scores = queries @ keys[:, :, :last].mT
            ages = torch.arange(seen - new + start, seen - new + stop, device=q.device)[:, None]
            ages = ages - torch.arange(first, first + last, device=q.device)
            scores.masked_fill_(
                (ages < 0) | (ages >= window) if window else ages < 0, float("-inf")
            )
            top = torch.maximum(best[part], _by_token(scores.amax(dim=-1, keepdim=True)))
            base = top.masked_fill(
                top == float("-inf"), 0.0
            )  # of a token that has seen nothing yet
            weights = scores.sub_(_by_head(base, k.shape[1])).exp_()
            shrink = (best[part] - base).exp()
            total[part] = total[part] * shrink + _by_token(weights.sum(dim=-1, keepdim=True))
            weighted[part] = weighted[part] * shrink + _by_token(weights @ values[:, :, :last])
            best[part] = top
    return (weighted / total).to(q.dtype)


AT_ONCE = 4096
"""Keys up to which `attend_at_once` takes them whole."""


def attend_at_once(
    q: Tensor, slots: Tensor, width: int, expand: Expand, scale: float, window: int
) -> Tensor:
    """As `attend_one`, by torch's own attention where the keys are few: for backends whose device
    has a fused one."""
    new, seen = len(q), len(slots)
    if window or seen > AT_ONCE:
        return attend_one(q, slots, width, expand, scale, window)
    k, v = expand_heads(q, slots, expand)
    mask = (
        None
        if new == seen
        else torch.ones(new, seen, dtype=torch.bool, device=q.device).tril_(seen - new)
    )
    queries, keys, values = (side.transpose(0, 1)[None] for side in (q, k, v))
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


def expand_heads(q: Tensor, slots: Tensor, expand: Expand) -> tuple[Tensor, Tensor]:
    """Keys and values of all of q's heads, in q's dtype: shared ones repeated."""
    k, v = (
        side.to(q.dtype).repeat_interleave(q.shape[1] // side.shape[1], dim=1)
        for side in expand(slots)
    )
    return k, v


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [T, heads, D] of the last T of S tokens, k [S, kv_heads, D], v [S, kv_heads, E] -> [T,
    heads, E] of q's dtype, some queries at a time; heads that share keys in one product.

    Where keys and values differ in size, torch on a CPU makes all T x S scores and passes over them
    several times: 2.3 times as slow. Scores and probabilities are float32, as in torch's own
    attention: rounded to 16 bits they cost more than the 16-bit weights do.
    """
    keys, values = (t.transpose(0, 1).float().contiguous() for t in (k, v))
    shared, past = q.shape[1] // len(keys), len(k) - len(q)
    queries = (
        (q.float() * scale).unflatten(1, (-1, shared)).permute(1, 2, 0, 3)
    )  # [kv_heads, shared, T, D]
    step = _QUERIES if shared == 1 else _QUERIES // 2
    out = q.new_empty(len(q), q.shape[1], v.shape[-1])
    later = torch.full((step, step), -torch.inf).triu_(1)
    for start in range(0, len(q), step):
        stop = min(start + step, len(q))
        scores = queries[:, :, start:stop].flatten(1, 2) @ keys[:, : past + stop].mT
        scores.unflatten(1, (shared, -1))[..., past + start :] += later[
            : stop - start, : stop - start
        ]
        found = (scores.softmax(-1) @ values[:, : past + stop]).unflatten(1, (shared, -1))
        out[start:stop] = found.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def gqa_prefill(
    q: Tensor,
    cache: KeyValues,
    prompts: Prompts,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    own: AttendOne | None = None,
) -> Tensor:
    """own: another backend's, in place of `attend_one` where there are no sinks."""
    attend = partial(attend_one, sinks=sinks) if own is None or sinks is not None else own

    def expand(slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, *scales = (side.flatten(0, 1)[slots] for side in cache)
        return (decode(keys, scales[0]), decode(values, scales[1])) if scales else (keys, values)

    return _attend(attend, q, q.shape[2], expand, prompts, cache[0].shape[1], scale, window)


def mla_prefill(
    q: Tensor, kv_b: Tensor, rotation: Rotation, cache: Latents, prompts: Prompts, scale: float
) -> Tensor:
    return attend_expanded(
        q,
        rotated(q[..., q.shape[2] - 2 * rotation.cos.shape[1] :], rotation),
        kv_b,
        cache,
        prompts,
        scale,
        rotation.interleaved,
    )


def attend_expanded(
    q: Tensor,
    q_pe: Tensor,
    kv_b: Tensor,
    cache: Latents,
    prompts: Prompts,
    scale: float,
    interleaved: bool,
    attend_one: AttendOne = attend_one,
) -> Tensor:
    """`mla_prefill` with the rotary part of the queries rotated already, q_pe [T, heads, R].
    attend_one: another backend's."""
    heads, rows, kv_lora = kv_b.shape
    parts, flat, nope = parts_of(cache), by_slot(cache), q.shape[2] - q_pe.shape[2]
    if len(parts) == 2 and interleaved:  # the keys' channels lie so
        q_pe = pairs_apart(q_pe)

    def expand(slots: Tensor) -> tuple[Tensor, Tensor]:
        cached = entries(flat, slots).to(q.dtype)
        k_nope, v = (
            F.linear(cached[:, :kv_lora], kv_b.flatten(0, 1))
            .unflatten(-1, (heads, rows))
            .split([nope, rows - nope], dim=-1)
        )
        return torch.cat((k_nope, cached[:, None, kv_lora:].expand(-1, heads, -1)), dim=-1), v

    query = torch.cat((q[..., :nope], q_pe), dim=-1)
    return _attend(attend_one, query, rows - nope, expand, prompts, parts[0].shape[1], scale, 0)


def _attend(
    attend_one: AttendOne,
    q: Tensor,
    width: int,
    expand: Expand,
    prompts: Prompts,
    block_size: int,
    scale: float,
    window: int,
) -> Tensor:
    """q [T, heads, D] -> [T, heads, width], sequence after sequence."""
    out, row = q.new_empty(*q.shape[:2], width), 0
    for (start, length), table in zip(prompts.spans, prompts.block_table, strict=True):
        seen = torch.arange(start + length, device=q.device)
        slots = table[seen // block_size].long() * block_size + seen % block_size
        out[row : row + length] = attend_one(
            q[row : row + length], slots, width, expand, scale, window
        )
        row += length
    return out


def _by_token(x: Tensor) -> Tensor:
    """[kv_heads, shared, t, n] -> [t, heads, n]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """The inverse of `_by_token`."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
