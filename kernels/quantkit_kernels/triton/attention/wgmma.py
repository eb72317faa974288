"""A launch of wgmma_kernel.py, for what it takes: keys without a window or sinks, in pages of 64 tokens or a multiple, or row by row."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.prompts import Prompts
from quantkit_kernels.triton.cards import architecture, shared_bytes

_BOX = 64
"""Tokens of a page that are copied at once."""


class WgmmaCut(NamedTuple):
    """queries, keys: of a block; stages: places for blocks of keys and values; together: heads whose last tokens are computed first."""

    queries: int
    keys: int
    stages: int
    together: int


def wgmma_cut(device: torch.device, width: int, rotary: int, value: int, page: int, limited: bool) -> WgmmaCut | None:
    """For keys of `width` and `rotary` numbers and values of `value`, padded to powers of two; None: prefill_kernel.py. limited: there is a
    window, or there are sinks."""
    if architecture(device) != "sm_90" or limited or page % _BOX:
        return None
    for cut in _CUTS:
        if shared_needed(cut, width, rotary, value) <= shared_bytes("sm_90"):
            return cut
    return None


_CUTS = (WgmmaCut(128, 128, 2, 8), WgmmaCut(128, 64, 2, 8))
_BARRIERS = 1024


def shared_needed(cut: WgmmaCut, width: int, rotary: int, value: int) -> int:
    return 2 * (cut.queries * (width + rotary) + cut.stages * cut.keys * (width + rotary + value)) + _BARRIERS


def attend(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, prompts: Prompts, scale: float, width: int, cut: WgmmaCut, **given: Any
) -> None:
    """As `_launch` of prefill.py. scale: times log2(e)."""
    page, rotary = given["PAGE"], given["R"]
    box = min(cut.keys, _BOX) if page else cut.keys
    tiles, heads = -(-prompts.longest // cut.queries), q.shape[1]
    _kernel()[(tiles * heads, len(prompts.spans))](
        q, given["q_pe"], _tiles(_rows(keys), box, given["D_PADDED"]), _tiles(given["k_pe"], box, rotary) if rotary else given["k_pe"],
        _tiles(_rows(values), box, given["V_PADDED"]), out, given["lse"], prompts.starts, prompts.seq_lens, given["table"], given["firsts"],
        given["lasts"], given["key_rows"], q.stride(0), q.stride(1), given["pe_token"], given["k_head"], given["v_head"],
        given["table_width"], heads, given["SHARED"], min(cut.together, heads), tiles, scale,
        D=width, D_PADDED=given["D_PADDED"], R=rotary, V=given["V"], V_PADDED=given["V_PADDED"], PAGE=page,
        BM=cut.queries, BN=cut.keys, BOX=box, STAGES=cut.stages, WARPS=_WARPS, num_warps=_WARPS,
    )  # fmt: skip


_WARPS = 8


def _rows(side: Tensor) -> Tensor:
    """Keys or values of pages, of tokens and heads, or of tokens: a row a token."""
    return side.flatten(0, -3).flatten(1) if side.dim() > 2 else side


def _tiles(rows: Tensor, tokens: int, columns: int) -> Any:
    """rows, as TMA copies `tokens` and `columns` of them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([tokens, columns], gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tokens, columns], layout)


def _kernel() -> Any:
    from quantkit_kernels.triton.attention.wgmma_kernel import attend_prompts

    return attend_prompts
