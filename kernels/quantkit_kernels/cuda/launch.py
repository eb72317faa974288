"""What a launch of the kernels needs besides tensors: the stream, and a workspace for sums across blocks."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import Params, library
from quantkit_kernels.cuda.plans import Plan, WidePlan

FORMATS = {"int4": 0, "fp4": 1, "int8": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
STORE, SILU_MUL, WEIGH = range(3)

_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}
_retired: list[Tensor] = []


def workspace(device: torch.device, floats: int) -> tuple[Tensor, Tensor]:
    """Room for partial sums, and counters that every launch leaves at zero. Launches of one device must be on one stream at a time.

    A workspace that was outgrown is kept: captured graphs may hold its address.
    """
    have = _workspaces.get(device)
    if have is None or have[0].numel() < floats:
        if have is not None:
            _retired.extend(have)
        room = max(floats, 1 << 22)
        _workspaces[device] = have = (
            torch.empty(room, dtype=torch.float32, device=device),
            torch.zeros(1 << 16, dtype=torch.int32, device=device),
        )
    return have


def stream_gemm(params: Params, kind: str, dtype: torch.dtype, group: int, plan: Plan, grid_y: int, device: torch.device) -> None:
    if plan.split > 1:
        floats = params.n * plan.split * 8 * plan.token_tiles * grid_y
        partial, arrived = workspace(device, floats)
        params.partial, params.arrived = partial.data_ptr(), arrived.data_ptr()
    params.wn, params.split = plan.wn, plan.split
    shape = (plan.token_tiles, plan.row_tiles, plan.bulk, grid_y)
    checked(library().qk_stream_gemm(ctypes.byref(params), FORMATS[kind], DTYPES[dtype], group, *shape, stream_of(device)))


def wide_gemm(params: Params, kind: str, dtype: torch.dtype, group: int, plan: WidePlan, device: torch.device) -> None:
    params.wn, params.split = plan.wn, plan.split
    layout = (FORMATS[kind], DTYPES[dtype], group)
    checked(library().qk_wide_gemm(ctypes.byref(params), *layout, plan.token_tiles, stream_of(device)))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantkit_kernels.quantize_rows` in one launch; the scale comes as [M]."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    checked(library().qk_quantize_rows(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), DTYPES[x.dtype], x.shape[0], x.shape[1], stream))
    return codes, scale


def sum_pairs(weighed: Tensor, y: Tensor, counters: Tensor | None = None) -> None:
    """y[T, H] = the sum of weighed float32 [T * k, H] over each token's pairs. `counters` int32 are zero afterwards."""
    sizes = (y.shape[0], weighed.shape[0] // y.shape[0], y.shape[1])
    cleared = (None, 0) if counters is None else (counters.data_ptr(), counters.numel())
    checked(library().qk_sum_pairs(weighed.data_ptr(), y.data_ptr(), DTYPES[y.dtype], *sizes, *cleared, stream_of(y.device)))


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def checked(error: int) -> None:
    assert error == 0, f"CUDA error {error} at launch"
