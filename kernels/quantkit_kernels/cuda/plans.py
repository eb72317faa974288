"""Which kernel computes a product, and with which grid: measured on an H200 for the shapes of
plans.json, estimated for other shapes.

A plan, its name in plans.json, its kernel's file and its C function have one name:

    tokens_in_registers   few tokens: every warp has its own weights, and its tokens in registers
    tokens_in_shared      up to 16 tokens, 4 bits: the tokens are in shared memory once for all warps of a block
    tile_per_block        more tokens: a block computes one tile of rows and tokens
    tile_and_share        the same in 4 bits, where tiles are a few more than multiprocessors: each block also takes a share of those left
    persistent_tiles      int8: a block stays on its multiprocessor and computes one tile after the other
    expert_tiles          routed experts of more than a few tokens each, sorted by expert
    expand                1024 tokens and more, 4 bits: the weight is expanded to 16 bits, and cuBLAS multiplies

plans.json holds the linears and experts of DeepSeek-R1 and openPangu-Ultra-MoE, whole and as a
quarter of them (tensor parallel over four), as kernels/tune.py measured them, but for R1's rows of
one token, of 8 in o and of 32, measured inside a step. A row is a kind, the weight's sizes, the
most tokens that the plans are for, and the plans: one of a linear, two of experts, each its name
and its fields. Experts have
rows in int8 only: in 4 bits fused_experts.cu or tokens_in_shared.cu computes them. Nothing is
measured on the user's machine.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

_WARPS = 8
"""Warps of a block of tokens_in_registers."""
_BLOCKS = 2 * 132
"""Blocks that are on an H200 at once, two to a multiprocessor."""
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 28, 8: 14}
"""Blocks of a cluster, and how many such clusters an H200 runs at once. A cluster lies in one part
of the chip, and some parts have 14 or 16 multiprocessors, not 18; which ones differs from card to
card. One cluster too many makes the product take nearly twice as long."""
_MATH_WARPS = 18
"""Warps of a block of tokens_in_shared that multiply."""
_LEAST_ROWS, _LEAST_INTERMEDIATE = 2048, 512
"""Smaller linears are faster by tokens_in_registers than by tokens_in_shared, smaller experts by
fused_experts."""


@dataclass(frozen=True)
class TokensInRegistersPlan:
    """Grid of tokens_in_registers.cu, for few tokens.

    token_tiles: tiles of 8 tokens that a block has (1, 2 or 4). row_tiles: tiles of 16 rows that a
    warp has (2 or 4; 4 with four token tiles). wn: warps of a block side by side along N; the
    others are along K. split: blocks along K. bulk: weights go through shared memory, not straight
    into registers; always true with several token tiles.
    """

    token_tiles: int
    row_tiles: int
    wn: int
    split: int
    bulk: bool


@dataclass(frozen=True)
class TokensInSharedPlan:
    """Grid of tokens_in_shared.cu, for 4 bits and up to 16 tokens.

    token_tiles: tiles of 8 tokens (1 or 2); one block has all tokens. wn: warps of a block side by
    side along N, 32 rows each; 18 // wn such groups of warps share K. split: blocks of a cluster,
    which share K too (1, 2, 4 or 8).
    """

    token_tiles: int
    wn: int
    split: int


def tokens_in_shared_plans(
    rows: int, k: int, tokens: int, pairs: int = 1
) -> Iterator[TokensInSharedPlan]:
    """Plans whose blocks are all on the device at once: for each `split` the fewest rows a block
    may have, and up to 64 more.

    pairs: experts that have such a product at the same time.
    """
    for split, of_all in CLUSTERS_AT_ONCE.items():
        clusters = of_all // pairs
        if clusters == 0 or split > max(1, k // 512):
            continue
        fewest = -(-rows // (32 * clusters))
        for wn in range(fewest, min(_MATH_WARPS, fewest + 2) + 1):
            yield TokensInSharedPlan(1 if tokens <= 8 else 2, wn, split)


@dataclass(frozen=True)
class TilePerBlockPlan:
    """Grid of tile_per_block.cu: a block computes one tile.

    tokens: tokens of a tile (32, 64, 128 or 256; in 4 bits also 24 or 48). warpgroups: strips of 64
    rows of a tile, one a warpgroup (2; with 32 or 64 tokens also 4, with 128 also 3). split: blocks
    of a cluster, which share K (1 to 8).
    """

    tokens: int
    warpgroups: int
    split: int


@dataclass(frozen=True)
class TileAndSharePlan:
    """Grid of tile_and_share.cuh, for 4 bits: a block computes one tile of 256 rows, and a share of
    the tiles that are left over.

    tokens: tokens of a tile (32 or 64); one tile has all tokens. blocks: at least half as many as
    there are tiles. K is 1024 or more.
    """

    tokens: int
    blocks: int


@dataclass(frozen=True)
class PersistentTilesPlan:
    """Grid of persistent_tiles.cu, for int8: a block computes one tile after the other.

    tokens: tokens of a tile (64, 128 or 256). strips: strips of 64 rows of a tile (1; below 256
    tokens also 2). same_strips: the two blocks of a cluster have the same strips and different
    tokens; else the same tokens and different strips. parts: the tiles that are left when every
    cluster has as many as the others are cut into so many along the tokens (1, 2 or 4; 4 from 128
    tokens on).
    """

    tokens: int
    strips: int
    same_strips: bool
    parts: int


def persistent_tiles_plans(tokens: int) -> Iterator[PersistentTilesPlan]:
    """All plans for `tokens`, without tiles that have room for twice as many."""
    for tile, strips in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        if tile > 64 and tile >= 2 * tokens:
            continue
        for same_strips in (False, True) if tokens > tile else (False,):
            for parts in (1, 2, 4) if tile > 64 else (1, 2):
                yield PersistentTilesPlan(tile, strips, same_strips, parts)


@dataclass(frozen=True)
class ExpertTilesPlan:
    """Grid of expert_tiles.cu. tokens: that a tile has room for (96 or 160)."""

    tokens: int


@dataclass(frozen=True)
class ExpandPlan:
    """expand.cu expands the 4-bit weight to the compute dtype, and cuBLAS multiplies."""


AnyPlan = (
    TokensInRegistersPlan
    | TokensInSharedPlan
    | TilePerBlockPlan
    | TileAndSharePlan
    | PersistentTilesPlan
    | ExpandPlan
)
ExpertsPlans = tuple[
    TokensInRegistersPlan | TokensInSharedPlan, TokensInRegistersPlan | TokensInSharedPlan
]
"""Of gate_up and down."""

SORTED_PER_EXPERT = {"int4": 9, "fp4": 9, "int8": 8}
"""From so many pairs an expert on, the kernels of sorted.py are faster."""
_NARROW_TILES = ((18.0, 24), (26.0, 32), (44.0, 48))
"""Tokens of a tile of tile_per_block in 4 bits, for so many pairs an expert at most."""
MAX_EXPERTS = 1024
"""The most experts that fused_experts.cu takes."""
_FEW_TOKENS = 16
"""The most tokens of the kernels for few tokens; tokens_in_registers takes more where the tile
kernels cannot."""
_TILE_K = 65536
"""The longest row that arrange_tokens.cu quantizes."""


def linear_plan(kind: str, rows: int, k: int, tokens: int) -> AnyPlan:
    """The plan for W[rows, k], rows padded to whole strips."""
    measured = _measured()["linear"].get((kind, rows, k))
    if measured is not None:
        return _nearest(measured, tokens)[0]
    if tokens > _FEW_TOKENS and k <= _TILE_K:
        return _many_tokens_plan(kind, rows, k, tokens)
    token_tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    if kind != "int8" and tokens <= _FEW_TOKENS and rows >= _LEAST_ROWS:
        shared = _tokens_in_shared_plan(rows, k, tokens)
        if shared is not None:
            return shared
    row_tiles = 4 if token_tiles == 4 else 2
    wn = 2 if k // 128 < 2 * _WARPS and rows % (32 * row_tiles) == 0 else 1
    blocks = rows // (16 * row_tiles * wn) * -(-tokens // (8 * token_tiles))
    split = max(1, min(_BLOCKS // blocks, k // 128 * wn // _WARPS)) if blocks < _BLOCKS // 3 else 1
    return TokensInRegistersPlan(
        token_tiles, row_tiles, wn, split, bulk=kind == "int8" or token_tiles > 1
    )


@functools.cache
def _tokens_in_shared_plan(
    rows: int, k: int, tokens: int, pairs: int = 1
) -> TokensInSharedPlan | None:
    """The cheapest of `tokens_in_shared_plans`. The cost is that of reading a block's weights and
    tokens and of adding up over blocks.

    Its constants were fitted to the measured shapes; there the choice takes 2 % longer than the
    best plan on average.
    """

    def cost(plan: TokensInSharedPlan) -> float:
        return k / plan.split * (plan.wn * 16 + tokens / 2) + 20_000 * math.log2(plan.split)

    # With one warp along N each of the 18 warps reads chunks of its own, and the ring holds 18. A
    # plan where a warp has several chunks is
    # left out: nothing could be copied ahead.
    plans = (
        plan
        for plan in tokens_in_shared_plans(rows, k, tokens, pairs)
        if plan.wn > 1 or k // plan.split <= 128 * _MATH_WARPS
    )
    return min(plans, key=cost, default=None)


def _many_tokens_plan(
    kind: str, rows: int, k: int, tokens: int
) -> TilePerBlockPlan | PersistentTilesPlan | ExpandPlan:
    if tokens > 1024 and kind != "int8":
        return ExpandPlan()
    if (
        kind == "int8" and rows // 64 * -(-tokens // 256) >= 2 * _BLOCKS
    ):  # two tiles for every warpgroup or more
        return PersistentTilesPlan(256, 1, False, 1)
    tile = next(tile for tile in (32, 64, 128, 256) if tokens <= tile or tile == 256)
    warpgroups = 3 if tile == 128 and rows > 132 * 128 else 2
    blocks = -(-rows // (64 * warpgroups)) * -(-tokens // tile)
    split = max(1, min(8, _BLOCKS // 2 // blocks, k // 512)) if blocks < 100 else 1
    return TilePerBlockPlan(tile, warpgroups, split)


def experts_plans(
    kind: str, hidden: int, intermediate: int, num_experts: int, pairs: int, top_k: int
) -> ExpertsPlans | None:
    """Plans for gate_up and down of `pairs` token-expert pairs; None where fused_experts computes
    both in one launch."""
    if kind != "int8":
        if pairs == top_k and intermediate >= _LEAST_INTERMEDIATE:
            first = _tokens_in_shared_plan(2 * intermediate, hidden, 1, pairs)
            second = _tokens_in_shared_plan(hidden, intermediate, 1, pairs)
            if first is not None and second is not None:
                return first, second
        if num_experts <= MAX_EXPERTS:
            return None
    per_expert = pairs / num_experts
    if per_expert > 6:
        # A block's tokens should be all of most experts' tokens: weights are read again for more of
        # them.
        side_by_side = 2 if hidden % 128 == 0 and intermediate % 64 == 0 else 1
        plan = TokensInRegistersPlan(2 if per_expert <= 12 else 4, 4, side_by_side, 1, bulk=True)
        return plan, plan
    measured = _measured()["experts"].get((kind, hidden, intermediate))
    if measured is not None:
        gate_up, down = _nearest(measured, pairs // top_k)
        assert isinstance(gate_up, TokensInRegistersPlan), gate_up
        assert isinstance(down, TokensInRegistersPlan), down
        return gate_up, down
    return TokensInRegistersPlan(1, 4, 1, 1, bulk=True), TokensInRegistersPlan(
        1, 4, 1, 1, bulk=True
    )


def experts_token_tiles(per_expert: float) -> int:
    """Tiles of 8 tokens that fused_experts multiplies at once, for so many tokens an expert on
    average."""
    return 1 if per_expert <= 7.5 else 2


def sorted_plan(kind: str, per_expert: float) -> TilePerBlockPlan | ExpertTilesPlan:
    """The plan for sorted pairs, so many an expert on average. A tile should hold all tokens of
    most experts."""
    narrow = next((tokens for most, tokens in _NARROW_TILES if per_expert <= most), None)
    if kind != "int8" and narrow is not None:
        return TilePerBlockPlan(narrow, 2, 1)
    return ExpertTilesPlan(96 if per_expert <= 78 else 160)


def _nearest(measured: list[tuple[int, list[AnyPlan]]], tokens: int) -> list[AnyPlan]:
    """The plans measured for `tokens` or the next larger number; those of the largest where there
    is none."""
    return next((plans for most, plans in measured if tokens <= most), measured[-1][1])


Table = dict[tuple[str, int, int], list[tuple[int, list[AnyPlan]]]]


_NAMES: dict[str, type[AnyPlan]] = {
    "tokens_in_registers": TokensInRegistersPlan,
    "tokens_in_shared": TokensInSharedPlan,
    "tile_per_block": TilePerBlockPlan,
    "tile_and_share": TileAndSharePlan,
    "persistent_tiles": PersistentTilesPlan,
    "expand": ExpandPlan,
}


def written(plan: AnyPlan) -> list[Any]:
    """A plan as a row of plans.json has it."""
    return [next(name for name, kind in _NAMES.items() if isinstance(plan, kind)), *astuple(plan)]


@functools.cache
def _measured() -> dict[str, Table]:
    """By table and weight: the plans for rising numbers of tokens."""
    tables: dict[str, Table] = {}
    for name, rows in json.loads((Path(__file__).parent / "plans.json").read_text()).items():
        table = tables[name] = {}
        for kind, first, second, tokens, plans in rows:
            table.setdefault((kind, first, second), []).append(
                (tokens, [_NAMES[name](*fields) for name, *fields in plans])
            )
    return tables
