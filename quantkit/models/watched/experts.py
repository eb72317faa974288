"""What a module of stacked experts holds, where checkpoints have it, and what one expert computes.

Of the modules that transformers calls with (x, experts of each token, their weights), those are known whose experts are gated MLPs,
down(f(gate(x)) * up(x)) with any f: that is seen by running the module itself, cut down to two small experts, beside that formula. Where
each expert lies in a checkpoint is seen by sending numbered entries through transformers' own conversion to published names.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from quantkit_kernels import Gating
from torch import Tensor, nn

from quantkit.checkpoint.stack import Stack

Activation = Callable[[Tensor], Tensor]
"""f of down(f(gate(x)) * up(x)), element by element."""
_SAME = 1e-9


class UnknownExperts(Exception):
    """A module of experts that is none of these, or is stored otherwise. The text says which."""


@dataclass(frozen=True)
class StackedExperts:
    """One module of experts. names: of each expert's gate, up and down on disk, or as `stacks` cut it up. parameters: its own tensors, in
    transformers' names. width: inner channels of an expert."""

    names: tuple[tuple[str, str, str], ...]
    stacks: tuple[Stack, ...]
    parameters: frozenset[str]
    width: int
    gating: Gating


@dataclass(frozen=True)
class WatchedGating(Gating):
    """f(g) * u, with f as a module of transformers has it."""

    activation: Activation = torch.relu

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


def experts_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer that hold matrices of several experts in one tensor."""
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Conv1d) and any(one.dim() == 3 for one in module.parameters(recurse=False)):
            yield name, module


def look_at_experts(model: Any, name: str, module: nn.Module) -> StackedExperts:
    """name: of the module in the model. Raises UnknownExperts where it is not understood."""
    inner, outer = _matrices(module)
    _check_computed(module, inner, outer)
    shapes = {key: tuple(one.shape) for key, one in module._parameters.items() if one is not None}
    names, stacks = _stored(model, name, inner, outer, shapes)
    parameters = frozenset(f"{name}.{key}" for key in shapes)
    return StackedExperts(names, stacks, parameters, shapes[outer][2], WatchedGating(activation=_activation(module)))


def _matrices(module: nn.Module) -> tuple[str, str]:
    """Names of the parameters [E, 2I, H], gates and then ups, and [E, H, I]."""
    own = {key: one.shape for key, one in module._parameters.items() if one is not None}
    pairs = [(a, b) for a in own for b in own if len(own[a]) == len(own[b]) == 3 and a != b]
    fits = [(a, b) for a, b in pairs if own[a][0] == own[b][0] and own[a][1] == 2 * own[b][2] and own[a][2] == own[b][1]]
    if len(own) != 2 or len(fits) != 1:
        held = ", ".join(f"{key} {list(shape)}" for key, shape in own.items())
        raise UnknownExperts(f"the experts of {type(module).__name__} hold {held}")
    return fits[0]


def _activation(module: Any) -> Activation:
    """Of the gate, as the module has it beside an up of ones."""
    own = module._apply_gate

    def apply(gate: Tensor) -> Tensor:
        made: Tensor = own(torch.cat((gate, torch.ones_like(gate)), dim=-1))
        return made

    return apply


def _check_computed(module: Any, inner: str, outer: str) -> None:
    """The module, cut down to two experts of 6 and 4 channels, computes the formula."""
    generator = torch.Generator().manual_seed(1)
    small = copy.copy(module)
    small._parameters = {
        inner: nn.Parameter(torch.randn(2, 8, 6, generator=generator), requires_grad=False),
        outer: nn.Parameter(torch.randn(2, 6, 4, generator=generator), requires_grad=False),
    }
    small.__dict__ |= {key: 2 for key, value in vars(module).items() if isinstance(value, int) and value == getattr(module, inner).shape[0]}
    small.config = copy.copy(module.config) if hasattr(module, "config") else None
    if small.config is not None:
        small.config._experts_implementation = "eager"
    x, ids = torch.randn(5, 6, generator=generator), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    try:
        with torch.no_grad():
            found = small(x, ids, weights)
            activation, (first, second) = _activation(small), (getattr(small, key) for key in (inner, outer))
            gate, up = (torch.einsum("th,eih->tei", x, first) * 1.0).chunk(2, dim=-1)
            each = torch.einsum("tei,ehi->teh", activation(gate.flatten(0, 1)).view_as(gate) * up, second)
            expected = (each.gather(1, ids[:, :, None].expand(-1, -1, 6)) * weights[:, :, None]).sum(1)
    except Exception as fault:  # whatever a module makes of such a call
        raise UnknownExperts(f"the experts of {type(module).__name__} are called otherwise ({fault!s:.60})") from fault
    if found.shape != expected.shape or float((found - expected).square().sum() / expected.square().sum()) > _SAME:
        raise UnknownExperts(f"the experts of {type(module).__name__} are no gated MLPs, down(f(gate(x)) * up(x))")


def _stored(
    model: Any, name: str, inner: str, outer: str, shapes: dict[str, tuple[int, ...]]
) -> tuple[tuple[tuple[str, str, str], ...], tuple[Stack, ...]]:
    """Names of every expert's gate, up and down, and the stacks that are to be cut up for it."""
    from transformers.core_model_loading import revert_weight_conversion

    count = shapes[inner][0]
    gate_up = torch.arange(count * 4 * 3, dtype=torch.float64).view(count, 4, 3)
    down = torch.arange(count * 3 * 2, dtype=torch.float64).view(count, 3, 2) + gate_up.numel()
    published = revert_weight_conversion(model, {f"{name}.{inner}": gate_up, f"{name}.{outer}": down})
    by_first = {float(one.flatten()[0]): (key, one) for key, one in published.items()}
    expected = [(gate_up[e, :2], gate_up[e, 2:], down[e]) for e in range(count)]
    if all(_is_there(by_first, one) for parts in expected for one in parts):
        names = [tuple(by_first[float(one.flatten()[0])][0] for one in parts) for parts in expected]
        return tuple(names), ()  # type: ignore[arg-type]
    if not (_is_there(by_first, gate_up) and _is_there(by_first, down)):
        raise UnknownExperts(f"checkpoints hold {name} in another form than one matrix an expert, or all in one tensor")
    triples = tuple((f"{name}.{e}.gate_proj.weight", f"{name}.{e}.up_proj.weight", f"{name}.{e}.down_proj.weight") for e in range(count))
    stacks = (
        Stack(by_first[0.0][0], tuple((gate, up) for gate, up, _ in triples)),
        Stack(by_first[float(down.flatten()[0])][0], tuple((last,) for _, _, last in triples)),
    )
    return triples, stacks


def _is_there(by_first: dict[float, tuple[str, Tensor]], part: Tensor) -> bool:
    found = by_first.get(float(part.flatten()[0]))
    return found is not None and found[1].shape == part.shape and torch.equal(found[1], part)
