"""What a launch of the kernels in stream_gemm.cu needs besides tensors: the shape of the grid, and a workspace for sums across blocks."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import Params, library

FORMATS = {"int4": 0, "fp4": 1, "int8": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
STORE, SILU_MUL, WEIGH = range(3)
_WARP_ROWS = 32
_BLOCK_STEPS = 8  # warps of a block
_SLOTS = 2 * 132  # blocks resident on an H200

_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}
_retired: list[Tensor] = []


@dataclass(frozen=True)
class Plan:
    """token_tiles: of 8 tokens, per block (1, 2 or 4). wn: warps of a block side by side along N, 32 rows each. split: blocks along K."""

    token_tiles: int
    wn: int
    split: int


def plan(rows: int, steps: int, tokens: int) -> Plan:
    """A grid that fills the device without giving a warp less than two steps of 64 along K."""
    token_tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    groups = -(-tokens // (8 * token_tiles))
    wn = 2
    blocks = rows // (_WARP_ROWS * wn) * groups
    split = max(1, min(round(_SLOTS / blocks), steps * wn // (2 * _BLOCK_STEPS)))
    return Plan(token_tiles, wn, split)


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
    stream = torch.cuda.current_stream(device).cuda_stream
    checked(library().qk_stream_gemm(ctypes.byref(params), FORMATS[kind], DTYPES[dtype], group, plan.token_tiles, grid_y, stream))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantkit_kernels.quantize_rows` in one launch; the scale comes as [M]."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    checked(library().qk_quantize_rows(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), DTYPES[x.dtype], x.shape[0], x.shape[1], stream))
    return codes, scale


def checked(error: int) -> None:
    assert error == 0, f"CUDA error {error} at launch"
