"""Routed experts of few tokens in 4 bits, in two launches: one computes both products, the other
sums over each token's experts, or the norm after them does."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import FusedExpertsParams, Matrix
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.experts.sum_pairs import add_up
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, checked, stream_of
from quantkit_kernels.cuda.layout import PackedStrips, pointers
from quantkit_kernels.pairs import UnsummedPairs
from quantkit_kernels.workspace import workspace

_LIST_BYTES = 7 << 10
"""What a block of fused_experts.cu has for its lists (kListBytes)."""
_DONE_STRIDE = 16
"""Ints from one entry's counter to the next (kDoneStride); the first is of strips that were
claimed."""


def max_pairs(num_experts: int) -> int:
    """The most token-expert pairs whose lists fit in a block's memory, however the pairs are
    spread.

    A pair takes 2 bytes, an entry of up to 8 pairs takes 4.
    """
    room = _LIST_BYTES - 4
    return max(room // 6, (room - 4 * num_experts) * 2 // 5)


def fused_experts(
    gate_up: PackedStrips,
    down: PackedStrips,
    kind: str,
    group: int,
    num_experts: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    token_tiles: int,
    limit: float = 0.0,
) -> UnsummedPairs:
    """What `Experts` computes of x[T, H], topk_ids[T, k] and topk_weights[T, k] float32, all
    contiguous, by weights packed per expert, before the sum; pairs of NO_EXPERT are whatever lies
    there.

    At most `max_pairs(num_experts)` pairs of at most MAX_EXPERTS experts. token_tiles (1 or 2): an
    entry has up to 8 * token_tiles tokens of one expert, which are multiplied at once. limit: as of
    `Gating`, 0 for none.
    """
    pairs, hidden = topk_ids.numel(), x.shape[1]
    intermediate = gate_up.row_scale.numel() // num_experts // 2
    between = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    weighed = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    done = workspace(x.device, 0)[1][: (1 + min(pairs, num_experts + pairs // 8)) * _DONE_STRIDE]
    params = FusedExpertsParams(
        gate_up=Matrix(**pointers(gate_up), n=2 * intermediate, k=hidden),
        down=Matrix(**pointers(down), n=hidden, k=intermediate),
        x=x.data_ptr(),
        between=between.data_ptr(),
        out=weighed.data_ptr(),
        ids=topk_ids.data_ptr(),
        pair_weights=topk_weights.data_ptr(),
        done=done.data_ptr(),
        ids_stride=topk_ids.element_size() // 4,
        pairs=pairs,
        top_k=topk_ids.shape[1],
        experts=num_experts,
        limit=limit,
    )
    layout = (FORMATS[kind], DTYPES[x.dtype], group)
    checked(
        library().qk_fused_experts(ctypes.byref(params), *layout, token_tiles, stream_of(x.device))
    )
    return UnsummedPairs(weighed, len(x), x.dtype, done, add_up)
