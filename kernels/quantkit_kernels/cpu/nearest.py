"""Groups of weights on a CPU, by nearest.cpp: their extremes, the best of several scales, the
nearest values of a grid, each with PyTorch's bits."""

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import once

_INTEGER, _INTEGER_WITH_ZERO, _E2M1, _E4M3 = range(4)
"""Grids, as levels.h numbers them."""
_LANES = 16
"""Widths are multiples of it: the longest vector of the C++."""


def has_nearest(groups: Tensor) -> bool:
    """Whether the functions below take these groups, and the C++ is there or can be compiled."""
    return (
        groups.device.type == "cpu"
        and groups.dtype == torch.float32
        and groups.stride(-1) == 1
        and groups.shape[-1] % _LANES == 0
        and groups.numel() > 0
        and once("nearest") is not None
    )


def extremes(groups: Tensor) -> Tensor:
    """groups float32 [..., G, N, g] -> least and largest of each, [..., G, N, 2]."""
    batch = _batch(groups)
    found = groups.new_empty(*groups.shape[:-1], 2)
    _call("qk_extremes", (batch, found), *batch.shape, *batch.stride()[:3])
    return found


def best_scale(
    groups: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    importance: Tensor | None,
    kind: str,
    code_range: tuple[int, int] | None,
) -> tuple[Tensor, Tensor | None]:
    """The scale and the zero point, float32 [..., G, N], with the least (weighted) squared error,
    the first of equals. groups float32 [..., G, N, g]; scales, zeros [C, ..., G, N], contiguous: of
    C candidates; importance [..., G, 1, g]; kind, code_range: a quantizer's."""
    assert all(t is None or t.is_contiguous() for t in (scales, zeros)), "not contiguous"
    batch, found = _batch(groups), torch.empty_like(scales[0])
    zero, weight, apart = None if zeros is None else torch.empty_like(found), None, (0, 0)
    if importance is not None:
        shape = *groups.shape[:-2], 1, groups.shape[-1]
        weight = _batch(importance.expand(shape))
        apart = weight.stride(0), weight.stride(1)
    _call(
        "qk_best_scale",
        (batch, scales, zeros, weight, found, zero),
        *(grid_number(kind, zeros), len(scales), *batch.shape, *batch.stride()[:3], *apart),
        *(code_range or (0, 0)),
    )
    return found, zero


def nearest(
    groups: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    code_range: tuple[int, int] | None,
) -> Tensor:
    """groups float32 [..., G, N, g] -> the nearest values of the grid for scales and zeros [...,
    G, N], as weights [..., N, G g]."""
    *lead, count, rows, width = groups.shape
    batch, found = _batch(groups), groups.new_empty(*lead, rows, count * width)
    scales = scales.expand(*lead, count, rows).contiguous()
    zeros = None if zeros is None else zeros.expand(*lead, count, rows).contiguous()
    _call(
        "qk_nearest",
        (batch, scales, zeros, found),
        *(grid_number(kind, zeros), *batch.shape, *batch.stride()[:3], *(code_range or (0, 0))),
    )
    return found


def _batch(groups: Tensor) -> Tensor:
    """[..., G, N, g] or [N, g] with one leading dimension before the groups."""
    return groups.reshape(-1, *(1, *groups.shape)[-3:])


def grid_number(kind: str, zeros: Tensor | None) -> int:
    """How the C++ knows a quantizer's kind, with zero points or without."""
    return {"fp4": _E2M1, "fp8": _E4M3}.get(kind, _INTEGER if zeros is None else _INTEGER_WITH_ZERO)


def _call(function: str, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    getattr(once("nearest"), function)(*addresses, *numbers, torch.get_num_threads())
