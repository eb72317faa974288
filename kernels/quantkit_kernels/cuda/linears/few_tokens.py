"""Launches of the kernels for few tokens, which read every weight once: tokens_in_registers.cu and
tokens_in_shared.cu."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import GemmParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, checked, stream_of
from quantkit_kernels.cuda.plans import TokensInRegistersPlan, TokensInSharedPlan
from quantkit_kernels.workspace import room_for_sums


def tokens_in_registers(
    params: GemmParams,
    kind: str,
    dtype: torch.dtype,
    group: int,
    plan: TokensInRegistersPlan,
    grid_y: int,
    device: torch.device,
) -> None:
    """grid_y: blocks for the tokens, or for the experts."""
    if plan.split > 1:
        floats = params.n * plan.split * 8 * plan.token_tiles * grid_y
        params.sums = room_for_sums(device, floats).data_ptr()
    params.wn, params.split = plan.wn, plan.split
    layout = (FORMATS[kind], DTYPES[dtype], group)
    shape = (plan.token_tiles, plan.row_tiles, plan.bulk, grid_y)
    checked(
        library().qk_tokens_in_registers(ctypes.byref(params), *layout, *shape, stream_of(device))
    )


def tokens_in_shared(
    params: GemmParams,
    kind: str,
    dtype: torch.dtype,
    group: int,
    plan: TokensInSharedPlan,
    device: torch.device,
) -> None:
    params.wn, params.split = plan.wn, plan.split
    layout = (FORMATS[kind], DTYPES[dtype], group)
    checked(
        library().qk_tokens_in_shared(
            ctypes.byref(params), *layout, plan.token_tiles, stream_of(device)
        )
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantkit_kernels.quantize_rows` in one launch; the scale comes as [M]."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    pointers = (x.data_ptr(), codes.data_ptr(), scale.data_ptr())
    checked(
        library().qk_quantize_rows(
            *pointers, DTYPES[x.dtype], x.shape[0], x.shape[1], stream_of(x.device)
        )
    )
    return codes, scale
