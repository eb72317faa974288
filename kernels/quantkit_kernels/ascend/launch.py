"""A kernel call as a value: which kernel, how many programs, which arguments. `run` is the only line that needs an NPU."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit_kernels.ascend.chip import SPAN, cores
from quantkit_kernels.ascend.layout import PackedTiles


@dataclass(frozen=True)
class KernelLaunch:
    kernel: str
    programs: int
    args: tuple[Tensor | int, ...]
    constants: dict[str, Any]


def rows(packed: PackedTiles, x: Tensor, experts: Tensor, out: Tensor, rows_per_x: int = 1) -> KernelLaunch:
    """out[r] = x[r // rows_per_x] @ W[experts[r]].T on the vector cores. x [R / rows_per_x, k]; experts int32 [R]; out [R, n]."""
    assert packed.kind in ("int4", "fp4"), packed.kind
    items = out.shape[0] * packed.tiles
    head: tuple[Tensor | int, ...] = (x, *packed.tensors, experts, out, items, packed.n, packed.k)
    programs = min(items, cores(x.device)[1])
    if packed.kind == "fp4":
        return KernelLaunch("fp4_rows", programs, (*head, rows_per_x), {"BN": packed.bn})
    constants = {"GROUP": packed.group, "HAS_ZERO": packed.has_zero, "BN": packed.bn}
    return KernelLaunch("int4_rows", programs, (*head, packed.k // packed.group, rows_per_x), constants)


def blocks(packed: PackedTiles, x: Tensor, row_scale: Tensor | None, experts: Tensor, out: Tensor, bm: int) -> KernelLaunch:
    """out[b] = x[b] @ W[experts[b]].T for blocks of bm rows on the cube. x [M, k], int8 with row_scale [M] for int8 weights;
    experts int32 [ceil(M / bm)], -1 for a block to leave alone; out [M, n]."""
    assert (row_scale is not None) == (packed.kind == "int8"), packed.kind
    items = experts.shape[0] * packed.tiles
    scales = () if row_scale is None else (row_scale,)
    args: tuple[Tensor | int, ...] = (x, *scales, *packed.tensors, experts, out, items, x.shape[0], packed.n, packed.k)
    programs = min(items, cores(x.device)[0])
    constants: dict[str, Any] = {"BM": bm, "BN": packed.bn}
    if packed.kind == "int4":
        constants = {"GROUP": packed.group, "HAS_ZERO": packed.has_zero, **constants}
        return KernelLaunch("int4_blocks", programs, (*args, packed.k // packed.group), constants)
    if packed.kind == "int8":
        constants["BK"] = SPAN
    return KernelLaunch(f"{packed.kind}_blocks", programs, args, constants)


def run(launch: KernelLaunch) -> None:
    from quantkit_kernels.ascend import kernels

    getattr(kernels, launch.kernel)[(launch.programs,)](*launch.args, **launch.constants)
