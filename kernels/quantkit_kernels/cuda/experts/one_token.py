"""The experts of one token in 4 bits, in two launches: one computes both products, the other sums over its experts."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import GemmParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.experts.sum_pairs import sum_pairs
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, SILU_MUL, WEIGH, checked, stream_of
from quantkit_kernels.cuda.layout import PackedStrips, pointers
from quantkit_kernels.cuda.plans import OneTokenPlan
from quantkit_kernels.workspace import workspace

_DONE_STRIDE = 16
"""Ints from one pair's counter to the next (kDoneStride)."""


def one_token(
    gate_up: PackedStrips,
    down: PackedStrips,
    kind: str,
    group: int,
    num_experts: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    plan: OneTokenPlan,
) -> Tensor:
    """What `Experts` computes of x[1, H], topk_ids[1, k] and topk_weights[1, k] float32, all contiguous, by weights packed per expert.
    No id may be NO_EXPERT."""
    pairs, hidden = topk_ids.numel(), x.shape[1]
    intermediate = gate_up.row_scale.numel() // num_experts // 2
    between = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    weighed = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)

    def product(packed: PackedStrips, source: Tensor, out: Tensor, epilogue: int, wn: int, split: int) -> GemmParams:
        return GemmParams(
            **pointers(packed),
            x=source.data_ptr(),
            out=out.data_ptr(),
            ids=topk_ids.data_ptr(),
            ids_stride=topk_ids.element_size() // 4,
            pair_weights=topk_weights.data_ptr(),
            pairs=pairs,
            m=1,
            n=packed.row_scale.numel() // num_experts,
            k=source.shape[1],
            out_n=out.shape[1],
            epilogue=epilogue,
            wn=wn,
            split=split,
        )

    first = product(gate_up, x, between, SILU_MUL, plan.wn, plan.split)
    second = product(down, between, weighed, WEIGH, plan.down_wn, 1)
    done = workspace(x.device, 0)[1][: pairs * _DONE_STRIDE]
    layout = (FORMATS[kind], DTYPES[x.dtype], group)
    checked(library().qk_one_token(ctypes.byref(first), ctypes.byref(second), done.data_ptr(), *layout, stream_of(x.device)))
    y = torch.empty_like(x)
    sum_pairs(weighed, y, None, done)
    return y
