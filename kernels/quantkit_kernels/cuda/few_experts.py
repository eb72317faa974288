"""Routed experts in 4 bits for few tokens: two launches, both products in one and the sum over each token's experts."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import ExpertsParams, Matrix, library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, checked, stream_of, sum_pairs, workspace
from quantkit_kernels.cuda.layout import Packed

# Of stream_experts.cu: room for its lists in bytes, and ints from one entry's counter to the next.
_LIST_BYTES = 7 << 10
_DONE_STRIDE = 16


def max_pairs(num_experts: int) -> int:
    """Token-expert pairs whose lists fit in a block's memory, however they are spread: 2 bytes a pair, 4 an entry of up to 8 of them."""
    room = _LIST_BYTES - 4
    return max(room // 6, (room - 4 * num_experts) * 2 // 5)


def few_tokens_experts(
    gate_up: Packed,
    down: Packed,
    kind: str,
    group: int,
    num_experts: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    token_tiles: int,
) -> Tensor:
    """What `Experts` computes of x[T, H], topk_ids[T, k] and topk_weights[T, k] float32, all contiguous, by weights packed per expert.

    At most `max_pairs(num_experts)` pairs of at most MAX_EXPERTS experts. token_tiles: of 8 of an expert's tokens, that are multiplied at
    once (1 or 2).
    """
    pairs, hidden = topk_ids.numel(), x.shape[1]
    intermediate = gate_up.row_scale.numel() // num_experts // 2
    between = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    weighed = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    done = workspace(x.device, 0)[1][: min(pairs, num_experts + pairs // 8) * _DONE_STRIDE]
    params = ExpertsParams(
        gate_up=_matrix(gate_up, 2 * intermediate, hidden),
        down=_matrix(down, hidden, intermediate),
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
    )
    layout = (FORMATS[kind], DTYPES[x.dtype], group)
    checked(library().qk_stream_experts(ctypes.byref(params), *layout, token_tiles, stream_of(x.device)))
    y = torch.empty_like(x)
    sum_pairs(weighed, y, done)
    return y


def _matrix(packed: Packed, n: int, k: int) -> Matrix:
    pointers = {name: tensor.data_ptr() for name, tensor in packed._asdict().items() if tensor is not None}
    return Matrix(**pointers, n=n, k=k)
