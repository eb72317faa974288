"""The model's weights as prepared kernels: what the executor answers to a forward's questions (`models.weights.Weights`).

Each linear is read from the checkpoint, decoded to its format-neutral value, and laid out for a kernel backend once. Nothing is read
twice and nothing unpacked stays: peak memory is what is prepared so far plus one linear, or one expert.
"""

import quantkit_kernels as kernels
import torch
from quantkit_kernels.weights import stack
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.models.table import Parameter
from quantkit.models.weights import ExpertsOp, LinearOp
from quantkit.quant.weights import Fp4Weight, IntWeight, Weight, dequantize


class ExecutorWeights:
    """Prepares for one device.

    backend: a kernel backend's name, or "auto". dtype: of activations. parameters: the model's table.
    """

    def __init__(
        self, checkpoint: Checkpoint, parameters: list[Parameter], *, device: torch.device, dtype: torch.dtype, backend: str = "auto"
    ) -> None:
        self.checkpoint = checkpoint
        self.device, self.dtype, self.backend = device, dtype, backend
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self.nbytes = 0
        """Bytes held by everything handed out so far."""

    def tensor(self, name: str) -> Tensor:
        """As `Weights.tensor`: float32 for the router and its bias, the compute dtype for the rest."""
        router = self._parameters[name].role in ("router", "router_bias")
        value = self.checkpoint.read(name).to(self.device, torch.float32 if router else self.dtype)
        self.nbytes += value.numel() * value.element_size()
        return value

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def dense(self, module: str) -> Tensor:
        value = dequantize(self.checkpoint.weight(module), self.dtype).to(self.device)
        self.nbytes += value.numel() * value.element_size()
        return value

    def linear(self, module: str) -> LinearOp:
        return self._prepare(self._operand(module))

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        """One operator where the weights are on one grid; else one each, their outputs side by side."""
        operands = [self._operand(module) for module in modules]
        fused = operands[0]
        for operand in operands[1:]:
            if not _alike(fused, operand):
                return SideBySide([self._prepare(one) for one in operands])
            fused = stack(fused, operand)
        return self._prepare(fused)

    def experts(self, prefix: str, num_experts: int) -> ExpertsOp:
        builder = kernels.ExpertsBuilder(num_experts, backend=self.backend, dtype=self.dtype, device=self.device)
        for expert in range(num_experts):
            gate, up, down = (self._operand(f"{prefix}.{expert}.{side}_proj") for side in ("gate", "up", "down"))
            try:
                builder.add(expert, gate, up, down)
            except ValueError as fault:
                raise QuantkitError(f"{prefix}.{expert} cannot be prepared: {fault}", "quantize all experts of a layer alike") from fault
        experts = builder.finish()
        self.nbytes += experts.nbytes
        return experts

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def _operand(self, module: str) -> kernels.Weight:
        return operand(self.checkpoint.weight(module), self.dtype)

    def _prepare(self, weight: kernels.Weight) -> kernels.Linear:
        try:
            linear = kernels.prepare(weight, backend=self.backend, dtype=self.dtype, device=self.device)
        except ValueError as fault:
            raise QuantkitError(str(fault), "choose another --backend (`quantkit kernels` lists them)") from fault
        self.nbytes += linear.nbytes
        return linear


class SideBySide:
    """Linears on different grids that read the same input."""

    def __init__(self, linears: list[kernels.Linear]) -> None:
        self.linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def operand(weight: Weight, dtype: torch.dtype) -> kernels.Weight:
    """The kernel operand of a weight: the one place where a grid is matched to an operator.

    int8 per channel runs with int8 activations; int4 and FP4 are weight-only; everything else, FP8 blocks included, is expanded to `dtype`.
    """
    match weight:
        case IntWeight(bits=4) if weight.group_size in (32, 64, 128):
            return kernels.Int4(weight.codes, weight.scale, weight.zero_point)
        case IntWeight(bits=8) if weight.scale.shape[1] == 1 and weight.zero_point is None:
            return kernels.Int8(weight.codes, weight.scale)
        case Fp4Weight():
            return kernels.Fp4(weight.codes, weight.scale, weight.global_scale)
        case _:
            return kernels.Dense(dequantize(weight, dtype))


def _alike(first: kernels.Weight, second: kernels.Weight) -> bool:
    """Whether two operands can be rows of one: the same grid, groups and zero points."""
    if type(first) is not type(second) or first[0].shape[1] != second[0].shape[1]:
        return False
    if isinstance(first, kernels.Int4) and isinstance(second, kernels.Int4):
        return first.scale.shape[1] == second.scale.shape[1] and (first.zero_point is None) == (second.zero_point is None)
    return True
