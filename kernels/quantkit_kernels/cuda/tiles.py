"""Products of the tile kernel: activations arranged for it, dense or in the slots of experts, and its launch."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import Shares, TileParams, library
from quantkit_kernels.cuda.launch import DTYPES, FORMATS, STORE, checked, stream_of, workspace
from quantkit_kernels.cuda.layout import Packed
from quantkit_kernels.cuda.plans import PersistentPlan, SharePlan, TilePlan

SHARE_ROWS = 256  # of a tile of a SharePlan


class Slots(NamedTuple):
    """Token-expert pairs sorted by expert, each expert's in tiles of its own.

    tile_expert int32 [tiles], -1 for tiles that are not used; tile_count int32 [tiles], pairs of a tile; order int32 [tiles * tokens of a
    tile], the pair in a slot, undefined where a tile has no more.
    """

    tile_expert: Tensor
    tile_count: Tensor
    order: Tensor


def sort_pairs(topk_ids: Tensor, num_experts: int, tokens: int) -> Slots:
    """Slots for topk_ids int32 or int64 [T, k] in tiles of `tokens`, in one launch and without waiting for the device."""
    pairs = topk_ids.numel()
    tiles = min(pairs, num_experts) + pairs // tokens
    slots = Slots(*(torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (tiles, tiles, tiles * tokens)))
    sizes = (topk_ids.element_size() // 4, pairs, num_experts, tokens, tiles)
    checked(library().qk_sort_pairs(topk_ids.data_ptr(), *sizes, *(one.data_ptr() for one in slots), stream_of(topk_ids.device)))
    return slots


def tile_gemm(
    packed: Packed,
    kind: str,
    group: int,
    x: Tensor,
    out: Tensor,
    plan: TilePlan | SharePlan | PersistentPlan,
    *,
    epilogue: int = STORE,
    slots: Slots | None = None,
    top_k: int = 0,
    num_experts: int = 1,
    pair_weights: Tensor | None = None,
) -> None:
    """The product of x and a packed weight into `out`, as `epilogue` says (tile_params.cuh).

    A PersistentPlan is for dense int8, a SharePlan for what is dense and has no more tokens than a tile.

    Dense: x[M, K]. For experts: x[T, K] with top_k, whose rows are the tokens of pairs, or without, x[slots, K].
    """
    k = x.shape[1]
    count = x.shape[0] if slots is None else slots.order.numel()
    tiles = -(-count // plan.tokens)
    order, tile_count = (slots.order.data_ptr() if top_k else None, slots.tile_count.data_ptr()) if slots else (None, None)
    width = k if kind == "int8" else 2 * k
    arranged = torch.empty(tiles * plan.tokens * width, dtype=torch.uint8, device=x.device)
    pointers = {name: tensor.data_ptr() for name, tensor in packed._asdict().items() if tensor is not None}
    params = TileParams(**pointers, x=arranged.data_ptr(), out=out.data_ptr(), tiles=tiles, m=count, k=k)
    params.n, params.out_n, params.epilogue = packed.row_scale.numel() // num_experts, out.shape[1], epilogue
    stream = stream_of(x.device)
    if kind == "int8":
        scale = torch.empty(tiles * plan.tokens, dtype=torch.float32, device=x.device)
        params.x_scale = scale.data_ptr()
        to = (arranged.data_ptr(), scale.data_ptr(), order, tile_count)
        checked(library().qk_quantize_arranged(x.data_ptr(), *to, DTYPES[x.dtype], count, plan.tokens, top_k, k, stream))
    else:
        checked(library().qk_arrange(x.data_ptr(), arranged.data_ptr(), order, tile_count, count, plan.tokens, top_k, width, stream))
    if slots is not None:
        params.tile_expert, params.tile_count, params.order = (one.data_ptr() for one in slots)
    if pair_weights is not None:
        params.pair_weights = pair_weights.data_ptr()
    if isinstance(plan, PersistentPlan):
        shape = (plan.tokens, plan.strips, plan.same_strips, plan.parts)
        checked(library().qk_persistent_int8(ctypes.byref(params), DTYPES[x.dtype], *shape, stream))
        return
    layout = (FORMATS[kind], DTYPES[x.dtype], group)
    if isinstance(plan, SharePlan):
        assert count <= plan.tokens, (count, plan)
        assert k >= 1024, k
        left = -(-params.n // SHARE_ROWS) - plan.blocks
        params.split, parts = 1, min(plan.blocks // max(left, 1), k // 128)
        partial, arrived = workspace(x.device, left * parts * SHARE_ROWS * plan.tokens)
        shares = Shares(partial.data_ptr(), arrived.data_ptr(), parts)
        checked(library().qk_shared_tiles(ctypes.byref(params), ctypes.byref(shares), *layout, plan.tokens, plan.blocks, stream))
        return
    params.split = plan.split
    checked(library().qk_tile_gemm(ctypes.byref(params), *layout, plan.tokens, plan.warpgroups, stream))
