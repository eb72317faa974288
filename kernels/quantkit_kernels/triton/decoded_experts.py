"""Routed experts of many tokens whose packed weights are decoded to 16 bits and multiplied by
torch's grouped product, for which the kernels that decode while they multiply are no match where
each weight is used often enough.

Weights are decoded some features at a time, of all experts, so that what is decoded takes
DECODED_BYTES whatever the routing, and no launch waits for the host.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.gating import Gating
from quantkit_kernels.triton import rows
from quantkit_kernels.triton.cards import overlapped
from quantkit_kernels.triton.launch import Packed, constants
from quantkit_kernels.triton.sorted_pairs import places_of

DECODED_BYTES = 1 << 30
"""Of weights that are decoded at once, if a tile of each expert takes no more: gate and up of
gpt-oss-20b, whole. In four times as many parts its layer of 8192 tokens took 8 % longer."""
_TILE_ROWS = 256
"""Rows of a weight in a tile of torch's product on Hopper."""
_LEAST_PAIRS = {"fp4": 360, "int4": 600, "w8a16": 200}
"""Of an expert, from which on decoding is faster, by kind: decoding takes as long for few pairs as
for many, and a pair's product then two thirds to two fifths of the time. Measured on an H200 with
the sizes of gpt-oss-20b (360 pairs) and Qwen3-30B-A3B (320, 550 and 180)."""
_GROUPED = ("sm_90",)
"""Cards on which torch's product is one launch, and was measured."""


def is_faster_decoded(
    name: str,
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    pairs_per_expert: float,
) -> bool:
    """Whether experts of these sizes, intermediate and hidden, are on a card of this
    architecture."""
    served = name in _GROUPED and dtype == torch.bfloat16
    whole = all(size % 8 == 0 for size in sizes)  # rows of whole 16 bytes
    return served and whole and pairs_per_expert >= _LEAST_PAIRS.get(kind, math.inf)


def multiply_decoded(
    gate_up: Packed, down: Packed, gating: Gating, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """x [T, H], topk_ids [T, k], topk_weights float32 [T, k] -> [T, H], all contiguous. Products are
    rounded to x's dtype before biases are added."""
    from quantkit_kernels.triton.decoded_experts_kernel import copy_to_rows, gate_rows, sum_rows

    num_experts, (tokens, top_k) = len(gate_up.steps.codes), topk_ids.shape
    pairs, hidden, intermediate = tokens * top_k, down.n, down.k
    places, how = places_of(topk_ids, num_experts), overlapped(x.device)
    sorted_x = x.new_empty(pairs, hidden)
    block, blocks = _blocks(hidden)
    copy_to_rows[(tokens, blocks)](
        x, places.rows, sorted_x, hidden, TOP_K=top_k, BLOCK=block, **how
    )
    between = x.new_empty(pairs, intermediate)
    bias, up = gate_up.bias, gate_up.steps.row_scale.shape[-1] // 2
    for first, count in _parts(intermediate, 2 * num_experts * hidden, _TILE_ROWS // 2):
        weight = x.new_empty(num_experts, 2 * count, hidden)
        rows.expand_rows(gate_up, first, weight[:, :count])
        rows.expand_rows(gate_up, up + first, weight[:, count:])
        products = F.grouped_mm(sorted_x, weight.transpose(1, 2), offs=places.ends)
        block, blocks = _blocks(count)
        gate_rows[(pairs, blocks)](
            products, products if bias is None else bias, topk_ids, places.rows, between,
            intermediate, first, count, 2 * up, up,
            BIASED=bias is not None, BLOCK=block, **constants(gating), **how,
        )  # fmt: skip
        del weight, products
    del sorted_x
    y = torch.empty_like(x)
    bias, bias_rows = down.bias, down.steps.row_scale.shape[-1]
    for first, count in _parts(hidden, num_experts * intermediate, _TILE_ROWS):
        weight = x.new_empty(num_experts, count, intermediate)
        rows.expand_rows(down, first, weight)
        products = F.grouped_mm(between, weight.transpose(1, 2), offs=places.ends)
        block, blocks = _blocks(count)
        sum_rows[(tokens, blocks)](
            products, products if bias is None else bias, topk_ids, places.rows, topk_weights, y,
            hidden, first, count, bias_rows,
            BIASED=bias is not None, TOP_K=top_k, BLOCK=block, **how,
        )  # fmt: skip
        del weight, products
    return y


def decoded_bytes(num_experts: int, intermediate: int, hidden: int) -> int:
    """Of the largest part of an expert layer's weights."""
    sides = (
        (intermediate, 2 * num_experts * hidden, _TILE_ROWS // 2),
        (hidden, num_experts * intermediate, _TILE_ROWS),
    )
    return max(2 * side[1] * _parts(*side)[0][1] for side in sides)


def _parts(features: int, weights: int, multiple: int) -> list[tuple[int, int]]:
    """First feature and number of features of each part, as equal as whole multiples are. weights:
    of a feature, of all experts, in 16 bits."""
    most = max(1, DECODED_BYTES // (2 * weights * multiple)) * multiple
    parts = -(-features // most)
    size = -(-features // (parts * multiple)) * multiple
    return [(first, min(size, features - first)) for first in range(0, features, size)]


def _blocks(width: int) -> tuple[int, int]:
    """Numbers of a row that a program takes, and programs a row."""
    block = min(rows.power_of_two(width), 1024)
    return block, -(-width // block)
