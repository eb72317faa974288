"""Products in tiles, for more than a few tokens: activations are arranged for them first, then one
of three kernels multiplies."""

import ctypes

import torch
from torch import Tensor

from quantkit_kernels.cuda.abi import Shares, TileParams
from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, STORE, checked, stream_of
from quantkit_kernels.cuda.layout import PackedStrips, pointers
from quantkit_kernels.cuda.plans import (
    ExpertTilesPlan,
    PersistentTilesPlan,
    TileAndSharePlan,
    TilePerBlockPlan,
)
from quantkit_kernels.pairs import Slots
from quantkit_kernels.workspace import workspace

SHARE_ROWS = 256
"""Rows of a tile of a TileAndSharePlan."""

TilesPlan = TilePerBlockPlan | TileAndSharePlan | PersistentTilesPlan | ExpertTilesPlan


def multiply_tiles(
    packed: PackedStrips,
    kind: str,
    group: int,
    x: Tensor,
    out: Tensor,
    plan: TilesPlan,
    *,
    epilogue: int = STORE,
    limit: float = 0.0,
    slots: Slots | None = None,
    top_k: int = 0,
    num_experts: int = 1,
    pair_weights: Tensor | None = None,
) -> None:
    """Write the product of x and a packed weight into `out`, as `epilogue` says (tile_params.cuh).

    One linear: x[M, K]. Experts: with top_k x[T, K], and a pair's row is that of its token; without
    top_k x[slots, K]. Experts take a TilePerBlockPlan only. A PersistentTilesPlan is for int8. A
    TileAndSharePlan takes the tokens of one tile.
    """
    k = x.shape[1]
    count = x.shape[0] if slots is None else slots.order.numel()
    params = TileParams(
        **pointers(packed),
        out=out.data_ptr(),
        tiles=-(-count // plan.tokens),
        m=count,
        k=k,
        limit=limit,
    )
    params.n, params.out_n, params.epilogue = (
        packed.row_scale.numel() // num_experts,
        out.shape[1],
        epilogue,
    )
    arranged = _arrange(params, kind, x, plan.tokens, slots, top_k)
    if slots is not None:
        params.tile_expert, params.tile_count, params.order = (one.data_ptr() for one in slots)
    if pair_weights is not None:
        params.pair_weights = pair_weights.data_ptr()
    _launch(params, kind, group, x.dtype, plan, x.device)
    del (
        arranged
    )  # needed until the launch: whatever takes its memory next runs later on the same stream


def _arrange(
    params: TileParams, kind: str, x: Tensor, tokens: int, slots: Slots | None, top_k: int
) -> list[Tensor]:
    """x in the order in which the kernels read it (arrange_tokens.cu), for int8 quantized. Returns
    what `params` points to."""
    slot_count, k, stream = params.m, params.k, stream_of(x.device)
    order, tile_count = (
        (slots.order.data_ptr() if top_k else None, slots.tile_count.data_ptr())
        if slots
        else (None, None)
    )
    width = k if kind == "int8" else 2 * k
    arranged = torch.empty(params.tiles * tokens * width, dtype=torch.uint8, device=x.device)
    params.x = arranged.data_ptr()
    if kind != "int8":
        rows = (slot_count, tokens, top_k, width)
        checked(
            library().qk_arrange(
                x.data_ptr(), arranged.data_ptr(), order, tile_count, *rows, stream
            )
        )
        return [arranged]
    scale = torch.empty(params.tiles * tokens, dtype=torch.float32, device=x.device)
    params.x_scale = scale.data_ptr()
    to = (arranged.data_ptr(), scale.data_ptr(), order, tile_count)
    checked(
        library().qk_quantize_arranged(
            x.data_ptr(), *to, DTYPES[x.dtype], slot_count, tokens, top_k, k, stream
        )
    )
    return [arranged, scale]


def _launch(
    params: TileParams,
    kind: str,
    group: int,
    dtype: torch.dtype,
    plan: TilesPlan,
    device: torch.device,
) -> None:
    layout, stream = (FORMATS[kind], DTYPES[dtype], group), stream_of(device)
    if isinstance(plan, PersistentTilesPlan):
        shape = (plan.tokens, plan.strips, plan.same_strips, plan.parts)
        checked(library().qk_persistent_tiles(ctypes.byref(params), DTYPES[dtype], *shape, stream))
    elif isinstance(plan, ExpertTilesPlan):
        checked(library().qk_expert_tiles(ctypes.byref(params), *layout, plan.tokens, stream))
    elif isinstance(plan, TileAndSharePlan):
        assert params.m <= plan.tokens, (params.m, plan)
        assert params.k >= 1024, params.k
        left = -(-params.n // SHARE_ROWS) - plan.blocks
        params.split, parts = 1, min(plan.blocks // max(left, 1), params.k // 128)
        partial, arrived = workspace(device, left * parts * SHARE_ROWS * plan.tokens)
        shares = Shares(partial.data_ptr(), arrived.data_ptr(), parts)
        checked(
            library().qk_tile_and_share(
                ctypes.byref(params),
                ctypes.byref(shares),
                *layout,
                plan.tokens,
                plan.blocks,
                stream,
            )
        )
    else:
        params.split = plan.split
        checked(
            library().qk_tile_per_block(
                ctypes.byref(params), *layout, plan.tokens, plan.warpgroups, stream
            )
        )
