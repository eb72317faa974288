"""What a module of stacked experts holds, where checkpoints have it, and what one expert computes.

Of the modules that transformers calls with (x, experts of each token, their weights), or as Llama
4's with an input of its own for each expert, zeros where a token does not ask it, those are known
whose experts are gated MLPs, down(f(gate(x)) * up(x)) with any f: that is seen by running the
module itself, cut down to two small experts, beside that formula. Where each expert lies in a
checkpoint is seen by sending numbered entries through transformers' own conversion to published
names.
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

Activation = Callable[[Tensor], Tensor]
"""f of down(f(gate(x)) * up(x)), element by element."""
_SAME = 1e-9


class UnsupportedExperts(Exception):
    """A module of experts that is none of these, or is stored otherwise. The text says which."""


@dataclass(frozen=True)
class Asked:
    """What a module of experts is called with. x [R, H]; topk_ids int64 [R, k]; topk_weights [R,
    k]; shape: of what it answers; places: of the rows in that, where every expert has an input of
    its own and answers by itself."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    shape: torch.Size
    places: Tensor | None = None

    @classmethod
    def of(cls, given: Sequence[Any], count: int) -> "Asked | None":
        """given: the call; count: of experts. None where experts are not asked so. Of inputs [E *
        T, H] a row is a token, in their order, where none asks more than one expert; else an expert
        and a token that asks it."""
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
        asking = (rows != 0).any(-1).view(count, -1)
        if int(asking.sum(0).max()) > 1:
            ids, tokens = asking.nonzero(as_tuple=True)
        else:
            ids, tokens = asking.int().argmax(0), torch.arange(asking.shape[1], device=rows.device)
        places = ids * asking.shape[1] + tokens
        return cls(
            rows[places],
            ids[:, None],
            asking[ids, tokens][:, None].to(rows.dtype),
            given[0].shape,
            places,
        )

    def answer(self, made: Tensor) -> Tensor:
        """made [R, H], of every row -> what the module returns."""
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
    """One module of experts. names: of each expert's gate, up and down on disk, or as `stacks` cut
    it up. parameters: its own tensors, in transformers' names. width: inner channels of an expert.
    beyond: how much of its input a place after the experts answers: 1 where it hands the input on,
    as LongCat-Flash's zero experts do, 0 where it is no expert."""

    names: tuple[tuple[str, str, str], ...]
    stacks: tuple[Stack, ...]
    parameters: frozenset[str]
    width: int
    gating: Gating
    beyond: float = 0.0


@dataclass(frozen=True)
class TracedGating(Gating):
    """f(g) * u, with f as a module of transformers has it."""

    activation: Activation = torch.relu

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


def experts_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer that hold matrices of several experts in one tensor."""
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Conv1d) and any(
            one.dim() == 3 for one in module.parameters(recurse=False)
        ):
            yield name, module


def trace_experts(model: Any, name: str, module: nn.Module) -> StackedExperts:
    """name: of the module in the model. Raises UnsupportedExperts where it is not understood."""
    held = _held(module)
    beyond = _check_computed(module, held)
    names, stacks = _stored(model, name, held)
    parameters = frozenset(f"{name}.{key}" for key in (held.inner, held.outer))
    return StackedExperts(
        names, stacks, parameters, held.width, TracedGating(activation=_activation(module)), beyond
    )


@dataclass(frozen=True)
class _Held:
    """Names of the parameters: of gates and then ups, [E, 2I, H], and of downs [E, H, I]; or
    turned, [E, H, 2I] and [E, I, H]. spare: places of the first beyond those of the second, which
    are no experts."""

    inner: str
    outer: str
    turned: bool
    count: int
    width: int
    hidden: int
    spare: int = 0

    def shapes(
        self, count: int, width: int, hidden: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of both, for other sizes."""
        inner, outer, places = (2 * width, hidden), (hidden, width), count + self.spare
        return (
            ((places, *inner[::-1]), (count, *outer[::-1]))
            if self.turned
            else ((places, *inner), (count, *outer))
        )

    def each(self, gate_up: Tensor, down: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Matrices of every expert's gate, up and down, [I, H], [I, H] and [H, I]."""
        inner, outer = (gate_up.mT, down.mT) if self.turned else (gate_up, down)
        return [(*one.chunk(2), last) for one, last in zip(inner, outer)]


def _held(module: nn.Module) -> _Held:
    own = {key: tuple(one.shape) for key, one in module._parameters.items() if one is not None}
    fits = []
    for inner, outer, turned in product(own, own, (False, True)):
        if inner != outer and len(own[inner]) == len(own[outer]) == 3:
            hidden, width = own[outer][2:0:-1] if turned else own[outer][1:]
            found = _Held(
                inner,
                outer,
                turned,
                own[outer][0],
                width,
                hidden,
                max(0, own[inner][0] - own[outer][0]),
            )
            fits += (
                [found]
                if found.shapes(found.count, width, hidden) == (own[inner], own[outer])
                else []
            )
    if len(own) != 2 or len(fits) != 1:
        told = ", ".join(f"{key} {list(shape)}" for key, shape in own.items())
        raise UnsupportedExperts(f"the experts of {type(module).__name__} hold {told}")
    return fits[0]


def _activation(module: Any) -> Activation:
    """Of the gate, as the module has it beside an up of ones, or by itself."""
    own = getattr(module, "_apply_gate", None)
    if own is None:
        alone: Activation = module.act_fn
        return alone

    def apply(gate: Tensor) -> Tensor:
        made: Tensor = own(torch.cat((gate, torch.ones_like(gate)), dim=-1))
        return made

    return apply


def _check_computed(module: Any, held: _Held) -> float:
    """The module, cut down to two experts of 6 and 4 channels, computes the formula. Returns what
    `StackedExperts` has as `beyond`."""
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in held.shapes(2, 4, 6))
    x = torch.randn(5, 6, generator=generator)
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    told = "is called otherwise"
    for small in _cut_down(module, held, gate_up, down):
        try:
            with torch.no_grad():
                activation = _activation(small)
                made = [
                    F.linear(activation(F.linear(x, gate)) * F.linear(x, up), last)
                    for gate, up, last in held.each(gate_up, down)
                ]
                chosen = torch.stack(made, 1).gather(1, ids[:, :, None].expand(-1, -1, 6))
                if _agrees(small(x, ids, weights), (chosen * weights[:, :, None]).sum(1)):
                    return _beyond(small, x, weights) if held.spare else 0.0
        except Exception as fault:  # whatever a module makes of such a call
            told = f"is called otherwise ({fault!s:.60})"
            try:
                with torch.no_grad():
                    if _agrees(small(x.repeat(2, 1)), torch.cat(made)):
                        return 0.0
            except Exception:  # of this one, too
                continue
        told = "computes no gated MLPs, down(f(gate(x)) * up(x))"
    raise UnsupportedExperts(f"the module of experts {type(module).__name__} {told}")


def _beyond(small: Any, x: Tensor, weights: Tensor) -> float:
    """What the first place after two experts answers, over its input."""
    made = small(x, torch.full(weights.shape, 2), weights)
    if not float(made.abs().max()):
        return 0.0
    if _agrees(made, x * weights.sum(1, keepdim=True)):
        return 1.0
    raise UnsupportedExperts(
        f"a place after the experts of {type(small).__name__} computes something of its own"
    )


def _agrees(found: Tensor, expected: Tensor) -> bool:
    return (
        found.shape == expected.shape
        and float((found - expected).square().sum() / expected.square().sum()) < _SAME
    )


def _cut_down(module: Any, held: _Held, gate_up: Tensor, down: Tensor) -> Iterator[Any]:
    """The module with these tensors. What it knows of their sizes goes with them; where two sizes
    are one number, in any way."""
    sizes: dict[int, list[int]] = {}
    for size, small in ((held.count, 2), (held.hidden, 6), (held.width, 4), (2 * held.width, 8)):
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
            for key, one in ((held.inner, gate_up), (held.outer, down))
        }
        small.__dict__ |= dict(zip(known, values))
        small.config = copy.copy(module.config) if hasattr(module, "config") else None
        if small.config is not None:
            small.config._experts_implementation = "eager"
        yield small


def _stored(
    model: Any, name: str, held: _Held
) -> tuple[tuple[tuple[str, str, str], ...], tuple[Stack, ...]]:
    """Names of every expert's gate, up and down, and the stacks that are to be cut up for it."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = held.shapes(held.count, 2, 3)
    sizes = [math.prod(shape) for shape in shapes]
    gate_up, down = (
        part.view(shape)
        for part, shape in zip(torch.arange(sum(sizes), dtype=torch.float64).split(sizes), shapes)
    )
    published = revert_weight_conversion(
        model, {f"{name}.{held.inner}": gate_up, f"{name}.{held.outer}": down}
    )
    by_first = {float(one.flatten()[0]): (key, one) for key, one in published.items()}
    expected = held.each(gate_up, down)
    if all(_is_there(by_first, one) for parts in expected for one in parts):
        names = [tuple(by_first[float(one.flatten()[0])][0] for one in parts) for parts in expected]
        return tuple(names), ()  # type: ignore[arg-type]
    # A conversion that turns what has another shape than the model's, as these numbers have, takes
    # both.
    either = not all(_is_there(by_first, one) for one in (gate_up, down))
    if not all(_is_there(by_first, one.mT if either else one) for one in (gate_up, down)):
        raise UnsupportedExperts(
            f"checkpoints hold {name} in another form than one matrix an expert, or all in one "
            "tensor"
        )
    triples = tuple(
        (
            f"{name}.{e}.gate_proj.weight",
            f"{name}.{e}.up_proj.weight",
            f"{name}.{e}.down_proj.weight",
        )
        for e in range(held.count)
    )
    stacks = (
        Stack(
            by_first[0.0][0],
            tuple((gate, up) for gate, up, _ in triples),
            (held.width, held.hidden),
            held.turned,
            either,
        ),
        Stack(
            by_first[float(down.flatten()[0])][0],
            tuple((last,) for _, _, last in triples),
            (held.hidden, held.width),
            held.turned,
            either,
        ),
    )
    return triples, stacks


def _is_there(by_first: dict[float, tuple[str, Tensor]], part: Tensor) -> bool:
    found = by_first.get(float(part.flatten()[0]))
    return found is not None and found[1].shape == part.shape and torch.equal(found[1], part)
