"""Experts by the Ascend C kernels (kernels/ascendc), which decode while they read: int4 in groups
of 128, and FP4.

Five launches at any number of tokens, as with torch_npu's grouped product: routing, gate and up,
SwiGLU, down, weighted sum. Layouts are those that int4_grouped.cpp and fp4_gemv.cpp state, and
their NumPy twins pack; x is bfloat16. A layer's weights lie in one layout, so where they fit they
serve every number of tokens. By the cost model they are faster than the Triton kernels from one
sequence on, and slower on prompts (docs/lab/ascend.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.ascend import extension
from quantkit_kernels.ascend.chip import VECTOR_CORES, cores
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.torch_npu.calls import finalize_routing, init_routing
from quantkit_kernels.torch_npu.functional import silu_and_mul
from quantkit_kernels.weights import Fp4, Int4, Weight, group_size, kind, shape, stack, to_device

FP4_RESCALE = 2.0**7
"""E2M1 codes are decoded to 2^-14 of their value, e4m3 scales to 2^7 of theirs; the global scale
makes up for both."""
INT4_INPUTS = 8192
"""The most input features that int4_grouped has buffers for."""
_FP4_TILE_K, _MOST_SPLITS = 64, 16
Tensors = tuple[Tensor, ...]


def fits(weight: Weight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel takes experts with such weights, gate and up as one, and is there."""
    n, k = shape(weight)
    if dtype != torch.bfloat16:
        return False
    if isinstance(weight, Int4):
        return (
            group_size(weight) == 128
            and n % 256 == 0
            and k <= INT4_INPUTS
            and extension.has("int4_grouped", device)
        )
    return (
        isinstance(weight, Fp4)
        and n % 512 == 0
        and k % _FP4_TILE_K == 0
        and extension.has("fp4_gemv", device)
    )


def packed(weight: Weight) -> Tensors:
    """One expert's tensors, as the kernel of its grid reads them."""
    return PACKED[kind(weight)](weight)


def _int4(weight: Weight) -> Tensors:
    """Bytes uint8 [N / 256, K / 128, 2, 8192]; fp16 [N / 256, K / 128, 2, 2, 128]: 16 times the
    zero points, and the scales."""
    assert isinstance(weight, Int4), kind(weight)
    n, k = shape(weight)
    axes = weight.codes.reshape(
        n // 256, 2, 8, 16, k // 128, 2, 2, 32
    )  # N3 half N1 N0 group nibble K1 K0
    high, low = (axes.permute(5, 0, 4, 1, 6, 2, 3, 7) & 15).to(
        torch.uint8
    )  # nibble | N3 group half K1 N1 N0 K0
    zero = (
        torch.zeros_like(weight.scale)
        if weight.zero_point is None
        else 16 * weight.zero_point.float()
    )
    both = (
        torch.stack([zero, weight.scale]).to(torch.float16).reshape(2, n // 256, 2, 128, k // 128)
    )
    parameters = both.permute(1, 4, 2, 0, 3).contiguous()
    assert bool(parameters.isfinite().all()), "a scale is larger than float16 holds"
    return ((high << 4) | low).reshape(n // 256, k // 128, 2, -1), parameters


def _fp4(weight: Weight) -> Tensors:
    """Words int16 [N / 512, K / 64, 8192]; bits of e4m3 int8 [N / 512, K / 64, 4, 512]; float32
    [N]."""
    assert isinstance(weight, Fp4), kind(weight)
    n, k = shape(weight)
    axes = weight.codes.to(torch.int32).reshape(
        n // 512, 32, 16, k // 64, 4, 2, 8
    )  # N3 N1 N0 K3 K2 K1 K0
    planes = axes.permute(4, 0, 3, 5, 1, 6, 2)  # K2 | N3 K3 K1 N1 K0 N0
    words = planes[0] | planes[1] << 4 | planes[2] << 8 | planes[3] << 12
    scale = (
        weight.scale.view(torch.int8)
        .reshape(n // 512, 512, k // 64, 4)
        .permute(0, 2, 3, 1)
        .contiguous()
    )
    return (
        words.to(torch.int16).reshape(n // 512, k // 64, -1),
        scale,
        weight.global_scale.expand(n) * FP4_RESCALE,
    )


PACKED: dict[str, Callable[[Weight], Tensors]] = {"int4": _int4, "fp4": _fp4}


@dataclass(frozen=True)
class Streamed:
    """gate and up, or down, of all experts of a layer: W[n, k] each."""

    kind: str
    n: int
    k: int
    tensors: Tensors

    def times(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows bf16 [R, k], sorted by expert, times their experts' weights: [R, n]. ends int64 [E]:
        where each expert's rows end."""
        operators, (cube, vector) = torch.ops.quantkit_ascendc, cores(rows.device)
        if self.kind == "int4":
            product: Tensor = operators.int4_grouped(rows, *self.tensors, ends, cube)
        else:
            items = min(len(rows), len(ends)) * self.n / 512
            product = operators.fp4_gemv(
                rows,
                *self.tensors,
                ends,
                enough_splits(items, self.k // _FP4_TILE_K, vector),
                vector,
            )
        return product


def enough_splits(items: float, tiles: int, on: int = VECTOR_CORES) -> int:
    """Equal parts of K, at most 16, that deal items out to so many cores most evenly; the fewest of
    those within a hundredth a part."""
    parts = [one for one in range(1, _MOST_SPLITS + 1) if tiles % one == 0]
    return min(parts, key=lambda one: -(-items * one // on) / (items * one / on) + one / 100)


class StreamedExperts(Experts):
    def __init__(
        self, gate_up: Streamed, down: Streamed, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(len(down.tensors[0]), down.n, down.k, dtype, device, "ascend")
        self.gate_up, self.down = gate_up, down

    def held(self) -> list[Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows, places, ends, _ = init_routing(
            x.contiguous(), topk_ids.to(torch.int32), self.num_experts, quantize=False, ends=True
        )
        activated = silu_and_mul(self.gate_up.times(rows, ends))
        return finalize_routing(
            self.down.times(activated, ends), places, topk_weights.to(self.dtype)
        )


class StreamedLayout(ExpertsLayout):
    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_experts, self._dtype, self._device = num_experts, dtype, device
        self._rooms: tuple[Streamed, ...] = ()

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        weights = (to_device(stack(gate, up), self._device), to_device(down, self._device))
        parts = [packed(weight) for weight in weights]
        if not self._rooms:
            self._rooms = tuple(
                Streamed(kind(weight), *shape(weight), self._room(one))
                for weight, one in zip(weights, parts)
            )
        for room, one in zip(self._rooms, parts):
            for tensor, part in zip(room.tensors, one):
                tensor[index].copy_(part)

    def finish(self) -> StreamedExperts:
        gate_up, down = self._rooms
        return StreamedExperts(gate_up, down, self._dtype, self._device)

    def _room(self, parts: Tensors) -> Tensors:
        return tuple(
            torch.empty(self._num_experts, *part.shape, dtype=part.dtype, device=self._device)
            for part in parts
        )
