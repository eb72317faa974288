"""The operators of quantkit_kernels.functional in one launch each. Arguments arrive checked; what the kernels cannot take, unusual types or
widths, the reference computes."""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of

_LOGIT_DTYPES = {**DTYPES, torch.float32: 2}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _normable(x, weight):
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    normed = torch.empty_like(x)
    _norm(x, None, weight, normed, None, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _normable(x, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, normed, total, eps)
    return normed, total


def _normable(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in DTYPES and weight.dtype == x.dtype and x.shape[-1] % 8 == 0 and x.numel() > 0


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor | None, eps: float) -> None:
    width = x.shape[-1]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (x, residual, weight.contiguous(), normed, total)]
    checked(library().qk_add_rms_norm(*pointers, DTYPES[x.dtype], x.numel() // width, width, eps, stream_of(x.device)))


def silu_and_mul(x: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    if x.dtype not in DTYPES or width % 8 or x.numel() == 0:
        return reference.silu_and_mul(x)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], width)
    checked(library().qk_silu_and_mul(x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], y.numel() // width, width, stream_of(x.device)))
    return y


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    if experts > 4096 or top_k > 32 or n_group > 32 or tokens == 0:
        return reference.route(logits, bias, top_k, n_group, topk_group, scoring, norm_topk_prob, routed_scaling_factor)
    logits = logits.contiguous()
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    checked(
        library().qk_route(
            logits.data_ptr(),
            None if bias is None else bias.contiguous().data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            *(_LOGIT_DTYPES[logits.dtype], tokens, experts, top_k, n_group, topk_group),
            *(scoring == "softmax", norm_topk_prob, routed_scaling_factor, stream_of(logits.device)),
        )
    )
    return ids, weights


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.dtype not in DTYPES or x.numel() == 0:
        return reference.rope(x, positions, cos, sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, width = x.shape
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    pointers = [tensor.data_ptr() for tensor in (x, positions.contiguous(), cos.contiguous(), sin.contiguous(), y)]
    wide = positions.dtype == torch.int64
    sizes = (tokens, heads, width // 2, x.stride(0), x.stride(1))
    checked(library().qk_rope(*pointers, DTYPES[x.dtype], wide, *sizes, stream_of(x.device)))
    return y
