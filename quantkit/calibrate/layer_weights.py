"""One decoder layer's weights in float32, each linear's input shown to an observer: calibration's
answer to a forward's questions.

The routed experts are not here: `experts` is whatever operator the caller puts in, which may record
what the experts are asked.
"""

from collections.abc import Callable, Mapping

import torch
from quantkit_kernels import SILU, Gating, UnsummedPairs, add_rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.activation_quant import AS_IT_IS, Reading
from quantkit.models.rope import Rope
from quantkit.models.weights import ExpertsOp, LinearOp, PrologOp

Observer = Callable[[str, Tensor], None]
"""(module, its input [T, K]). Linears that share an input are observed once, under the first one's
name."""


NO_READINGS: Mapping[str, Reading] = {}


class LayerWeights:
    """tensors: by full name, float32, on one device. Looked up at every call, so a caller may
    exchange a weight between calls.

    unread: linears whose outputs nobody looks at in this run; they answer zeros. readings: of
    linears that round what they read.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        experts: ExpertsOp | None = None,
        observer: Observer | None = None,
        unread: frozenset[str] = frozenset(),
        readings: Mapping[str, Reading] = NO_READINGS,
    ) -> None:
        self.tensors = tensors
        self.routed = experts
        self.observer = observer
        self.unread, self.readings = unread, readings
        self.sites: dict[str, tuple[str, ...]] = {}
        """Linears that read one input, by the name it is observed under."""

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dequantized(self, module: str) -> Tensor:
        return self.tensors[f"{module}.weight"]

    def linear(self, module: str) -> LinearOp:
        return self.fused_linear((module,))

    def linear_of(self, module: str, site: tuple[str, ...]) -> LinearOp:
        """The linear `module`, one of those of `site`, which read the same tensor: it is observed
        under the first one's name, once."""
        self.sites[site[0]] = site

        def apply(x: Tensor) -> Tensor:
            if self.observer is not None and module == site[0]:
                self.observer(module, x)
            return self._apply(self.readings.get(module, AS_IT_IS)(x), module)

        return apply

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        self.sites[modules[0]] = modules

        def apply(x: Tensor) -> Tensor:
            if self.observer is not None:
                self.observer(modules[0], x)
            rounded = next(
                (self.readings[module](x) for module in modules if module in self.readings), x
            )  # siblings read alike
            outputs = [
                self._apply(rounded if module in self.readings else x, module) for module in modules
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

        return apply

    def _apply(self, x: Tensor, module: str) -> Tensor:
        weight = self.tensors[f"{module}.weight"]
        return (
            x.new_zeros(*x.shape[:-1], len(weight))
            if module in self.unread
            else F.linear(x, weight)
        )

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        return None  # what its linears read is observed

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        assert self.routed is not None, f"no operator for the experts of {prefix}"
        return self.routed

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return None  # the inputs of the shared expert are observed

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(
        self, x: Tensor | UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(x, Tensor), "no operator here leaves pairs unsummed"
        return add_rms_norm(x, residual, gain, eps)
