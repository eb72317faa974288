"""What a launch of the kernels in stream_gemm.cu needs besides tensors: the shape of the grid, and a workspace for sums across blocks."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import Params, library

FORMATS = {"int4": 0, "fp4": 1, "int8": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}
STORE, SILU_MUL, WEIGH = range(3)
_WARPS = 8  # of a block
_SLOTS = 2 * 132  # blocks resident on an H200

_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}
_retired: list[Tensor] = []


@dataclass(frozen=True)
class Plan:
    """token_tiles: of 8 tokens, per block (1, 2 or 4). row_tiles: of 16 rows, per warp: 2 or 4 with one token tile, 4
    with two, 2 with four. wn: warps of a block side by side along N.
    split: blocks along K."""

    token_tiles: int
    row_tiles: int
    wn: int
    split: int


def plan(rows: int, k: int, tokens: int) -> Plan:
    """A grid that fills the device and gives every warp of a block at least one chunk of 128 along K."""
    token_tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    chunks = k // 128
    row_tiles = {1: 4 if rows // 64 >= _SLOTS else 2, 2: 4, 4: 2}[token_tiles]
    wn = 2 if chunks < 2 * _WARPS and rows % (32 * row_tiles) == 0 else 1
    blocks = rows // (16 * row_tiles * wn) * -(-tokens // (8 * token_tiles))
    split = max(1, min(_SLOTS // blocks, chunks * wn // _WARPS))
    return Plan(token_tiles, row_tiles, wn, split)


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
    checked(library().qk_stream_gemm(ctypes.byref(params), FORMATS[kind], DTYPES[dtype], group, plan.token_tiles, plan.row_tiles, grid_y, stream))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantkit_kernels.quantize_rows` in one launch; the scale comes as [M]."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    checked(library().qk_quantize_rows(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), DTYPES[x.dtype], x.shape[0], x.shape[1], stream))
    return codes, scale


def checked(error: int) -> None:
    assert error == 0, f"CUDA error {error} at launch"
