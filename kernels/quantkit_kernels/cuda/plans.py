"""Which kernel and grid a product is launched with: measured on an H200 for the shapes of plans.json, a rule of thumb for others.

plans.json holds the linears and experts of DeepSeek-R1 and openPangu-Ultra-MoE, whole and as a quarter of them (tensor parallel over four),
as kernels/tune.py measured them. A row is a kind, the weight's sizes, the most tokens the plans are for, and the fields of one plan, or of
two for experts, behind its name. Experts have rows in INT8 only: in 4 bits one token's go by wide blocks, more by few_experts.py. Nothing
is ever timed at the user's.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

_WARPS = 8  # of a block
_BLOCKS = 2 * 132  # resident on an H200
WIDE_CLUSTERS = {1: 132, 2: 66, 4: 28, 8: 14}
"""Of so many blocks each, how many an H200 runs at once: a cluster lies in one of its parts, some of which lack two or four of 18
multiprocessors, not on every card the same. One more than there is room for, and the product takes nearly twice as long."""
_WIDE_WARPS = 18
_WIDE_ROWS, _WIDE_INTERMEDIATE = 2048, 512  # with fewer the streaming kernel and few_experts.py are faster


@dataclass(frozen=True)
class Plan:
    """The shape of a grid of stream_gemm.

    token_tiles: of 8 tokens, per block (1, 2 or 4). row_tiles: of 16 rows, per warp (2 or 4; 4 with four token tiles). wn: warps of a block
    side by side along N. split: blocks along K. bulk: weights through shared memory, always so with several token tiles.
    """

    token_tiles: int
    row_tiles: int
    wn: int
    split: int
    bulk: bool


@dataclass(frozen=True)
class WidePlan:
    """The grid of wide_gemm, for 4 bits.

    token_tiles: of 8 tokens, which are all there may be (1 or 2). wn: of a block's 18 warps, those side by side along N; so many times fit.
    split: blocks of a cluster along K (1, 2, 4 or 8).
    """

    token_tiles: int
    wn: int
    split: int


def wide_plans(rows: int, k: int, tokens: int, pairs: int = 1) -> Iterator[WidePlan]:
    """With all blocks at once: for each number of them along K those with the fewest rows a block, and a little more. pairs: so many
    experts have such a product."""
    for split, of_all in WIDE_CLUSTERS.items():
        clusters = of_all // pairs
        if clusters == 0 or split > max(1, k // 512):
            continue
        fewest = -(-rows // (32 * clusters))
        for wn in range(fewest, min(_WIDE_WARPS, fewest + 2) + 1):
            yield WidePlan(1 if tokens <= 8 else 2, wn, split)


@dataclass(frozen=True)
class TilePlan:
    """The shape of a grid of tile_gemm.

    tokens: of a tile (32, 64, 128 or 256). warpgroups: strips of 64 rows of a block (2, or 4 up to 64 tokens, or 3 with 128). split: blocks
    along K (1 to 8).
    """

    tokens: int
    warpgroups: int
    split: int


@dataclass(frozen=True)
class SharePlan:
    """The grid of tile_gemm with a block for every multiprocessor, for 4 bits: each has a tile of 256 rows, and a share of those left over.

    tokens: of a tile (32 or 64), which are all there may be. blocks: at least half as many as there are tiles. K is 1024 or more.
    """

    tokens: int
    blocks: int


@dataclass(frozen=True)
class PersistentPlan:
    """The grid of persistent_int8, for int8: blocks go from tile to tile.

    tokens: of a tile (64, 128 or 256). strips: of 64 rows of a tile (1, or 2 below 256 tokens). same_strips: two blocks side by side have
    the same strips, else the same tokens. parts: into which the tiles are cut along the tokens that do not come out even (1, 2 or 4; 4 from
    128 tokens on).
    """

    tokens: int
    strips: int
    same_strips: bool
    parts: int


def persistent_plans(tokens: int) -> Iterator[PersistentPlan]:
    """All for so many tokens, without tiles that have room for twice as many."""
    for tile, strips in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        if tile > 64 and tile >= 2 * tokens:
            continue
        for same_strips in (False, True) if tokens > tile else (False,):
            for parts in (1, 2, 4) if tile > 64 else (1, 2):
                yield PersistentPlan(tile, strips, same_strips, parts)


@dataclass(frozen=True)
class Expand:
    """The 4-bit weight is expanded to the compute dtype and multiplied by cuBLAS."""


AnyPlan = Plan | WidePlan | TilePlan | SharePlan | PersistentPlan | Expand
ExpertsPlans = tuple[Plan | WidePlan, Plan | WidePlan]  # of gate_up and down

SORTED_PER_EXPERT = {"int4": 9, "fp4": 9, "int8": 8}  # pairs, from which on sorting them is faster than streaming the weights
MAX_EXPERTS = 1024  # that the kernel of few_experts.py takes
_STREAM_TOKENS = 16  # that the streaming kernel takes, and with more where the tile kernel cannot
_TILE_K = 65536  # the longest row that the tile kernel's quantization holds


def linear_plan(kind: str, rows: int, k: int, tokens: int) -> AnyPlan:
    """For W[rows, k], rows padded to whole strips."""
    measured = _measured()["linear"].get((kind, rows, k))
    if measured is not None:
        return _nearest(measured, tokens)[0]
    if tokens > _STREAM_TOKENS and k <= _TILE_K:
        return _tile_plan(kind, rows, k, tokens)
    token_tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    if kind != "int8" and tokens <= _STREAM_TOKENS and rows >= _WIDE_ROWS:
        wide = _wide_plan(rows, k, tokens)
        if wide is not None:
            return wide
    row_tiles = 4 if token_tiles == 4 else 2
    wn = 2 if k // 128 < 2 * _WARPS and rows % (32 * row_tiles) == 0 else 1
    blocks = rows // (16 * row_tiles * wn) * -(-tokens // (8 * token_tiles))
    split = max(1, min(_BLOCKS // blocks, k // 128 * wn // _WARPS)) if blocks < _BLOCKS // 3 else 1
    return Plan(token_tiles, row_tiles, wn, split, bulk=kind == "int8" or token_tiles > 1)


@functools.cache
def _wide_plan(rows: int, k: int, tokens: int, pairs: int = 1) -> WidePlan | None:
    """The cheapest of `wide_plans`: of reading a block's weights and tokens, and of adding up over more blocks. The weights of the three
    were fitted to the shapes that were measured, where the choice takes 2 % longer than the best on average."""

    def cost(plan: WidePlan) -> float:
        return k / plan.split * (plan.wn * 16 + tokens / 2) + 20_000 * math.log2(plan.split)

    # With one warp along N all have chunks of their own, as many as the ring holds: where each has several, none could come ahead.
    plans = (plan for plan in wide_plans(rows, k, tokens, pairs) if plan.wn > 1 or k // plan.split <= 128 * _WIDE_WARPS)
    return min(plans, key=cost, default=None)


def _tile_plan(kind: str, rows: int, k: int, tokens: int) -> TilePlan | PersistentPlan | Expand:
    if tokens > 1024 and kind != "int8":
        return Expand()
    if kind == "int8" and rows // 64 * -(-tokens // 256) >= 2 * _BLOCKS:  # at least two tiles for every warpgroup
        return PersistentPlan(256, 1, False, 1)
    tile = next(tile for tile in (32, 64, 128, 256) if tokens <= tile or tile == 256)
    warpgroups = 3 if tile == 128 and rows > 132 * 128 else 2
    blocks = -(-rows // (64 * warpgroups)) * -(-tokens // tile)
    split = max(1, min(8, _BLOCKS // 2 // blocks, k // 512)) if blocks < 100 else 1
    return TilePlan(tile, warpgroups, split)


def experts_plans(kind: str, hidden: int, intermediate: int, num_experts: int, pairs: int, top_k: int) -> ExpertsPlans | None:
    """For gate_up and down of `pairs` token-expert pairs; none where few_experts.py takes both in one launch."""
    if kind != "int8":
        if pairs == top_k and intermediate >= _WIDE_INTERMEDIATE:
            first, second = _wide_plan(2 * intermediate, hidden, 1, pairs), _wide_plan(hidden, intermediate, 1, pairs)
            if first is not None and second is not None:
                return first, second
        if num_experts <= MAX_EXPERTS:
            return None
    per_expert = pairs / num_experts
    if per_expert > 6:
        # Tiles that hold most experts' tokens at once: weights are read again for every further tile.
        wide = Plan(2 if per_expert <= 12 else 4, 4, 2 if hidden % 128 == 0 and intermediate % 64 == 0 else 1, 1, bulk=True)
        return wide, wide
    measured = _measured()["experts"].get((kind, hidden, intermediate))
    if measured is not None:
        gate_up, down = _nearest(measured, pairs // top_k)
        assert isinstance(gate_up, Plan), gate_up
        assert isinstance(down, Plan), down
        return gate_up, down
    return Plan(1, 4, 1, 1, bulk=True), Plan(1, 4, 1, 1, bulk=True)


def experts_token_tiles(per_expert: float) -> int:
    """Of 8 tokens, that few_experts.py multiplies at once where each expert has so many on average."""
    return 1 if per_expert <= 7.5 else 2


def sorted_plan(per_expert: float) -> TilePlan:
    """For experts whose pairs are sorted, so many each on average. Tiles hold most experts' tokens at once."""
    return TilePlan(32, 2, 1) if per_expert <= 20 else TilePlan(64, 2, 1) if per_expert <= 48 else TilePlan(128, 2, 1)


def _nearest(measured: list[tuple[int, list[AnyPlan]]], tokens: int) -> list[AnyPlan]:
    """The plans of the fewest tokens that are not below these, else of the most."""
    return next((plans for most, plans in measured if tokens <= most), measured[-1][1])


Table = dict[tuple[str, int, int], list[tuple[int, list[AnyPlan]]]]


_NAMES: dict[str, type[AnyPlan]] = {
    "stream": Plan,
    "wide": WidePlan,
    "tiles": TilePlan,
    "shares": SharePlan,
    "stays": PersistentPlan,
    "expand": Expand,
}


def written(plan: AnyPlan) -> list[Any]:
    """As in a row of plans.json."""
    return [next(name for name, kind in _NAMES.items() if isinstance(plan, kind)), *astuple(plan)]


@functools.cache
def _measured() -> dict[str, Table]:
    """Per table and weight: the plans for rising numbers of tokens."""
    tables: dict[str, Table] = {}
    for name, rows in json.loads((Path(__file__).parent / "plans.json").read_text()).items():
        table = tables[name] = {}
        for kind, first, second, tokens, plans in rows:
            table.setdefault((kind, first, second), []).append((tokens, [_NAMES[name](*fields) for name, *fields in plans]))
    return tables
