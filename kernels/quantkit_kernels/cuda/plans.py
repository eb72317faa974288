"""Which grid a product is launched with: measured on an H200 for the shapes of plans.json, a rule of thumb for others.

plans.json holds DeepSeek-R1's linears and experts, whole and as a quarter of them (tensor parallel over four). A row is a kind, the
weight's sizes, the most tokens the plans are for, and the fields of one plan, or of two for experts. Nothing is ever timed at the user's.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

_WARPS = 8  # of a block
_BLOCKS = 2 * 132  # resident on an H200


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


def linear_plan(kind: str, rows: int, k: int, tokens: int) -> Plan:
    """For W[rows, k], rows padded to whole strips."""
    measured = _measured()["linear"].get((kind, rows, k))
    if measured is not None:
        return _nearest(measured, tokens)[0]
    token_tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    row_tiles = 4 if token_tiles == 4 else 2
    wn = 2 if k // 128 < 2 * _WARPS and rows % (32 * row_tiles) == 0 else 1
    blocks = rows // (16 * row_tiles * wn) * -(-tokens // (8 * token_tiles))
    split = max(1, min(_BLOCKS // blocks, k // 128 * wn // _WARPS)) if blocks < _BLOCKS // 3 else 1
    return Plan(token_tiles, row_tiles, wn, split, bulk=kind == "int8" or token_tiles > 1)


def experts_plans(kind: str, hidden: int, intermediate: int, num_experts: int, pairs: int, top_k: int) -> tuple[Plan, Plan]:
    """For gate_up and down of `pairs` token-expert pairs."""
    per_expert = pairs / num_experts
    if per_expert > 4:
        # Tiles that hold most experts' tokens at once: weights are read again for every further tile.
        wide = Plan(2 if per_expert <= 12 else 4, 4, 2 if hidden % 128 == 0 and intermediate % 64 == 0 else 1, 1, bulk=True)
        return wide, wide
    measured = _measured()["experts"].get((kind, hidden, intermediate))
    if measured is not None:
        gate_up, down = _nearest(measured, pairs // top_k)
        return gate_up, down
    return Plan(1, 4, 1, 1, bulk=True), Plan(1, 4, 1, 1, bulk=True)


def _nearest(measured: list[tuple[int, list[Plan]]], tokens: int) -> list[Plan]:
    """The plans of the fewest tokens that are not below these, else of the most."""
    return next((plans for most, plans in measured if tokens <= most), measured[-1][1])


Table = dict[tuple[str, int, int], list[tuple[int, list[Plan]]]]


@functools.cache
def _measured() -> dict[str, Table]:
    """Per table and weight: the plans for rising numbers of tokens."""
    tables: dict[str, Table] = {}
    for name, rows in json.loads((Path(__file__).parent / "plans.json").read_text()).items():
        table = tables[name] = {}
        for kind, first, second, tokens, plans in rows:
            table.setdefault((kind, first, second), []).append((tokens, [Plan(*fields) for fields in plans]))
    return tables
