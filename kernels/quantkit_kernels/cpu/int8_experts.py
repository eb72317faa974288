"""A layer's experts with int8 weights by one call of the project's C++ (int8_experts.cpp), which
reads what their linears hold."""

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import library, why_no_library
from quantkit_kernels.cpu.int8 import VnniInt8Linear
from quantkit_kernels.reference.experts import LoopExperts, LoopLayout

_READ = (torch.bfloat16, torch.float32)
"""What int8_experts.cpp reads and writes."""


class Int8Experts(LoopExperts):
    """As a loop over the experts, to the bit."""

    def __init__(
        self, loop: LoopExperts, gate_up: list[VnniInt8Linear], down: list[VnniInt8Linear]
    ) -> None:
        super().__init__(
            loop.gate_up, loop.down, loop.dtype, loop.device, loop.backend, silu=loop.silu
        )
        self._table = torch.tensor(
            [(*first.addresses(), *last.addresses()) for first, last in zip(gate_up, down)]
        )
        self._blocks = (gate_up[0].block, down[0].block)
        self._compute = library("int8_experts").qk_int8_experts

    def held(self) -> list[Tensor]:
        return [*super().held(), self._table]

    def sorted(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self.check_ids(*(int(bound) for bound in topk_ids.aminmax()))
        rows, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        operands = (self._table, rows, topk_ids.int().contiguous(), topk_weights.contiguous(), y)
        sizes = (
            *topk_ids.shape,
            self.num_experts,
            self.hidden,
            self.intermediate,
            *self._blocks,
            torch.get_num_threads(),
        )
        self._compute(*(one.data_ptr() for one in operands), x.dtype == torch.bfloat16, *sizes)
        return y


class Int8ExpertsLayout(LoopLayout):
    """Linears as they come; one call for all where they lie in blocks for VNNI."""

    def finish(self) -> LoopExperts:
        loop = super().finish()
        gate_up = [linear for linear in loop.gate_up if isinstance(linear, VnniInt8Linear)]
        down = [linear for linear in loop.down if isinstance(linear, VnniInt8Linear)]
        in_blocks = len(gate_up) == len(down) == loop.num_experts
        if not in_blocks or loop.dtype not in _READ or why_no_library("int8_experts") is not None:
            return loop
        return Int8Experts(loop, gate_up, down)
