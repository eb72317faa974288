"""Norms, activation, routing and rotary embedding in one launch each. Arguments arrive checked;
what the kernels cannot take, unusual types or widths, the Triton backend's compute."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.cuda.abi import RouteParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of
from quantkit_kernels.routing import Routing
from quantkit_kernels.triton import operators as triton
from quantkit_kernels.triton.operators import GATE_TOKENS, cut_in_three, few_logits
from quantkit_kernels.workspace import room_for_sums

_LOGIT_DTYPES = {**DTYPES, torch.float32: 2}
_GATE_EXPERTS, _GATE_TOKENS, _GATE_PARTS = 256, 64, 8  # of the kernel that also multiplies
_TENSOR_CORE_TOKENS = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _normable(x, weight):
        return triton.rms_norm(x, weight, eps)
    x = x.contiguous()
    normed = torch.empty_like(x)
    _norm(x, None, weight, normed, None, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _normable(x, weight):
        return triton.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, normed, total, eps)
    return normed, total


def _normable(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in DTYPES and weight.dtype == x.dtype and x.shape[-1] % 8 == 0 and x.numel() > 0


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    width = x.shape[-1]
    pointers = [
        None if tensor is None else tensor.data_ptr()
        for tensor in (x, residual, weight.contiguous(), normed, total)
    ]
    checked(
        library().qk_add_rms_norm(
            *pointers, DTYPES[x.dtype], x.numel() // width, width, eps, stream_of(x.device)
        )
    )


def silu_and_mul(x: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    if x.dtype not in DTYPES or width % 8 or x.numel() == 0:
        return triton.silu_and_mul(x)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], width)
    checked(
        library().qk_silu_and_mul(
            x.data_ptr(),
            y.data_ptr(),
            DTYPES[x.dtype],
            y.numel() // width,
            width,
            stream_of(x.device),
        )
    )
    return y


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    if tokens == 0 or not _routable(routing):
        return triton.route(logits, bias, routing)
    logits = logits.contiguous()
    ids, weights, params = _results_and_params(tokens, bias, routing, logits.device)
    checked(
        library().qk_route(
            logits.data_ptr(),
            _LOGIT_DTYPES[logits.dtype],
            tokens,
            ctypes.byref(params),
            stream_of(logits.device),
        )
    )
    return ids, weights


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    (tokens, hidden), experts = x.shape, router.shape[0]
    fits = (
        x.dtype == torch.bfloat16
        and hidden % 16 == 0
        and hidden <= 8192
        and experts == _GATE_EXPERTS
        and _routable(routing)
    )
    if not fits or not 0 < tokens <= _GATE_TOKENS:
        return route(float32_linear(x, router), bias, routing)
    x, router = x.contiguous(), router.contiguous()
    ids, weights, params = _results_and_params(tokens, bias, routing, x.device)
    sums = room_for_sums(x.device, _GATE_PARTS * tokens * experts)
    pointers = (sums.data_ptr(), ctypes.byref(params), stream_of(x.device))
    checked(library().qk_moe_gate(x.data_ptr(), router.data_ptr(), tokens, hidden, *pointers))
    return ids, weights


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Few and many tokens go by the tensor cores: three numbers of bfloat16 add up to one of
    float32 to its last bit."""
    if x.dtype == torch.bfloat16 and 0 < x.shape[0] <= GATE_TOKENS:
        return few_logits(x, weight)
    if x.dtype != torch.bfloat16 or x.shape[0] < _TENSOR_CORE_TOKENS:
        return F.linear(x.float(), weight)
    # Without a multiple of 8, as of 513 logits, cuBLAS takes a kernel of Turing: 7 times as long.
    rows = len(weight)
    if rows % 8:
        weight = F.pad(weight, (0, 0, 0, -rows % 8))
    cut = cut_in_three(weight)
    products = torch.mm(x, cut.flatten(0, 1).T, out_dtype=torch.float32)
    return products.unflatten(1, (3, -1))[..., :rows].sum(dim=1)


def _routable(routing: Routing) -> bool:
    """Whether a warp can choose, by a common rule: a lane holds neighbouring experts, and a group is 1, 2, 4, ...
    whole lanes."""
    experts = routing.n_routed_experts
    per_lane = -(-experts // 32)
    lanes, rest = divmod(experts // routing.n_group, per_lane)
    grouped = routing.topk_group == routing.n_group or (rest == 0 and lanes & (lanes - 1) == 0)
    return routing.is_common and experts <= 512 and routing.columns <= 32 and grouped


def _results_and_params(
    tokens: int, bias: Tensor | None, routing: Routing, device: torch.device
) -> tuple[Tensor, Tensor, RouteParams]:
    """Room for ids and weights, and the kernels' arguments. The caller keeps `bias` alive."""
    ids = torch.empty(tokens, routing.columns, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, routing.columns, dtype=torch.float32, device=device)
    assert bias is None or bias.is_contiguous()
    params = RouteParams(
        bias=None if bias is None else bias.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        n_routed_experts=routing.n_routed_experts,
        num_experts_per_tok=routing.num_experts_per_tok,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        softmax=routing.scoring_func == "softmax",
        norm_topk_prob=routing.norm_topk_prob,
        num_joined_experts=routing.num_joined_experts,
        routed_scaling_factor=routing.routed_scaling_factor,
    )
    return ids, weights, params


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if x.dtype not in DTYPES or x.numel() == 0:
        return triton.rope(x, positions, cos, sin, interleaved)
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, width = x.shape
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    pointers = [
        tensor.data_ptr()
        for tensor in (x, positions.contiguous(), cos.contiguous(), sin.contiguous(), y)
    ]
    wide = positions.dtype == torch.int64
    sizes = (tokens, heads, width // 2, interleaved, x.stride(0), x.stride(1))
    checked(library().qk_rope(*pointers, DTYPES[x.dtype], wide, *sizes, stream_of(x.device)))
    return y
