"""Scale groups of one layer, found by tracing its forward with probe weights.

The output of a norm or a linear is multiplied by powers of two, different for each channel. A
module whose input is then scaled exactly so is a reader, whether it reads the output directly or
after other operations (a rotary table, a softmax, an activation) that pass the scale through; this
shows in the numbers, without a list of operations. Then the columns of all readers are divided by
the scale. The group is proven if the layer computes the same as before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantkit_kernels import SILU, Gating
from torch import Tensor, nn

from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.layer import DecoderLayer
from quantkit.models.weights import ExpertsOp, LinearOp

_ENTRIES = 4


class ProbeWeights:
    """Weights that reveal a layer's structure: a linear is a sparse random matrix with four entries
    per row or column, whichever are more, so that a layer of any size is fast; every other tensor
    is random and dense.

    shapes: of every tensor, by stored name. columns, rows: scales of the columns [K] or rows [N] of
    a linear, by module; tensors: other values, by name. expert_outputs: fixed outputs of experts,
    instead of a function of their input. topk: experts per token, once some were called.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.expert_outputs: dict[str, Tensor] = {}
        self.topk = 0
        self._originals: dict[str, Tensor] = {}
        self._entries: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def restore(self) -> None:
        """Remove all scales and fixed values."""
        self.columns, self.rows, self.tensors, self.expert_outputs = {}, {}, {}, {}

    def original(self, name: str) -> Tensor:
        if name not in self._originals:
            shape = self.shapes[name]
            drawn = torch.randn(shape, generator=_generator(name))
            scaled = 1 + 0.3 * drawn if len(shape) < 2 else drawn * shape[-1] ** -0.5
            self._originals[name] = scaled
        return self._originals[name]

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.original(name)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def linear_of(self, module: str, site: tuple[str, ...]) -> LinearOp:
        n, k = self.shapes[f"{module}.weight"]
        if module not in self._entries:
            count = _ENTRIES * max(n, k)
            generator = _generator(module)
            where = [torch.randperm(count, generator=generator) % size for size in (n, k)]
            self._entries[module] = (
                *where,
                torch.randn(count, generator=generator) * (n / count) ** 0.5,
            )  # type: ignore[assignment]
        out, read, value = self._entries[module]

        def apply(x: Tensor) -> Tensor:
            x = x * self.columns[module] if module in self.columns else x
            y = x.new_zeros(*x.shape[:-1], n).index_add_(-1, out, x[..., read] * value)
            return y * self.rows[module] if module in self.rows else y

        return apply

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        """A function of x, the experts and their weights through which no scale passes except a
        uniform one."""

        def apply(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            x = x * self.columns[prefix] if prefix in self.columns else x
            self.topk = topk_ids.shape[-1]
            if prefix in self.expert_outputs:
                return self.expert_outputs[prefix]
            chosen = (topk_weights.float() * torch.cos(topk_ids.float())).sum(-1, keepdim=True)
            return torch.tanh(x.flip(-1) + 0.3 * x) * chosen

        return apply

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a layer of transformers does not use {name}")


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))


SAME = 1e-9
"""Squared relative difference below which two outputs are equal: float32 has 1e-14."""


@dataclass(frozen=True)
class ForwardTrace:
    """One forward of a layer: its output, and the first input and output of every module that was
    called once, in call order."""

    output: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    returned: dict[str, int]
    """Number of values that a module returned as a tuple; 0: a tensor."""
    called: frozenset[str] = frozenset()
    """Modules that were called at least once."""


@dataclass(frozen=True)
class TracedGroup:
    """With names inside the layer. consumers: linears, routers, modules of stacked experts, and
    matrices of modules that have several.
    gain_offset: added to a norm's stored gain; None if the producer is a linear. biased: the
    producer has a bias, which is scaled too."""

    producer: str
    consumers: tuple[str, ...]
    gain_offset: float | None
    biased: bool


class LayerTracer:
    """Traces layer `block`, which computes with `weights`, over hidden [T, H] of one sequence."""

    def __init__(self, block: DecoderLayer, weights: ProbeWeights, hidden: Tensor) -> None:
        self.block, self.weights, self.hidden = block, weights, hidden
        self.modules = dict(block.module.named_modules())
        for one in self.modules.values():  # so that a choice of tokens shows in what is computed
            if hasattr(one, "index_topk"):
                one.index_topk = block.skeleton.probe_tokens // 4
        self.first = self.trace()

    def trace(self) -> ForwardTrace:
        """Run the layer with the current weights."""
        self.block.fill()
        seen = ForwardTrace(torch.empty(0), {}, {}, {})
        more: set[str] = set()

        def hook(name: str) -> Any:
            def record(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
            ) -> None:
                given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
                first = made[0] if isinstance(made, tuple) else made
                if name in seen.inputs:
                    more.add(name)
                if given and isinstance(first, Tensor):
                    seen.inputs[name], seen.outputs[name] = given[0], first
                    seen.returned[name] = len(made) if isinstance(made, tuple) else 0

            return record

        hooks = [
            one.register_forward_hook(hook(name), with_kwargs=True)
            for name, one in self.modules.items()
            if name
        ]
        try:
            output = self.block.forward(self.hidden, CausalContext([len(self.hidden)]))
        finally:
            for one in hooks:
                one.remove()
        called = frozenset(seen.inputs)
        for part in (seen.inputs, seen.outputs, seen.returned):
            for name in more:
                part.pop(name)
        return replace(seen, output=output, called=called)

    def groups(self) -> list[TracedGroup]:
        """All proven groups, each alone and together, in forward order. A reader belongs to at most
        one of them."""
        found: list[TracedGroup] = []
        taken: set[str] = set()
        for name in self._producers():
            group = self._group(name)
            if (
                group is not None
                and taken.isdisjoint(group.consumers)
                and self._proven([*found, group])
            ):
                found.append(group)
                taken.update(group.consumers)
        self.weights.restore()
        return found

    def _producers(self) -> Iterable[str]:
        """Modules with tensors of their own in call order; a module returns after those that it
        calls, and a producer calls none."""
        return [name for name in self.first.outputs if self._parameters_of(name)]

    def _parameters_of(self, name: str) -> dict[str, Tensor]:
        return {key: one for key, one in self.modules[name]._parameters.items() if one is not None}

    def _group(self, name: str) -> TracedGroup | None:
        """The group of this producer; None where it is not one, or nothing reads its scaled
        output."""
        for offset in self._offsets(name):
            biased = "bias" in self._parameters_of(name)
            alone = TracedGroup(name, (), offset, biased)
            scale = _powers(name, self.first.outputs[name].shape[-1])
            self.weights.restore()
            self._scale(alone, scale)
            seen = self.trace()
            if _alike(seen.outputs.get(name), self.first.outputs[name] * scale):
                readers = self._readers(seen, scale)
                return TracedGroup(name, readers, offset, biased) if readers else None
        return None

    def _readers(self, seen: ForwardTrace, scale: Tensor) -> tuple[str, ...]:
        """Modules whose input is exactly the scaled output. The experts' input may depend on a
        router that reads the same tensor, so with experts the layer is traced again after the
        columns of the readers found so far were divided."""
        readers: tuple[str, ...] = ()
        while found := tuple(
            one
            for one in seen.inputs
            if self._columns(one) == len(scale) and self._reads(one, seen, scale)
        ):
            if len(found) == len(readers) or not self.block.plan.experts:
                return found
            for one in found:
                if one not in readers:
                    self._divide_columns(one, scale)
            readers, seen = found, self.trace()
        return readers

    def _offsets(self, name: str) -> tuple[float | None, ...]:
        """Candidate gain offsets: None for a linear; 0 or 1 for a norm."""
        if name in self.block.plan.linears:
            return (None,)
        return (self.gain_offset(name),) if self.is_norm(name) else ()

    def _columns(self, name: str) -> int:
        """Input channels of a module that multiplies its input by a matrix; 0 for any other."""
        if name in self.block.plan.experts:
            return int(self.first.inputs[name].shape[-1])
        return 0 if self.matrix(name) is None else int(self.first.inputs[name].shape[-1])

    def matrix(self, name: str) -> str | None:
        """Key of the one tensor of a module that can multiply its input; None for any other."""
        given, own = self.first.inputs.get(name), self._parameters_of(name)
        fits = [
            key
            for key, one in own.items()
            if given is not None and one.dim() == 2 and one.shape[1] == given.shape[-1]
        ]
        return fits[0] if len(fits) == 1 else None

    def reader(self, name: str) -> str:
        """A module that reads with its `weight`, by its name; any other by that of its matrix."""
        key = None if name in self.block.plan.experts else self.matrix(name)
        return name if key in (None, "weight") else f"{name}.{key}"

    def is_norm(self, name: str) -> bool:
        """Whether a module has a gain per output channel, and at most a bias in addition."""
        own = self._parameters_of(name)
        width = self.first.outputs[name].shape[-1] if name in self.first.outputs else 0
        return (
            "weight" in own
            and own.keys() <= {"weight", "bias"}
            and all(one.shape == (width,) for one in own.values())
        )

    def gain_offset(self, name: str) -> float:
        """1 where a norm with a gain of zero has a nonzero output, else 0."""
        gain, bias = (self.block.names.get(f"{name}.{key}") for key in ("weight", "bias"))
        assert gain is not None, name
        self.weights.restore()
        self.weights.tensors = {
            one: torch.zeros(self.weights.shapes[one]) for one in (gain, bias) if one is not None
        }
        made = self.trace().outputs[name]
        self.weights.restore()
        return 0.0 if float(made.abs().max()) == 0 else 1.0

    def is_reader(self, name: str) -> bool:
        """Whether a module multiplies its input by a matrix that may be quantized, or routes by
        it."""
        return self._columns(name) > 0

    def _reads(self, name: str, seen: ForwardTrace, scale: Tensor) -> bool:
        before = self.first.inputs.get(name)
        return (
            before is not None
            and before.shape[-1] == len(scale)
            and _alike(seen.inputs[name], before * scale)
        )

    def _proven(self, groups: list[TracedGroup]) -> bool:
        self.weights.restore()
        for group in groups:
            scale = _powers(group.producer, self.first.outputs[group.producer].shape[-1])
            self._scale(group, scale)
            for reader in group.consumers:
                self._divide_columns(reader, scale)
        seen, producers = self.trace(), {group.producer for group in groups}
        # Each reader by itself: in the residual sum a large branch may hide a small one.
        readers = [
            name for name in self.first.outputs if self.is_reader(name) and name not in producers
        ]
        same = all(_alike(seen.outputs.get(name), self.first.outputs[name]) for name in readers)
        return same and distance(seen.output, self.first.output) < SAME

    def _scale(self, group: TracedGroup, scale: Tensor) -> None:
        """Multiply the producer's output channels."""
        if group.gain_offset is None:
            self.weights.rows[self.block.disk(group.producer)] = scale
        else:
            gain = self.block.names[f"{group.producer}.weight"]
            self.weights.tensors[gain] = (
                self.weights.tensor(gain) + group.gain_offset
            ) * scale - group.gain_offset
        if group.biased:
            bias = self.block.names[f"{group.producer}.bias"]
            self.weights.tensors[bias] = self.weights.tensor(bias) * scale

    def _divide_columns(self, reader: str, scale: Tensor) -> None:
        if reader in self.block.plan.experts:
            self.weights.columns[self.block.experts_name(reader)] = 1 / scale
        elif reader in self.block.plan.linears:
            self.weights.columns[self.block.disk(reader)] = 1 / scale
        else:
            name = self.block.names[f"{reader}.{self.matrix(reader)}"]
            self.weights.tensors[name] = self.weights.tensor(name) / scale


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b||^2 / ||b||^2 in float64; infinite where a value is not finite or shapes differ."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).double().square().sum() / b.double().square().sum().clamp(min=1e-30))


def _alike(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and distance(a, b) < SAME


def _powers(name: str, count: int) -> Tensor:
    """Powers of two from 1/4 to 4, drawn for each producer."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1)
    return torch.randint(-2, 3, (count,), generator=generator).float().exp2()
