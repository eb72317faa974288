"""One decoder layer of transformers over weights that the caller provides, whole or in two halves.

A layer that adds two branches to the residual stream one after the other is run in halves, so that
the second is observed after the first was quantized: `attend` stops where the stream between them
is read for the first time, and `feed_forward` is the whole layer over that stream with the first
branch returning zeros. Hyper-connections mix the streams even then, so with several streams they
are written over where they are read. That both together equal the whole layer was verified when the
layer was traced (sublayers.py). Any other layer is all `feed_forward`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.experts import ExpertsCall
from quantkit.models.hf_traced.skeleton import Skeleton
from quantkit.models.hyper_connections import packed_width
from quantkit.models.weights import LinearOp, Weights


class SiteWeights(Weights, Protocol):
    """Weights that need to know which linears share an input, because these are called one by
    one."""

    def linear_of(self, module: str, site: tuple[str, ...]) -> LinearOp:
        """The linear `module`, one of those of `site`, which read the same tensor."""


class NotExperts(Exception):
    """A module that holds several matrices in one tensor, and is not called like routed experts.
    name: inside the layer."""

    def __init__(self, name: str) -> None:
        self.name = name


class OtherInputs(Exception):
    """Routed experts that read something else than one row of hidden states a token; the text says
    what."""


class _StopBetweenHalves(Exception):
    """Carries the residual stream between two halves."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True)
class Halves:
    """first: children of the layer that compute the first branch, with the number of values that
    each returns as a tuple (0: a tensor), without hyper-connections. cut: the child that reads the
    stream after it."""

    first: Mapping[str, int]
    cut: str


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is run, with names inside it. halves: None for a layer that is run whole.
    linears: module -> the linears that read the same tensor, itself included, in order. experts:
    modules of stacked routed experts, with the factor of their output in the residual stream; 1 if
    more is done with it, and then `parallel` are linears whose outputs are read there, too."""

    linears: Mapping[str, tuple[str, ...]]
    halves: Halves | None = None
    experts: Mapping[str, float] = field(default_factory=dict)
    parallel: tuple[str, ...] = ()


@dataclass
class _FixedOutputs:
    """Outputs in place of operators. experts: all together [T, H]; linears: [T, N] by module, zeros
    for any other."""

    experts: Tensor
    linears: Mapping[str, Tensor]


class DecoderLayer:
    """Layer `layer` of a skeleton. weights: accessed by stored names."""

    def __init__(
        self, skeleton: Skeleton, layer: int, plan: LayerPlan, weights: SiteWeights
    ) -> None:
        self.skeleton, self.layer, self.plan, self.weights = skeleton, layer, plan, weights
        self.module = skeleton.copy_layer(layer)
        self.names, self.assembled = skeleton.names(layer), skeleton.assembled_names(layer)
        self._part = slice(0, 0)  # the tokens being computed
        self._fixed: _FixedOutputs | None = None
        self._made: dict[str, Tensor] = {}
        self.fill()

    def forward(self, hidden: Tensor, context: CausalContext) -> Tensor:
        """hidden [T, W] -> [T, W] after the layer."""
        return self._run(hidden, context)

    def attend(self, hidden: Tensor, context: CausalContext) -> Tensor:
        """hidden [T, W] -> [T, W] after the first half."""
        halves = self.plan.halves
        assert halves is not None, "a layer that is run whole has no first half"

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _StopBetweenHalves(args[0] if args else kwargs["hidden_states"])

        hook = self.module.get_submodule(halves.cut).register_forward_pre_hook(
            stop, with_kwargs=True
        )
        try:
            return self._run(hidden, context)
        finally:
            hook.remove()

    def feed_forward(self, hidden: Tensor, context: CausalContext) -> Tensor:
        """hidden [T, W] -> [T, W] after the second half, or the whole layer where it is not run in
        halves."""
        if self.plan.halves is None:
            return self._run(hidden, context)
        first, cut = self.plan.halves.first, self.module.get_submodule(self.plan.halves.cut)
        zeros = {
            self.module.get_submodule(name): _zeros(count, self.skeleton)
            for name, count in first.items()
        }

        def write_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached = args[0] if args else kwargs["hidden_states"]
            reached.copy_(self.skeleton.streams(hidden[self._part]))

        hooks = (
            [cut.register_forward_pre_hook(write_over, with_kwargs=True)]
            if self.skeleton.stream_count > 1
            else []
        )
        try:
            with replace_forwards(zeros):
                return self._run(hidden, context)
        finally:
            for hook in hooks:
                hook.remove()

    def mlp_output(self, hidden: Tensor, context: CausalContext) -> Tensor:
        """hidden [T, at least W] -> zeros for the experts' sum, and the outputs of the parallel
        linears: [T, W and more]."""
        hidden = hidden[:, : self._width]
        self._made = {
            name: hidden.new_empty(len(hidden), self._outputs(name)) for name in self.plan.parallel
        }
        self.feed_forward(hidden, context)
        made, self._made = list(self._made.values()), {}
        return torch.cat((torch.zeros_like(hidden), *made), dim=1)

    def add_mlp_output(self, hidden: Tensor, mlp_output: Tensor, context: CausalContext) -> Tensor:
        """hidden [T, W and more], with outputs of the parallel linears; mlp_output [T, H] -> [T, W]
        after the layer. No other linear is computed."""
        width = self._width
        made = hidden[:, width:].split([self._outputs(name) for name in self.plan.parallel], dim=1)
        self._fixed = _FixedOutputs(mlp_output, dict(zip(self.plan.parallel, made)))
        try:
            return self.feed_forward(hidden[:, :width], context)
        finally:
            self._fixed = None

    def _run(self, hidden: Tensor, context: CausalContext) -> Tensor:
        """Sequence by sequence, as the model's own forward calls the layer."""
        made = torch.empty_like(hidden)
        start = 0
        for module in self.module.modules():
            for key, table in module._buffers.items():
                if table is not None and not table.is_meta:
                    module._buffers[key] = table.to(hidden.device)
        for length in context.seq_lens:
            part = self._part = slice(start, start + length)
            call = self.skeleton.call(self.layer, hidden[part])
            try:
                with torch.no_grad():
                    streams = self.skeleton.streams(hidden[part])
                    found = self.skeleton.result(self.module(streams, *call.args, **call.kwargs))
            except _StopBetweenHalves as reached:
                found = reached.hidden
            if found.is_meta:
                raise RuntimeError("it reads a weight that a linear was asked for")
            made[part] = self.skeleton.with_streams(hidden[part], found)
            start += length
        return made

    def fill(self) -> None:
        """Connect linears and experts to the weights' operators; all other parameters get their
        tensors, where the caller has them."""
        for name, module in list(self.module.named_modules()):
            if name in self.plan.experts:
                module.forward = self._experts(name, next(module.parameters()).shape[0])
                continue
            for key in [key for key, one in module._parameters.items() if one is not None]:
                self._fill_parameter(module, key, f"{name}.{key}" if name else key)
            for key in [
                key
                for key, one in module._buffers.items()
                if one is not None and key not in module._non_persistent_buffers_set
            ]:
                disk = self.names.get(f"{name}.{key}" if name else key)
                if disk is not None and self.weights.has(disk):
                    module._buffers[key] = self.weights.tensor(disk)
            if name in self.plan.linears:
                site = tuple(self.disk(one) for one in self.plan.linears[name])
                module.forward = self._linear(
                    name, module, self.weights.linear_of(self.disk(name), site)
                )

    def _fill_parameter(self, module: nn.Module, key: str, name: str) -> None:
        disk, assembled = self.names.get(name), self.assembled.get(name)
        if assembled is not None and all(map(self.weights.has, assembled.parts)):
            value = assembled.of(self.weights.tensor)
            module._parameters[key] = nn.Parameter(value, requires_grad=False)
        if (
            disk is None
            or name.removesuffix(".weight") in self.plan.linears
            or not self.weights.has(disk)
        ):
            return
        module._parameters[key] = nn.Parameter(self.weights.tensor(disk), requires_grad=False)

    @property
    def _width(self) -> int:
        """Channels of the hidden states between layers."""
        return packed_width(self.skeleton.hidden_size, self.skeleton.stream_count)

    def _outputs(self, module: str) -> int:
        """Outputs of a linear."""
        weight = self.module.get_submodule(module)._parameters["weight"]
        assert weight is not None, module
        return int(weight.shape[0])

    def disk(self, module: str) -> str:
        """Stored name of a module of this layer."""
        return self.names[f"{module}.weight"].removesuffix(".weight")

    def experts_name(self, module: str) -> str:
        """Name by which the weights know a module of experts in this layer."""
        return f"{self.skeleton.prefixes[self.layer]}.{module}"

    def _experts(self, module: str, count: int) -> Callable[..., Tensor]:
        """The experts' operator, with the factor of their output in the residual stream."""
        op = self.weights.experts(self.experts_name(module), count)
        factor = self.plan.experts[module]

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            call = ExpertsCall.of((*args, *kwargs.values()), count)
            if call is None:
                raise NotExperts(module)
            if len(call.x) != self._part.stop - self._part.start:
                raise OtherInputs("a token gives each of the experts that it asks another input")
            if call.x.shape[-1] != self.skeleton.hidden_size:
                raise OtherInputs(
                    f"routed experts read {call.x.shape[-1]} channels that a linear makes of the "
                    "hidden states"
                )
            if self._fixed is not None:
                return call.result(self._fixed.experts[self._part])
            return call.result(op(call.x, call.topk_ids, call.topk_weights.float() * factor))

        return forward

    def _linear(self, name: str, module: nn.Module, op: LinearOp) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            bias: Tensor | None = module._parameters.get("bias")
            if self._fixed is None:
                made = op(x)
            else:
                shape = (*x.shape[:-1], self._outputs(name))
                found = self._fixed.linears.get(name)
                made = x.new_zeros(shape) if found is None else found[self._part].reshape(shape)
            if name in self._made:
                self._made[name][self._part] = made.reshape(-1, made.shape[-1])
            return made if bias is None else made + bias

        return forward


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of these modules within the block."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def _zeros(count: int, skeleton: Skeleton) -> Callable[..., Any]:
    """A forward that adds nothing to the residual stream or streams."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = (
            one
            for one in (*args, *kwargs.values())
            if isinstance(one, Tensor)
            and (
                skeleton.is_stream(one)
                or (one.dim() == 3 and one.shape[-1] == skeleton.hidden_size)
            )
        )
        zeros = torch.zeros_like(next(given))
        return (zeros, *[None] * (count - 1)) if count else zeros

    return forward
