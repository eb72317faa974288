"""One decoder layer's weights in float32 behind the interface that the model's forward uses, with
hooks on every linear input, and the routing of tokens to its experts.

Routed experts are not included: `experts` is any operator that the caller passes, such as a
`RoutingRecorder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from quantkit_kernels import SILU, Gating, UnsummedPairs, add_rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.activation_quant import NO_ACTIVATION_QUANT, ActivationQuant
from quantkit.models.rope import Rope
from quantkit.models.weights import ExpertsOp, LinearOp, PrologOp


def no_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Experts operator that returns zeros."""
    return torch.zeros_like(x)


class RoutingRecorder:
    """Experts operator that records its arguments for up to `capacity` tokens and returns zeros."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._recorded: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if not self._recorded:
            self._recorded = tuple(
                torch.empty(self.capacity, *t.shape[1:], dtype=t.dtype, device=t.device)
                for t in (x, topk_ids, topk_weights)
            )
        for recorded, new in zip(self._recorded, (x, topk_ids, topk_weights)):
            recorded[self.count : self.count + len(x)] = new
        self.count += len(x)
        return torch.zeros_like(x)

    def routed(self, fitted: int, quantized: int) -> "RoutedTokens | None":
        """What was recorded, with `fitted` and `quantized` as in `RoutedTokens`; None if it was
        never called."""
        if not self.count:
            return None
        x, topk_ids, topk_weights = (t[: self.count] for t in self._recorded)
        return RoutedTokens(x, topk_ids, topk_weights, fitted, quantized)


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens routed to one layer's experts, in the order: calibration, held out, held out on the
    original path.

    x float32 [T, H]; topk_ids [T, k]; topk_weights float32 [T, k]; fitted and quantized: numbers of
    leading tokens that are calibration, and that run through quantized experts; the rest run
    through the original ones.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    fitted: int
    quantized: int

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] routed to the expert, ascending, and their routing weights [n]."""
        tokens, slots = (self.topk_ids == expert).nonzero(as_tuple=True)
        return tokens, self.topk_weights[tokens, slots]

    def quantized_tokens_of(self, expert: int) -> tuple[Tensor, Tensor, int]:
        """As `of`, without the original path; and the number of calibration tokens, which come
        first."""
        tokens, w = self.of(expert)
        fitted, quantized = (int((tokens < end).sum()) for end in (self.fitted, self.quantized))
        return tokens[:quantized], w[:quantized], fitted

    def matrix(self, num_experts: int) -> Tensor:
        """Routing weights [T, E], zero where an expert was not chosen."""
        empty = torch.zeros(len(self.x), num_experts, device=self.x.device)
        return empty.scatter_(1, self.topk_ids, self.topk_weights)

    def counts(self, num_experts: int) -> Tensor:
        """Calibration tokens of every expert, int64 [E]."""
        return torch.bincount(self.topk_ids[: self.fitted].flatten(), minlength=num_experts)

    def agreement(self) -> float | None:
        """Share of (held-out token, slot) choices that the quantized and the original path have in
        common; None without held-out tokens."""
        held_out, original = (
            self.topk_ids[self.fitted : self.quantized],
            self.topk_ids[self.quantized :],
        )
        if not len(original):
            return None
        return float((held_out[:, :, None] == original[:, None, :]).any(-1).float().mean())


class RoutingUpdater:
    """Experts operator that overwrites the first tokens of `routed` with its arguments, and returns
    zeros. scale [H]: its input has been divided by it, unlike that of `routed`."""

    def __init__(self, routed: RoutedTokens, scale: Tensor) -> None:
        self.routed, self.scale, self.count = routed, scale, 0

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows = slice(self.count, self.count + len(x))
        self.count = rows.stop
        self.routed.x[rows] = x * self.scale
        self.routed.topk_ids[rows], self.routed.topk_weights[rows] = topk_ids, topk_weights
        return torch.zeros_like(x)


Observer = Callable[[str, Tensor], None]
"""(module, its input [T, K]). Linears that share an input are observed once, under the first one's
name."""


NO_ACTIVATION_QUANTS: Mapping[str, ActivationQuant] = {}


@dataclass(eq=False)
class LayerWeights:
    """tensors: by full name, float32, on one device. Looked up at every call, so a caller may
    replace a weight between calls.

    activation_quants: of linears with quantized inputs. product: of an input and a weight. sites:
    linears that read one input, by the name it is observed under.
    """

    tensors: Mapping[str, Tensor]
    routed: ExpertsOp | None = None
    observer: Observer | None = None
    activation_quants: Mapping[str, ActivationQuant] = field(default_factory=dict)
    product: Callable[[Tensor, Tensor], Tensor] = F.linear
    sites: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dequantized(self, module: str) -> Tensor:
        return self.tensors[f"{module}.weight"]

    def linear(self, module: str) -> LinearOp:
        return self.fused_linear((module,))

    def linear_of(self, module: str, site: tuple[str, ...]) -> LinearOp:
        """The linear `module`, one of `site`, which read the same tensor: it is observed once,
        under the first one's name."""
        self.sites[site[0]] = site

        def apply(x: Tensor) -> Tensor:
            if self.observer is not None and module == site[0]:
                self.observer(module, x)
            return self._apply(self.activation_quants.get(module, NO_ACTIVATION_QUANT)(x), module)

        return apply

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        self.sites[modules[0]] = modules

        def apply(x: Tensor) -> Tensor:
            if self.observer is not None:
                self.observer(modules[0], x)
            rounded = next(
                (
                    self.activation_quants[module](x)
                    for module in modules
                    if module in self.activation_quants
                ),
                x,
            )  # siblings have the same activation quantization
            outputs = [
                self._apply(rounded if module in self.activation_quants else x, module)
                for module in modules
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

        return apply

    def _apply(self, x: Tensor, module: str) -> Tensor:
        return self.product(x, self.tensors[f"{module}.weight"])

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        return None  # the inputs of its linears are observed

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
        assert isinstance(x, Tensor), "operators here return sums"
        return add_rms_norm(x, residual, gain, eps)
