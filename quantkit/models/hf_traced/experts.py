"""Modules of stacked experts: their tensors, the names in checkpoints, and what one expert
computes.

Supported are modules that transformers calls with (x, experts of each token, their weights), or, as
Llama 4's, with one input per expert that is zero for tokens not routed to it, if their experts are
gated MLPs, down(f(gate(x)) * up(x)) with any f, or with another elementwise function of both, or as
Nemotron-H's have no gate, down(f(up(x))): what is said of a gate is then said of up. This is
verified by running the module, shrunk to two small experts, and comparing with the formula. The
place of each expert in a checkpoint is found by passing numbered entries through transformers' own
conversion to published names.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from quantkit_kernels import Gating
from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.checkpoint.stacked_experts import Stack

Elementwise = Callable[[Tensor, Tensor], Tensor]
"""f(gate) * up, or another function of both, clamped ones for one."""
_SAME = 1e-9


class UnsupportedExperts(Exception):
    """A module of experts of another kind, or with another storage layout; the text says which."""


@dataclass(frozen=True)
class ExpertsCall:
    """The arguments of a module of experts. x [R, H]; topk_ids int64 [R, k]; topk_weights [R, k];
    shape: of its result; places: of the rows in the result, where every expert has its own input
    and output."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    shape: torch.Size
    places: Tensor | None = None

    @classmethod
    def of(cls, given: Sequence[Any], count: int) -> "ExpertsCall | None":
        """given: the call's arguments; count: number of experts. None for another kind of call. For
        inputs [E * T, H] a row is a token, in order, if each is routed to at most one expert; else
        a pair of expert and token."""
        if not all(isinstance(one, Tensor) for one in given):
            return None
        if len(given) == 3 and not given[1].is_floating_point():
            x, topk_ids, topk_weights = given
            return cls(x.reshape(-1, x.shape[-1]), topk_ids, topk_weights, x.shape)
        if (
            len(given) != 1
            or not given[0].is_floating_point()
            or given[0].numel() % (count * given[0].shape[-1])
        ):
            return None
        rows = given[0].reshape(-1, given[0].shape[-1])
        used = (rows != 0).any(-1).view(count, -1)
        if int(used.sum(0).max()) > 1:
            ids, tokens = used.nonzero(as_tuple=True)
        else:
            ids, tokens = used.int().argmax(0), torch.arange(used.shape[1], device=rows.device)
        places = ids * used.shape[1] + tokens
        return cls(
            rows[places],
            ids[:, None],
            used[ids, tokens][:, None].to(rows.dtype),
            given[0].shape,
            places,
        )

    def result(self, made: Tensor) -> Tensor:
        """made [R, H], of every row -> the module's return value."""
        if self.places is None:
            return made.view(self.shape)
        return (
            made.new_zeros(self.shape)
            .view(-1, made.shape[-1])
            .index_copy(0, self.places, made)
            .view(self.shape)
        )


@dataclass(frozen=True)
class StackedExperts:
    """One module of experts. names: of each expert's gate, up and down in the checkpoint, or as
    `stacks` are split; without a gate up twice. parameters: its own tensors, in transformers'
    names. width: inner channels of an expert. zero_expert_scale: factor of the input in the output for an index after the
    experts: 1 if it is passed through, as by LongCat-Flash's zero experts, 0 if it is not an
    expert."""

    names: tuple[tuple[str, str, str], ...]
    stacks: tuple[Stack, ...]
    parameters: frozenset[str]
    width: int
    gating: Gating
    zero_expert_scale: float = 0.0


@dataclass(frozen=True)
class TracedGating(Gating):
    """The function of gate and up of a transformers module."""

    function: Elementwise = torch.mul
    has_gate: bool = True

    @property
    def is_linear_in_up(self) -> bool:
        if not self.has_gate:
            return False
        gate, up = torch.linspace(-30, 30, 61), torch.logspace(-2, 4, 61)
        return torch.equal(self(gate, 2 * up), 2 * self(gate, up))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.function(gate, up)


def experts_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer that hold matrices of several experts in one tensor."""
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Conv1d) and any(
            one.dim() == 3 for one in module.parameters(recurse=False)
        ):
            yield name, module


def trace_experts(model: Any, name: str, module: nn.Module) -> StackedExperts:
    """name: of the module in the model. Raises UnsupportedExperts."""
    tensors, zero_expert_scale = _identify(module)
    names, stacks = _published_names(model, name, tensors)
    parameters = frozenset(f"{name}.{key}" for key in (tensors.inner, tensors.outer))
    return StackedExperts(
        names,
        stacks,
        parameters,
        tensors.width,
        TracedGating(function=_gating(module, tensors.has_gate), has_gate=tensors.has_gate),
        zero_expert_scale,
    )


@dataclass(frozen=True)
class _ExpertTensors:
    """Names of the parameters: gates and ups, [E, 2I, H], and downs [E, H, I]; or transposed, [E,
    H, 2I] and [E, I, H]. has_gate: else the first has ups alone, I for 2I. spare: indices of the
    first beyond those of the second, which are not experts."""

    inner: str
    outer: str
    transposed: bool
    count: int
    width: int
    hidden: int
    has_gate: bool = True
    spare: int = 0

    def shapes(
        self, count: int, width: int, hidden: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of both, for other sizes."""
        inner, outer = (width * (2 if self.has_gate else 1), hidden), (hidden, width)
        places = count + self.spare
        return (
            ((places, *inner[::-1]), (count, *outer[::-1]))
            if self.transposed
            else ((places, *inner), (count, *outer))
        )

    def each(self, gate_up: Tensor, down: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Matrices of every expert's gate, up and down, [I, H], [I, H] and [H, I]."""
        inner, outer = (gate_up.mT, down.mT) if self.transposed else (gate_up, down)
        if not self.has_gate:
            return [(one, one, last) for one, last in zip(inner, outer)]
        return [(*one.chunk(2), last) for one, last in zip(inner, outer)]


def _identify(module: nn.Module) -> tuple[_ExpertTensors, float]:
    """What the tensors are, and `StackedExperts.zero_expert_scale`: the first way in which the
    module computes the formula."""
    fault = None
    for tensors in _fitting_tensors(module):
        try:
            return tensors, _check_formula(module, tensors)
        except UnsupportedExperts as found:
            fault = fault or found
    if fault is not None:
        raise fault
    own = {key: list(one.shape) for key, one in module._parameters.items() if one is not None}
    reason = ", ".join(f"{key} {shape}" for key, shape in own.items())
    raise UnsupportedExperts(f"the experts of {type(module).__name__} hold {reason}")


def _fitting_tensors(module: nn.Module) -> Iterator[_ExpertTensors]:
    """What the module's two tensors may be by their shapes."""
    own = {key: tuple(one.shape) for key, one in module._parameters.items() if one is not None}
    if len(own) != 2:
        return
    for has_gate, inner, outer, transposed in product((True, False), own, own, (False, True)):
        if inner != outer and len(own[inner]) == len(own[outer]) == 3:
            hidden, width = own[outer][2:0:-1] if transposed else own[outer][1:]
            spare = max(0, own[inner][0] - own[outer][0])
            count = own[outer][0]
            found = _ExpertTensors(inner, outer, transposed, count, width, hidden, has_gate, spare)
            if found.shapes(count, width, hidden) == (own[inner], own[outer]):
                yield found


def _gating(module: Any, has_gate: bool) -> Elementwise:
    """The module's _apply_gate, or its act_fn of the gate times up; without a gate act_fn of up."""
    own = getattr(module, "_apply_gate", None)
    if own is None or not has_gate:
        activation = module.act_fn
        if not has_gate:
            return lambda gate, up: activation(up)
        return lambda gate, up: activation(gate) * up
    return lambda gate, up: own(torch.cat((gate, up), dim=-1))


def _check_formula(module: Any, tensors: _ExpertTensors) -> float:
    """Verify that the module, shrunk to two experts of 6 and 4 channels, computes the formula.
    Returns `StackedExperts.zero_expert_scale`."""
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in tensors.shapes(2, 4, 6))
    x = torch.randn(5, 6, generator=generator)
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    reason = "is called otherwise"
    for small in _shrink(module, tensors, gate_up, down):
        try:
            with torch.no_grad():
                gating = _gating(small, tensors.has_gate)
                made = [
                    F.linear(gating(F.linear(x, gate), F.linear(x, up)), last)
                    for gate, up, last in tensors.each(gate_up, down)
                ]
                chosen = torch.stack(made, 1).gather(1, ids[:, :, None].expand(-1, -1, 6))
                if _agrees(small(x, ids, weights), (chosen * weights[:, :, None]).sum(1)):
                    return _zero_expert_scale(small, x, weights) if tensors.spare else 0.0
        except Exception as fault:  # a module may fail in any way
            reason = f"is called otherwise ({fault!s:.60})"
            try:
                with torch.no_grad():
                    if _agrees(small(x.repeat(2, 1)), torch.cat(made)):
                        return 0.0
            except Exception:  # likewise
                continue
        reason = "computes no gated MLPs, down(f(gate(x)) * up(x)), nor down(f(up(x)))"
    raise UnsupportedExperts(f"the module of experts {type(module).__name__} {reason}")


def _zero_expert_scale(small: Any, x: Tensor, weights: Tensor) -> float:
    """Output for the first index after two experts, relative to its input."""
    made = small(x, torch.full(weights.shape, 2), weights)
    if not float(made.abs().max()):
        return 0.0
    if _agrees(made, x * weights.sum(1, keepdim=True)):
        return 1.0
    raise UnsupportedExperts(
        f"{type(small).__name__} computes something of its own for an index after the experts"
    )


def _agrees(found: Tensor, expected: Tensor) -> bool:
    return (
        found.shape == expected.shape
        and float((found - expected).square().sum() / expected.square().sum()) < _SAME
    )


def _shrink(module: Any, tensors: _ExpertTensors, gate_up: Tensor, down: Tensor) -> Iterator[Any]:
    """The module with these tensors, and its size attributes adapted; all combinations where two
    sizes are equal numbers."""
    sizes: dict[int, list[int]] = {}
    for size, small in (
        (tensors.count, 2),
        (tensors.hidden, 6),
        (tensors.width, 4),
        (2 * tensors.width, 8),
    ):
        sizes.setdefault(size, []).append(small)
    known = {
        key: sizes[value]
        for key, value in vars(module).items()
        if type(value) is int and value in sizes
    }
    for values in product(*known.values()):
        small = copy.copy(module)
        small._parameters = {
            key: nn.Parameter(one, requires_grad=False)
            for key, one in ((tensors.inner, gate_up), (tensors.outer, down))
        }
        small.__dict__ |= dict(zip(known, values))
        small.config = copy.copy(module.config) if hasattr(module, "config") else None
        if small.config is not None:
            small.config._experts_implementation = "eager"
        yield small


def _published_names(
    model: Any, name: str, tensors: _ExpertTensors
) -> tuple[tuple[tuple[str, str, str], ...], tuple[Stack, ...]]:
    """Names of every expert's gate, up and down, and the stacks that must be split for them."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = tensors.shapes(tensors.count, 2, 3)
    sizes = [math.prod(shape) for shape in shapes]
    gate_up, down = (
        part.view(shape)
        for part, shape in zip(torch.arange(sum(sizes), dtype=torch.float64).split(sizes), shapes)
    )
    published = revert_weight_conversion(
        model, {f"{name}.{tensors.inner}": gate_up, f"{name}.{tensors.outer}": down}
    )
    by_first = {float(one.flatten()[0]): (key, one) for key, one in published.items()}
    expected = tensors.each(gate_up, down)
    if all(_is_published(by_first, one) for parts in expected for one in parts):
        names = [tuple(by_first[float(one.flatten()[0])][0] for one in parts) for parts in expected]
        return tuple(names), ()  # type: ignore[arg-type]
    # A conversion that transposes tensors whose shape differs from the model's, as here, accepts
    # both orientations.
    either = not all(_is_published(by_first, one) for one in (gate_up, down))
    if not all(_is_published(by_first, one.mT if either else one) for one in (gate_up, down)):
        raise UnsupportedExperts(
            f"checkpoints hold {name} in another form than one matrix an expert, or all in one "
            "tensor"
        )
    first = "gate" if tensors.has_gate else "up"
    triples = tuple(
        (
            f"{name}.{e}.{first}_proj.weight",
            f"{name}.{e}.up_proj.weight",
            f"{name}.{e}.down_proj.weight",
        )
        for e in range(tensors.count)
    )
    stacks = (
        Stack(
            by_first[0.0][0],
            tuple((gate, up) if tensors.has_gate else (up,) for gate, up, _ in triples),
            (tensors.width, tensors.hidden),
            tensors.transposed,
            either,
        ),
        Stack(
            by_first[float(down.flatten()[0])][0],
            tuple((last,) for _, _, last in triples),
            (tensors.hidden, tensors.width),
            tensors.transposed,
            either,
        ),
    )
    return triples, stacks


def _is_published(by_first: dict[float, tuple[str, Tensor]], part: Tensor) -> bool:
    found = by_first.get(float(part.flatten()[0]))
    return found is not None and found[1].shape == part.shape and torch.equal(found[1], part)
