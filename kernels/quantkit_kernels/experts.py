"""The routed experts of one layer: for every token, sum over its experts of weight *
down(silu(gate(x)) * up(x)).

`ExpertsBuilder` takes the experts one at a time and lays each out at once, so the unpacked codes of
a whole layer (11 GB for an R1 layer) never exist together.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_compute_dtype,
    check_tensor,
    require,
)
from quantkit_kernels.gating import SILU, ExpertBiases, Gating
from quantkit_kernels.linear import laid_out, rounds_inputs
from quantkit_kernels.pairs import UnsummedPairs
from quantkit_kernels.weights import Weight, check_weight, dequantize, kind, shape, stack

NO_EXPERT = -1
"""An id that adds nothing, for `Experts` that have `takes_none`: of an expert that is elsewhere."""


class Experts(ABC):
    """The prepared experts of one layer. Call it with x[T, H] of `dtype`, topk_ids[T, k],
    topk_weights[T, k] float32; it returns [T, H].

    topk_ids are int32 or int64 in 0..num_experts-1 (checked on the CPU; on a device an id outside
    is undefined), or NO_EXPERT. A token may name an expert twice; its contributions add up. The
    products are summed in float32.
    """

    takes_none = False
    """Whether ids may be NO_EXPERT, where `routed_share` is below 1."""
    routed_share = 1.0
    """The share of a call's ids that name an expert, which kernels are chosen by; below 1 ids may
    be NO_EXPERT."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
    ) -> None:
        self.num_experts = num_experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.dtype = dtype
        self.device = device
        self.backend = backend

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        check_tensor("x", x, (None, self.hidden), (self.dtype,))
        check_tensor("topk_ids", topk_ids, (x.shape[0], None), INDEX_DTYPES)
        check_tensor("topk_weights", topk_weights, tuple(topk_ids.shape), (torch.float32,))
        if topk_ids.numel() == 0:
            return torch.zeros_like(x)
        return self.forward(x, topk_ids, topk_weights)

    def unsummed(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor | UnsummedPairs:
        """As the call; or its pairs, where the kernels leave them to the reader of the sum."""
        return self(x, topk_ids, topk_weights)

    @abstractmethod
    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """As the call, with arguments already checked and at least one token."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors kept between calls."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.held())

    @property
    def decoded_bytes(self) -> int:
        """Of weights that a call of many tokens decodes at a time, at most."""
        return 0


class ExpertsLayout(ABC):
    """What a backend does with experts as they come: `place` one, in any order, then `finish`."""

    @abstractmethod
    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None: ...

    @abstractmethod
    def finish(self) -> Experts: ...


class BiasedExpertsLayout(ExpertsLayout):
    """One that takes experts with biases too."""

    @abstractmethod
    def place(
        self, index: int, gate: Weight, up: Weight, down: Weight, biases: ExpertBiases | None = None
    ) -> None: ...


class StackedLayout(ExpertsLayout):
    """Decodes each expert, as it comes, into its place in the layer's two tensors: gate_up [E, 2I,
    H] and down [E, H, I] in `dtype`."""

    def __init__(
        self, num_experts: int, gate: Weight, dtype: torch.dtype, device: torch.device
    ) -> None:
        intermediate, hidden = shape(gate)
        self._gate_up = torch.empty(
            num_experts, 2 * intermediate, hidden, dtype=dtype, device=device
        )
        self._down = torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device)

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        self._gate_up[index] = dequantize(stack(gate, up))
        self._down[index] = dequantize(down)


class ExpertsBuilder:
    """Collects the experts of one layer in any order.

    >>> builder = ExpertsBuilder(256, dtype=torch.bfloat16, device="cuda")
    >>> for index in range(256):
    ...     builder.add(index, gate, up, down)      # Int4, Int8, Fp4 or Dense: gate and up [I, H], down [H, I]
    >>> experts = builder.finish()

    All experts of a layer have the same shapes and grids. gating: what is between gate, up and
    down, where it is not silu(gate) * up. Another one, and biases, are part of Triton's kernels and
    of torch's grouped product; of other backends such experts are a loop over their linears, and
    "auto" takes Triton's on a GPU. Raises ValueError naming what does not fit, an expert that is
    added twice, or, in `finish`, those that are missing.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        backend: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device | None = None,
        gating: Gating = SILU,
    ) -> None:
        require(num_experts > 0, f"num_experts: {num_experts}, expected at least 1")
        check_compute_dtype(dtype)
        self.num_experts = num_experts
        self._backend = backend
        self._dtype = dtype
        self._device = None if device is None else torch.device(device)
        self._gating = gating
        self._layout: ExpertsLayout | None = None
        self._signature: tuple[object, ...] = ()
        self._placed: set[int] = set()

    def add(
        self,
        index: int,
        gate: Weight,
        up: Weight,
        down: Weight,
        *,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Lay out expert `index`. gate and up are [I, H] on one grid, down is [H, I]. biases:
        float, of all experts or of none."""
        require(
            0 <= index < self.num_experts, f"index: {index}, expected 0..{self.num_experts - 1}"
        )
        require(index not in self._placed, f"index: expert {index} was already added")
        for weight in (gate, up, down):
            check_weight(weight)
        _check_expert(gate, up, down, biases)
        signature = (*(_form(weight) for weight in (gate, up, down)), biases is not None)
        if self._layout is None:
            self._layout = self._begin(gate, down, biases is not None)
            self._signature = signature
        require(
            signature == self._signature,
            f"expert {index} differs from the first one: {signature} against {self._signature}",
        )
        if biases is None:
            self._layout.place(index, gate, up, down)
        else:
            assert isinstance(self._layout, BiasedExpertsLayout), type(self._layout)
            self._layout.place(index, gate, up, down, biases)
        self._placed.add(index)

    def _begin(self, gate: Weight, down: Weight, biased: bool) -> ExpertsLayout:
        target, usual = (
            gate[0].device if self._device is None else self._device,
            not biased and self._gating == SILU,
        )
        rounds, shapes = rounds_inputs(gate), (_stacked(gate), shape(down))
        backend, silu = self._backend, self._gating.is_silu and not biased
        if backend == "auto" and not usual and not rounds and self._gating.is_formula:
            backend = backends.serving_gates(kind(gate), silu, backend, target, self._dtype, shapes)
        operator = "experts" if usual and not rounds else "linear"
        name = backends.choose(f"{operator}_{kind(gate)}", backend, target, self._dtype, shapes)
        found = backends.module(name)
        layout: ExpertsLayout
        if (
            rounds
        ):  # what is between the products is rounded, too, which no kernel of a whole layer does
            loop = backends.module("reference").LoopLayout
            layout = loop(
                self.num_experts, partial(laid_out, name), self._dtype, target, name, self._gating
            )
        elif usual:
            layout = found.experts_layout(self.num_experts, gate, down, self._dtype, target)
        elif backends.computes_gates(name, kind(gate), silu):
            layout = found.experts_layout(
                self.num_experts, gate, down, self._dtype, target, self._gating
            )
        else:
            loop = backends.module("reference").LoopLayout
            layout = loop(self.num_experts, found.linear, self._dtype, target, name, self._gating)
        return layout

    def finish(self) -> Experts:
        """The prepared layer, once every expert was added."""
        missing = sorted(set(range(self.num_experts)) - self._placed)
        require(
            not missing,
            f"{len(missing)} of {self.num_experts} experts were never added, the first is "
            f"{missing[:1]}",
        )
        assert self._layout is not None, "no expert was placed"
        experts = self._layout.finish()
        self._layout = None
        return experts


def prepare_experts(
    gate: Sequence[Weight],
    up: Sequence[Weight],
    down: Sequence[Weight],
    *,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Experts:
    """`ExpertsBuilder` over weights that are all at hand: gate[e] and up[e] [I, H], down[e] [H,
    I]."""
    require(
        len(gate) == len(up) == len(down),
        f"gate, up, down: {len(gate)}, {len(up)}, {len(down)} experts, expected as many of each",
    )
    builder = ExpertsBuilder(len(gate), backend=backend, dtype=dtype, device=device)
    for index, (one_gate, one_up, one_down) in enumerate(zip(gate, up, down)):
        builder.add(index, one_gate, one_up, one_down)
    return builder.finish()


def _stacked(gate: Weight) -> tuple[int, int]:
    """The shape of gate and up as one weight."""
    intermediate, hidden = shape(gate)
    return 2 * intermediate, hidden


def _form(weight: Weight) -> tuple[object, ...]:
    return kind(weight), *(None if part is None else tuple(part.shape) for part in weight)


def _check_expert(gate: Weight, up: Weight, down: Weight, biases: ExpertBiases | None) -> None:
    kinds = {kind(gate), kind(up), kind(down)}
    require(
        len(kinds) == 1,
        f"gate is {kind(gate)}, up is {kind(up)}, down is {kind(down)}, expected one grid for all",
    )
    intermediate, hidden = shape(gate)
    require(
        shape(up) == (intermediate, hidden),
        f"up: shape {list(shape(up))}, expected [{intermediate}, {hidden}] as gate",
    )
    require(
        shape(down) == (hidden, intermediate),
        f"down: shape {list(shape(down))}, expected [{hidden}, {intermediate}]",
    )
    for name, bias, size in zip(
        ExpertBiases._fields, biases or (), (intermediate, intermediate, hidden)
    ):
        check_tensor(f"biases.{name}", bias, (size,), FLOAT_DTYPES)
