"""A kernel call as a value: which kernel, how many programs, which arguments. `run` is the only
line that needs an NPU."""

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit_kernels.arguments import require
from quantkit_kernels.ascend.chip import ROUTER_TILE, SPAN, cores
from quantkit_kernels.ascend.layout import PackedTiles

Arguments = tuple[Tensor | int, ...]
FEW_TOKENS = "few_tokens"
"""Where kernels lie that are not in kernels.py."""


@dataclass(frozen=True)
class KernelLaunch:
    kernel: str
    programs: int
    args: Arguments
    constants: dict[str, Any]
    module: str = "kernels"

    @property
    def function(self) -> Any:
        """The kernel itself; importing it needs Triton."""
        return getattr(
            importlib.import_module(f"quantkit_kernels.ascend.{self.module}"), self.kernel
        )


def rows(packed: PackedTiles, x: Tensor, experts: Tensor, out: Tensor) -> KernelLaunch:
    """out[r] = x[r] @ W[experts[r]].T on the vector cores. x [R, k]; experts int32 [R]; out [R,
    n]."""
    assert packed.kind in ("int4", "fp4"), packed.kind
    items = out.shape[0] * packed.tiles
    args: Arguments = (
        x,
        *packed.tensors,
        experts,
        out,
        items,
        packed.n,
        packed.k,
        *_groups(packed),
    )
    return KernelLaunch(
        f"{packed.kind}_rows", min(items, cores(x.device)[1]), args, _constants(packed)
    )


def gate_up(packed: PackedTiles, x: Tensor, experts: Tensor, out: Tensor) -> KernelLaunch:
    """out[r] = SwiGLU of x[r // k] by gate and up of experts[r], on the vector cores. x [T, H];
    experts int32 [T * k]; out [T * k, n / 2]."""
    items = out.shape[0] * packed.tiles // 2
    args: Arguments = (
        x,
        *packed.tensors,
        experts,
        out,
        items,
        packed.n,
        packed.k,
        *_groups(packed),
        experts.shape[0] // x.shape[0],
    )
    return KernelLaunch(
        f"{packed.kind}_gate_up",
        min(items, cores(x.device)[1]),
        args,
        _constants(packed),
        FEW_TOKENS,
    )


def down(
    packed: PackedTiles, x: Tensor, experts: Tensor, weights: Tensor, out: Tensor
) -> KernelLaunch:
    """out[t] = the weighted sum of x[r] @ W[experts[r]].T over the k rows of t, on the vector
    cores. x [T * k, I]; experts int32 [T * k]; weights float32 [T * k]; out [T, n]."""
    items = out.shape[0] * packed.tiles
    args: Arguments = (
        x,
        *packed.tensors,
        experts,
        weights,
        out,
        items,
        packed.n,
        packed.k,
        *_groups(packed),
        x.shape[0] // out.shape[0],
    )
    return KernelLaunch(
        f"{packed.kind}_down", min(items, cores(x.device)[1]), args, _constants(packed), FEW_TOKENS
    )


@dataclass(frozen=True)
class Blocks:
    """Which rows go by which expert on the cube, int32 [blocks] each: from `first` to `last`, at
    most `rows`; expert -1 for a block that is left alone."""

    rows: int
    experts: Tensor
    first: Tensor
    last: Tensor


def blocks(
    packed: PackedTiles, x: Tensor, row_scale: Tensor | None, of: Blocks, out: Tensor
) -> KernelLaunch:
    """out[r] = x[r] @ W[expert of r].T on the cube. x [M, k], int8 with row_scale [M] for int8
    weights; out [M, n].

    ValueError for more rows than the kernels' offsets, of 32 bits, can distinguish.
    """
    most = (2**31 - 1) // max(packed.n, packed.k)
    require(
        x.shape[0] <= most,
        f"x: {x.shape[0]} rows, at most {most} of {packed.k} inputs and {packed.n} outputs: give "
        "fewer tokens",
    )
    assert (row_scale is not None) == (packed.kind == "int8"), packed.kind
    items = of.experts.shape[0] * packed.tiles
    scales = () if row_scale is None else (row_scale,)
    args: Arguments = (
        x,
        *scales,
        *packed.tensors,
        of.experts,
        of.first,
        of.last,
        out,
        items,
        packed.n,
        packed.k,
        *_groups(packed),
    )
    constants = {**_constants(packed), "BM": of.rows}
    if packed.kind == "int8":
        constants["BK"] = SPAN
    return KernelLaunch(f"{packed.kind}_blocks", min(items, cores(x.device)[0]), args, constants)


def assign(counts: Tensor, of: Blocks) -> KernelLaunch:
    """Fills the blocks with the rows of experts that have counts int64 [E] of them, one expert
    after the other."""
    args: Arguments = (counts, of.experts, of.first, of.last, counts.shape[0], of.experts.shape[0])
    return KernelLaunch("assign", 1, args, {"BM": of.rows})


def router(x: Tensor, weight: Tensor, out: Tensor) -> KernelLaunch:
    """out = x @ weight.T in float32 on the vector cores. x 16-bit [T, H]; weight float32 [E, H];
    out float32 [T, E]."""
    experts, hidden = weight.shape
    rows_of_tile, width = ROUTER_TILE
    items = x.shape[0] * -(-experts // rows_of_tile)
    constants = {"BN": rows_of_tile, "BK": width}
    return KernelLaunch(
        "router",
        min(items, cores(x.device)[1]),
        (x, weight, out, items, experts, hidden),
        constants,
        FEW_TOKENS,
    )


def join(
    ids: Tensor, weights: Tensor, joined_ids: Tensor, joined_weights: Tensor, first: int
) -> KernelLaunch:
    """joined_ids int32 and joined_weights [T, columns]: ids int32 and weights float32 [T, k], then
    experts first, first + 1, .. of weight 1."""
    tokens, columns = joined_ids.shape
    args: Arguments = (
        ids,
        weights,
        joined_ids,
        joined_weights,
        tokens,
        ids.shape[1],
        columns,
        first,
    )
    width = 1 << (columns - 1).bit_length()
    return KernelLaunch(
        "join", min(tokens, cores(ids.device)[1]), args, {"BK": max(width, 8)}, FEW_TOKENS
    )


def _groups(packed: PackedTiles) -> tuple[int, ...]:
    return (packed.k // packed.group,) if packed.kind == "int4" else ()


def _constants(packed: PackedTiles) -> dict[str, Any]:
    grouped = {"GROUP": packed.group, "HAS_ZERO": packed.has_zero} if packed.kind == "int4" else {}
    return {**grouped, "BN": packed.bn}


def run(launch: KernelLaunch) -> None:
    launch.function[(launch.programs,)](*launch.args, **launch.constants)
