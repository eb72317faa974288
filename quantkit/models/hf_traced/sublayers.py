"""The structure of a decoder layer, found by running it on probe weights: once for each kind of
layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantkit.common.errors import QuantkitError
from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.experts import experts_modules
from quantkit.models.hf_traced.layer import (
    DecoderLayer,
    Halves,
    LayerPlan,
    NotExperts,
    OtherInputs,
)
from quantkit.models.hf_traced.module_tree import RTN_REMEDY, in_words
from quantkit.models.hf_traced.scale_groups import (
    SAME,
    ForwardTrace,
    LayerTracer,
    ProbeWeights,
    TracedGroup,
    distance,
)
from quantkit.models.hf_traced.skeleton import Skeleton


@dataclass(frozen=True)
class LayerTrace:
    """With names inside the layer. first: modules of the first half. output_linears: linears whose
    output only goes to the residual stream. order: modules with tensors in call order.
    gain_offsets: of every norm, see `Parameter`."""

    plan: LayerPlan
    groups: tuple[TracedGroup, ...]
    first: frozenset[str]
    output_linears: frozenset[str]
    order: tuple[str, ...]
    gain_offsets: Mapping[str, float]
    topk: int = 0
    """Experts per token."""
    after_experts: frozenset[str] = frozenset()
    """Modules that read the sum of the routed experts."""


def trace_layer(skeleton: Skeleton, layer: int) -> LayerTrace:
    """Raises QuantkitError where the layer cannot be run on weights that are provided one by
    one."""
    try:
        return _trace_layer(skeleton, layer)
    except QuantkitError:
        raise
    except Exception as fault:  # a layer's own code may fail in any way
        raise QuantkitError(
            f"{skeleton.label}: layer {layer} of transformers' model cannot be run on weights "
            f"that are given one by one ({in_words(fault)})",
            RTN_REMEDY,
        ) from fault


def _trace_layer(skeleton: Skeleton, layer: int) -> LayerTrace:
    module, names = skeleton.layers[layer], skeleton.names(layer)
    prefix = skeleton.prefixes[layer]
    linears = [
        name for name, _ in module.named_modules() if f"{prefix}.{name}.weight" in skeleton.linears
    ]
    experts = [name for name, _ in experts_modules(module)]
    if skeleton.reads_ids and any(isinstance(one, nn.Embedding) for one in module.modules()):
        raise QuantkitError(
            f"{skeleton.label}: layer {layer} looks the text up in a table of its own, which "
            "calibration does not read",
            RTN_REMEDY,
        )
    assembled = skeleton.assembled_names(layer)
    for name, _ in module.named_parameters():
        if (
            name not in names
            and name not in assembled
            and not name.startswith(tuple(f"{one}." for one in experts))
        ):
            raise QuantkitError(
                f"{skeleton.label}: checkpoints hold {name.removesuffix('.weight')} in another "
                "form than transformers computes with",
                RTN_REMEDY,
            )
    if not linears and not experts:
        others = {
            type(one).__name__
            for one in module.modules()
            if any(own.dim() > 1 for own in one.parameters(recurse=False))
        }
        raise QuantkitError(
            f"{skeleton.label}: layer {layer} has no linears that quantkit quantizes; its "
            f"matrices are of {', '.join(sorted(others))}",
            "use a model with linears: torch.nn.Linear, or stacked experts",
        )
    tensors = dict(module.state_dict())
    shapes = {disk: tuple(tensors[name].shape) for name, disk in names.items() if name in tensors}
    weights = ProbeWeights(
        shapes | {disk: shape for one in assembled.values() for disk, shape in one.parts.items()}
    )
    tracer, experts = _trace_experts_of(
        skeleton, layer, {name: (name,) for name in linears}, experts, weights
    )
    plan, hidden, seen = tracer.block.plan, tracer.hidden, tracer.first
    if idle := [name for name in linears if name not in seen.called]:
        raise QuantkitError(
            f"{skeleton.label}: transformers' layer {layer} leaves out {', '.join(idle)} where "
            "text alone goes through it",
            "quantkit calibrates decoders that read nothing but text",
        )
    if not torch.isfinite(seen.output).all() or distance(seen.output, hidden) == 0:
        raise QuantkitError(
            f"{skeleton.label}: layer {layer} computes nothing finite of random weights",
            RTN_REMEDY,
        )
    order = tuple(
        name
        for name in seen.inputs
        if next(module.get_submodule(name).parameters(recurse=False), None) is not None
    )
    halves, first = _halves(tracer)
    factors = {name: _factor(name, tracer) for name in experts}
    plan = replace(
        plan,
        linears=_sites(linears, seen),
        halves=halves,
        experts={name: factor or 1.0 for name, factor in factors.items()},
    )
    after_experts: frozenset[str] = frozenset()
    for name in (name for name, factor in factors.items() if factor is None):
        after_experts = _after_experts(name, tracer, order)
        plan = replace(plan, parallel=_parallel_linears(name, tracer, halves, linears))
    output_linears = frozenset(name for name in linears if _writes_residual(name, tracer, first))
    groups = tuple(
        replace(group, consumers=tuple(map(tracer.reader, group.consumers)))
        for group in tracer.groups()
        if len({one in first for one in (group.producer, *group.consumers)}) == 1
    )
    offsets = {name: tracer.gain_offset(name) for name in order if tracer.is_norm(name)}
    return LayerTrace(
        plan, groups, first, output_linears, order, offsets, weights.topk, after_experts
    )


def _trace_experts_of(
    skeleton: Skeleton,
    layer: int,
    linears: dict[str, tuple[str, ...]],
    experts: list[str],
    weights: ProbeWeights,
) -> tuple[LayerTracer, list[str]]:
    """The layer after its first run, and those of `experts` that were called like experts."""
    hidden = skeleton.probe(layer)
    while True:
        plan = LayerPlan(linears, experts=dict.fromkeys(experts, 1.0))
        try:
            return LayerTracer(
                DecoderLayer(skeleton, layer, plan, weights), weights, hidden
            ), experts
        except NotExperts as other:
            experts = [name for name in experts if name != other.name]
        except OtherInputs as fault:
            raise QuantkitError(f"{skeleton.label}: {fault}", RTN_REMEDY) from fault


def _with_expert_outputs(
    name: str, tracer: LayerTracer
) -> tuple[Tensor, ForwardTrace, ForwardTrace]:
    """Outputs of a module of experts, and traces of the layer with these and with zeros."""
    answer = _expert_answer(tracer)
    seen = []
    for value in (answer, torch.zeros_like(answer)):
        tracer.weights.restore()
        tracer.weights.expert_outputs[tracer.block.experts_name(name)] = value
        seen.append(tracer.trace())
    tracer.weights.restore()
    return answer, seen[0], seen[1]


def _expert_answer(tracer: LayerTracer) -> Tensor:
    """Random outputs of experts, [T, H]."""
    shape = (len(tracer.hidden), tracer.block.skeleton.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(17))


def _factor(name: str, tracer: LayerTracer) -> float | None:
    """Factor of the experts' output in the residual stream; None where more is done with it, as by
    hyper-connections."""
    if tracer.block.skeleton.stream_count > 1:
        return None
    answer, seen, without = _with_expert_outputs(name, tracer)
    added = seen.output - without.output
    factor = float((added * answer).sum() / answer.square().sum())
    return None if distance(added, factor * answer) > SAME or factor == 0 else factor


def _after_experts(name: str, tracer: LayerTracer, order: tuple[str, ...]) -> frozenset[str]:
    """Modules with tensors that read the experts' output, or the hyper-connections that mix it into
    the streams. Raises QuantkitError where there is none, or a linear is one."""
    skeleton = tracer.block.skeleton
    if skeleton.stream_count > 1:
        inputs = tracer.first.inputs
        return frozenset(one for one in order if one in inputs and skeleton.is_stream(inputs[one]))
    _, seen, without = _with_expert_outputs(name, tracer)
    reads = [
        one
        for one in order
        if one != name
        and one in seen.inputs
        and not torch.equal(seen.inputs[one], without.inputs[one])
    ]
    if not reads or any(tracer.is_reader(one) for one in reads):
        raise QuantkitError(
            f"{skeleton.label}: more is done with what the routed experts make than to add it",
            RTN_REMEDY,
        )
    return frozenset(reads)


def _parallel_linears(
    name: str, tracer: LayerTracer, halves: Halves | None, linears: list[str]
) -> tuple[str, ...]:
    """The linears whose outputs are read after the experts, together with the experts' sum; all
    others may return zeros then."""
    block, context = tracer.block, CausalContext([len(tracer.hidden)])
    before = block.plan
    block.plan = replace(before, halves=halves)
    hidden = tracer.hidden if halves is None else block.attend(tracer.hidden, context)
    answer = _expert_answer(tracer)
    tracer.weights.expert_outputs[block.experts_name(name)] = answer
    expected = block.feed_forward(hidden, context)

    def recombined(parallel: list[str]) -> Tensor:
        block.plan = replace(block.plan, parallel=tuple(parallel))
        states = torch.cat((hidden, block.mlp_output(hidden, context)[:, hidden.shape[1] :]), dim=1)
        return block.add_mlp_output(states, answer, context)

    kept = [one for one in linears if one in tracer.first.called]
    for one in list(kept):
        fewer = [other for other in kept if other != one]
        if distance(recombined(fewer), expected) < SAME:
            kept = fewer
    same = distance(recombined(kept), expected) < SAME
    block.plan = before
    tracer.weights.restore()
    if not same:
        raise QuantkitError(
            f"{block.skeleton.label}: what follows its routed experts cannot be computed after "
            "them",
            RTN_REMEDY,
        )
    return tuple(kept)


def _sites(linears: list[str], seen: ForwardTrace) -> dict[str, tuple[str, ...]]:
    """Linears that read the same tensor, by each of them."""
    sites: list[list[str]] = []
    for name in linears:
        own = seen.inputs.get(name)
        alike = [
            site for site in sites if own is not None and _equal(seen.inputs.get(site[0]), own)
        ]
        if alike:
            alike[0].append(name)
        else:
            sites.append([name])
    return {name: tuple(site) for site in sites for name in site}


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.numel() == b.numel() and torch.equal(a.reshape(b.shape), b)


def _halves(tracer: LayerTracer) -> tuple[Halves | None, frozenset[str]]:
    """Where the layer can be cut in two, and the modules of the first half."""
    block, seen, hidden, skeleton = tracer.block, tracer.first, tracer.hidden, tracer.block.skeleton
    children = {name for name, _ in block.module.named_children()}
    several, before = skeleton.stream_count > 1, skeleton.streams(hidden)
    called = [
        name
        for name in seen.outputs
        if name in children
        and (
            skeleton.is_stream(seen.inputs[name])
            or seen.inputs[name].shape[-1] == skeleton.hidden_size
        )
    ]
    for place, cut in enumerate(called[1:], start=1):
        stream = seen.inputs[cut]
        if stream.numel() != before.numel() or torch.equal(stream.reshape(before.shape), before):
            continue
        # Hyper-connections also return how the streams are mixed, and are left as they are.
        first = {
            name: seen.returned[name]
            for name in called[:place]
            if not (several and seen.returned[name] and skeleton.is_stream(seen.inputs[name]))
        }
        halves = Halves(first, cut)
        block.plan = replace(block.plan, halves=halves)
        context = CausalContext([len(hidden)])
        try:
            joined = block.feed_forward(block.attend(hidden, context), context)
        except Exception:  # a layer that needs what its first children return
            continue
        finally:
            block.plan = replace(block.plan, halves=None)
        if distance(joined, seen.output) < SAME:
            own = frozenset(called[:place])
            return halves, frozenset(name for name in seen.inputs if name.split(".")[0] in own)
    return None, frozenset()


def _writes_residual(name: str, tracer: LayerTracer, first: frozenset[str]) -> bool:
    """Whether a linear's output is only read through the residual sum in its half."""
    seen = tracer.first
    width = tracer.block.skeleton.hidden_size
    if name not in seen.outputs or seen.outputs[name].shape[-1] != width:
        return False
    tracer.weights.restore()
    tracer.weights.rows[tracer.block.disk(name)] = torch.zeros(seen.outputs[name].shape[-1])
    without = tracer.trace()
    tracer.weights.restore()
    others = [
        one for one in seen.inputs if (one in first) == (name in first) and tracer.is_reader(one)
    ]
    return distance(without.output, seen.output) > 0 and all(
        torch.equal(without.inputs[one], seen.inputs[one]) for one in others
    )
