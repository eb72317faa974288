"""Sizes of the products that plans are measured for and kernels are timed with: N and K of linears
by what they are in the model.

shared_gu, dense_gu: gate and up side by side of DeepSeek-R1's shared expert and of its first
layers; shared_dn, dense_dn: down.
"""

from typing import NamedTuple

R1_LINEARS = {
    "q_a+kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "shared_gu": (4096, 7168),
    "shared_dn": (7168, 2048),
    "dense_gu": (36864, 7168),
    "dense_dn": (7168, 18432),
}
R1_RANK_LINEARS = {
    "q_b": (6144, 1536),
    "o": (7168, 4096),
    "dense_gu": (9216, 7168),
    "dense_dn": (7168, 4608),
}
"""Those of which one tensor-parallel rank of four has a part; its shared expert is one of the
routed ones."""
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 256, 8
"""DeepSeek-R1's hidden size, the intermediate size of its experts, their number, and those of a
token."""
QWEN3_8B_LINEARS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}


class LinearSize(NamedTuple):
    """W[n, k] of a kind of `backends.KINDS`; "dense" is 16 bits."""

    kind: str
    n: int
    k: int


class ExpertsSize(NamedTuple):
    """A layer of routed experts of a kind: gate and up [intermediate, hidden], of which a token
    asks for top_k."""

    kind: str
    hidden: int
    intermediate: int
    experts: int = 256
    top_k: int = 8


class Products(NamedTuple):
    """What the steps of one model or several multiply."""

    linears: tuple[LinearSize, ...]
    experts: tuple[ExpertsSize, ...]


_KINDS = ("int4", "fp4", "int8")
_SIZES = (*R1_LINEARS.values(), *QWEN3_8B_LINEARS.values(), *R1_RANK_LINEARS.values())
MEASURED = Products(
    tuple(LinearSize(kind, *size) for kind in _KINDS for size in _SIZES),
    tuple(ExpertsSize(kind, 7168, intermediate) for kind in _KINDS for intermediate in (2048, 512)),
)
"""Those whose plans come with the package: of DeepSeek-R1, of one rank of four of it, and of
Qwen3-8B's linears."""
