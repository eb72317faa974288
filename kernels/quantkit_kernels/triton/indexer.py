"""Launches of indexer_kernel.py. What the kernels cannot take, float32 queries above all, the
reference computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import CodedIndexKeys, IndexKeys
from quantkit_kernels.indexer import IndexNorm, IndexPages, TopTokens
from quantkit_kernels.paged import Rotation
from quantkit_kernels.triton.attention.wgmma import boxes
from quantkit_kernels.triton.cards import architecture, multiprocessors, overlapped
from quantkit_kernels.triton.rows import power_of_two

_HALF = (torch.bfloat16, torch.float16)
_FP8 = ("sm_89", "sm_90", "sm_100", "sm_120", "interpreter")
"""Cards that multiply FP8; others multiply what codes stand for, which 16 bits hold exactly."""
_HEADS = 16
"""That a program rotates."""
_ROWS = 128
"""Heads of all its tokens that a program scores."""
_MANY, _FEW, _CODED = (128, 8, 2), (64, 4, 2), (128, 8, 1)
"""Keys of a block, warps and stages of many programs, as of prompts, and of few. Over codes a
thread of four warps has too few registers for its share of queries. On an H200 these are the
fastest of 63 for 1 and 8 tokens of 8,256 and 60,032 keys."""
_PROGRAMS = 4
"""Of few, that a multiprocessor has."""
_PARTS, _BLOCK, _STAGES, _CODED_STAGES = 4, 64, 4, 8
"""Of index_wgmma_kernel.py: partitions of a program, keys of a block, and places for blocks."""
_SETUP = 8
"""Blocks of keys that are scored in the time in which a program begins."""
_SEGMENT = 8192
"""Scores among which a program selects; those of longer texts are selected from what it left."""
_AT_ONCE = 1024
"""Scores of a segment that are written at a time."""
_SCORES = 1 << 28
"""Scores held at once, in bytes."""
Select = Callable[[Tensor, Tensor, Tensor, int, TopTokens], None]


def index_prepare(
    q: Tensor, k: Tensor, norm: IndexNorm, rotation: Rotation, cache: IndexKeys, slots: Tensor
) -> Tensor:
    from quantkit_kernels.triton.indexer_kernel import index_prepare as kernel

    (tokens, heads, width), coded = q.shape, isinstance(cache, CodedIndexKeys)
    if coded and (q.dtype not in _HALF or width < 16):
        return reference.index_prepare(q, k, norm, rotation, cache, slots)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    q, k = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k))
    keys, scales = _sides(cache)
    kernel[(tokens, -(-heads // _HEADS) + 1)](
        q, k, norm.gain, norm.gain if norm.shift is None else norm.shift,
        rotation.cos.contiguous(), rotation.sin.contiguous(), slots, out, keys, scales, heads,
        q.stride(0), q.stride(1), k.stride(0), norm.eps,
        D=width, R=2 * rotation.cos.shape[1], WIDTH=power_of_two(width), HEADS=_HEADS,
        CENTRED=norm.shift is not None, INTERLEAVED=rotation.interleaved,
        CODED=coded, num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return out


def _sides(cache: IndexKeys) -> tuple[Tensor, Tensor]:
    """Keys and their scales, codes as bytes; without codes scales are nothing."""
    if isinstance(cache, CodedIndexKeys):
        return cache.codes.view(torch.int8), cache.scales
    return cache, cache


def select_highest(
    scores: Tensor, table: Tensor, positions: Tensor, page: int, found: TopTokens
) -> None:
    """Write to `found` the highest scores float32 [T, S] of each token's columns up to its
    position; page: tokens of a page of the table."""
    from quantkit_kernels.triton.indexer_kernel import select_highest as kernel

    (tokens, width), count, columns = scores.shape, found.slots.shape[1], found.positions
    first, last = True, False
    while not last:
        last, parts = width <= _SEGMENT, -(-width // _SEGMENT)
        out_scores, out_columns = scores, found.positions
        if not last:
            out_scores = scores.new_empty(tokens, parts * count)
            out_columns = columns.new_empty(tokens, parts * count)
        segment = min(power_of_two(width), _SEGMENT)
        kernel[(tokens, parts)](
            scores, columns, table, positions, out_scores, out_columns, found.slots, found.counts,
            width, width, 0 if len(table) == 1 else table.shape[1], count,
            SEGMENT=segment, AT_ONCE=min(segment, _AT_ONCE), PAGE=page, FIRST=first, LAST=last,
            num_warps=max(1, min(segment // 512, 4)), **overlapped(scores.device),
        )  # fmt: skip
        scores, columns, width, first = out_scores, out_columns, out_scores.shape[1], False


def index_topk(
    q: Tensor,
    weights: Tensor,
    pages: IndexPages,
    positions: Tensor,
    topk: int,
    select: Select = select_highest,
) -> TopTokens:
    """As `quantkit_kernels.index_topk`. select: as `select_highest`."""
    tokens, heads, width = q.shape
    keys, size = pages.keys, _sides(pages.keys)[0].shape[1]
    fits = q.dtype in _HALF and (
        isinstance(keys, CodedIndexKeys) or (keys.dtype == q.dtype and keys.is_contiguous())
    )
    fits = fits and power_of_two(heads) == heads and 16 <= heads <= _ROWS
    fits = fits and power_of_two(width) == width and 16 <= width <= 256 and 2 * topk <= _SEGMENT
    if not fits or tokens == 0:
        return reference.index_topk(q, weights, pages, positions, topk)
    q, weights, table = q.contiguous(), weights.contiguous(), pages.block_table.contiguous()
    seen = table.shape[1] * size
    count = min(topk, seen)
    columns, slots = torch.empty(2, tokens, count, dtype=torch.int32, device=q.device)
    found = TopTokens(columns, slots, torch.empty(tokens, dtype=torch.int32, device=q.device))
    step = max(1, _SCORES // (4 * seen))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        rows = table if len(table) == 1 else table[part]
        scores = _scores(q[part], weights[part], keys, rows, positions[part])
        own = TopTokens(*(side[part] for side in found))
        select(scores, rows, positions[part], size, own)
    return found


def _scores(
    q: Tensor, weights: Tensor, cache: IndexKeys, table: Tensor, positions: Tensor
) -> Tensor:
    """float32 [T, S]; only those of tokens up to each token's own are written."""
    (tokens, heads, width), (keys, scales) = q.shape, _sides(cache)
    page, coded = keys.shape[1], isinstance(cache, CodedIndexKeys)
    seen = table.shape[1] * page
    scores = torch.empty(tokens, seen, dtype=torch.float32, device=q.device)
    together = min(max(1, _ROWS // heads), power_of_two(tokens)) if len(table) == 1 else 1
    programs = -(-tokens // together)
    if (
        architecture(q.device) == "sm_90"
        and len(table) == 1
        and programs >= multiprocessors(q.device)
        and page % _BLOCK == 0
        and width in (64, 128)
    ):
        _score_prompts(q, weights, cache, table, positions, scores)
        return scores
    from quantkit_kernels.triton.indexer_kernel import index_scores as kernel

    many = programs >= multiprocessors(q.device)
    block, warps, stages = _CODED if coded else _MANY if many else _FEW
    splits = max(1, min(_PROGRAMS * multiprocessors(q.device) // programs, -(-seen // block)))
    fp8 = coded and architecture(q.device) in _FP8 and width >= 32  # of an instruction
    kernel[(programs, splits)](
        q, weights, keys, scales, table, positions, scores, tokens,
        0 if len(table) == 1 else table.shape[1], table.shape[1], seen,
        H=heads, D=width, TOKENS=together, PAGE=page, KEYS=block, STAGES=stages,
        CODED=coded, FP8=fp8, num_warps=warps, **overlapped(q.device),
    )  # fmt: skip
    return scores


def _score_prompts(
    q: Tensor, weights: Tensor, cache: IndexKeys, table: Tensor, positions: Tensor, scores: Tensor
) -> None:
    """`_scores` of many tokens of one sequence, on Hopper."""
    from quantkit_kernels.triton.index_wgmma_kernel import prompt_scores as kernel

    (tokens, heads, width), coded = q.shape, isinstance(cache, CodedIndexKeys)
    keys, scales = cache if isinstance(cache, CodedIndexKeys) else (cache, scores)
    programs, blocks = -(-tokens * heads // (_ROWS * _PARTS)), scores.shape[1] // _BLOCK

    def waves(splits: int) -> int:
        return -(-programs * splits // multiprocessors(q.device))

    splits = min(range(1, 17), key=lambda count: waves(count) * (blocks / count + _SETUP))
    kernel[(splits, programs)](
        q, weights, boxes(keys.flatten(0, 1), _BLOCK, width),
        boxes(scales.flatten(), _BLOCK) if coded else scores,
        table, positions, scores, tokens, table.shape[1], scores.shape[1],
        H=heads, D=width, PAGE=keys.shape[1], STAGES=_CODED_STAGES if coded else _STAGES,
        CODED=coded, num_warps=4, **overlapped(q.device),
    )  # fmt: skip


def selected_bits(selected: TopTokens, seen: int) -> Tensor:
    """Which of the first `seen` tokens of its sequence each token attends to: bit t % 32 of word t
    // 32 of int32 [T, words], whole blocks of 128 tokens."""
    from quantkit_kernels.triton.indexer_kernel import set_bits

    positions, _, counts = selected
    tokens, count = positions.shape
    words = torch.zeros(tokens, -(-seen // 128) * 4, dtype=torch.int32, device=positions.device)
    set_bits[(tokens,)](
        positions, counts, words, count, words.shape[1], WIDTH=power_of_two(count), num_warps=4
    )
    return words
