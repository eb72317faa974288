"""A launch of wgmma_kernel.py, for what it takes: keys in pages of 64 tokens or a multiple, or row
by row."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.prompts import Prompts
from quantkit_kernels.triton.cards import architecture, multiprocessors, shared_bytes

_BOX = 64
"""Tokens of a page that are copied at once."""
_QUERIES = 128
"""Of a program."""
_WARPS = 4
"""Of a partition of queries."""
_LEAST_WINDOW = 512
"""With 128 tokens the Triton kernel is 1 to 4 % faster, with 1024 this one 1.35 to 1.45 times as
fast; none between was measured."""
_BARRIERS = 1024
"""Bytes in addition to the tiles, rounded up."""
_TOGETHER = 8
"""Heads that are computed at a time, so that programs at work share what the last cache holds."""


class WgmmaCut(NamedTuple):
    """keys: of a block; stages: places for blocks of keys, and of values; turns: whether the
    partitions issue products in turns."""

    keys: int
    stages: int
    turns: bool


_CUTS = (WgmmaCut(128, 2, False), WgmmaCut(64, 2, True))
"""With turns the first is 1 to 2 % slower over latents; without them the second was not
measured."""
_NARROW = WgmmaCut(128, 2, False)
"""Of keys and values of 64 numbers at most: two programs fit a multiprocessor."""


def wgmma_cut(
    device: torch.device, width: int, rotary: int, value: int, page: int, window: int
) -> WgmmaCut | None:
    """What was fastest on an H200, for keys of `width` and `rotary` numbers and values of `value`,
    padded to powers of two; None: the launch is prefill_kernel.py's. page: tokens of a page, or 0.
    window: as of `gqa_prefill`."""
    if architecture(device) != "sm_90" or page % _BOX or 0 < window < _LEAST_WINDOW:
        return None
    if max(width + rotary, value) <= 64:
        return _NARROW
    room = shared_bytes("sm_90") - _BARRIERS
    return next((cut for cut in _CUTS if _tile_bytes(cut, width + rotary, value) <= room), None)


def _tile_bytes(cut: WgmmaCut, key: int, value: int) -> int:
    return 2 * (_QUERIES * key + cut.stages * cut.keys * (key + value))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    prompts: Prompts,
    scale: float,
    width: int,
    cut: WgmmaCut,
    **given: Any,
) -> None:
    """As `_launch` of prefill.py. scale: times log2(e)."""
    page, rotary = given["PAGE"], given["R"]
    box = min(cut.keys, _BOX) if page else cut.keys
    tiles, heads, sequences = -(-prompts.longest // _QUERIES), q.shape[1], len(prompts.spans)
    few = tiles * heads * sequences <= 2 * multiprocessors(
        q.device
    )  # then the longest of all heads come first
    _kernel()[(tiles * heads, sequences)](
        q, given["q_pe"], boxes(_rows(keys), box, given["D_PADDED"]), boxes(given["k_pe"], box, rotary) if rotary else given["k_pe"],
        boxes(_rows(values), box, given["V_PADDED"]), given["sinks"], out, given["lse"], prompts.starts, prompts.seq_lens, given["table"],
        given["firsts"], given["lasts"], given["key_rows"], q.stride(0), q.stride(1), given["pe_token"], given["k_head"], given["v_head"],
        given["table_width"], heads, given["SHARED"], heads if few else min(_TOGETHER, heads), tiles, scale, given["window"],
        given["words"], given["word_row"],
        D=width, D_PADDED=given["D_PADDED"], R=rotary, V=given["V"], V_PADDED=given["V_PADDED"], PAGE=page,
        WINDOWED=given["window"] > 0, SUNK=given["SUNK"], SELECTED=given["word_row"] > 0, BN=cut.keys, BOX=box, STAGES=cut.stages,
        TURNS=cut.turns, num_warps=_WARPS,
    )  # fmt: skip


def _rows(side: Tensor) -> Tensor:
    """Keys or values of pages, of tokens and heads, or of tokens: a row a token."""
    return side.flatten(0, -3).flatten(1) if side.dim() > 2 else side


def boxes(side: Tensor, *box: int) -> Any:
    """side, as TMA copies boxes of it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(box, side.dtype)
    return TensorDescriptor(side, list(side.shape), list(side.stride()), list(box), layout)


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Of a box in shared memory. Triton takes longer to make it than to launch a kernel."""
    from triton.experimental.gluon import language as gl

    types = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }
    return gl.NVMMASharedLayout.get_default_for(list(box), types[dtype])


@functools.cache
def _kernel() -> Any:
    from quantkit_kernels.triton.attention.wgmma_kernel import attend_prompts

    return attend_prompts
