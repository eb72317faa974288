"""What a decoder layer is made of, seen by running it on stand-ins for its weights: once for each
kind of layer that a model has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.models.context import CausalContext
from quantkit.models.hf_traced.experts import experts_modules
from quantkit.models.hf_traced.layer import (
    DecoderLayer,
    Halves,
    LayerPlan,
    NotExperts,
    SeveralInputs,
)
from quantkit.models.hf_traced.scale_groups import (
    SAME,
    ForwardTrace,
    LayerTracer,
    ProbeWeights,
    TracedGroup,
    distance,
)
from quantkit.models.hf_traced.skeleton import PROBED, ROUTE, Skeleton


@dataclass(frozen=True)
class LayerTrace:
    """In names inside the layer. first: modules of the first half. ends: linears that nothing reads
    but the residual stream. order: modules with tensors as they are called. gain_offsets: of every
    norm, see `Parameter`."""

    plan: LayerPlan
    groups: tuple[TracedGroup, ...]
    first: frozenset[str]
    output_linears: frozenset[str]
    order: tuple[str, ...]
    gain_offsets: Mapping[str, float]
    chosen: int = 0
    """Experts of a token."""
    behind: frozenset[str] = frozenset()
    """Modules that read what the routed experts make together."""


def look_at(skeleton: Skeleton, layer: int) -> LayerTrace:
    """Raises QuantkitError where the layer cannot be run on weights that are given to it one by
    one."""
    try:
        return _look_at(skeleton, layer)
    except QuantkitError:
        raise
    except Exception as fault:  # whatever a layer's own code makes of it
        told = (
            f"{skeleton.description}: layer {layer} of transformers' model cannot be run on weights "
            "that are given one by one"
        )
        raise QuantkitError(f"{told} ({type(fault).__name__}: {fault!s:.80})", ROUTE) from fault


def _look_at(skeleton: Skeleton, layer: int) -> LayerTrace:
    module, names = skeleton.layers[layer], skeleton.names(layer)
    prefix = skeleton.prefixes[layer]
    linears = [
        name for name, _ in module.named_modules() if f"{prefix}.{name}.weight" in skeleton.linears
    ]
    experts = [name for name, _ in experts_modules(module)]
    for name, _ in module.named_parameters():
        if name not in names and not name.startswith(tuple(f"{one}." for one in experts)):
            told = (
                f"{skeleton.description}: checkpoints hold {name.removesuffix('.weight')} in another "
                "form than transformers computes with"
            )
            raise QuantkitError(told, ROUTE)
    if not linears and not experts:
        others = {
            type(one).__name__
            for one in module.modules()
            if any(own.dim() > 1 for own in one.parameters(recurse=False))
        }
        told = (
            f"{skeleton.description}: layer {layer} has no linears that quantkit quantizes; its "
            f"matrices are of {', '.join(sorted(others))}"
        )
        raise QuantkitError(told, "use a model with linears: torch.nn.Linear, or stacked experts")
    tensors = dict(module.state_dict())
    weights = ProbeWeights(
        {disk: tuple(tensors[name].shape) for name, disk in names.items() if name in tensors}
    )
    watcher, experts = _watched(
        skeleton, layer, {name: (name,) for name in linears}, experts, weights
    )
    plan, hidden, seen = watcher.block.plan, watcher.hidden, watcher.first
    if idle := [name for name in linears if name not in seen.called]:
        told = (
            f"{skeleton.description}: transformers' layer {layer} leaves out {', '.join(idle)} where "
            "text alone goes through it"
        )
        raise QuantkitError(told, "quantkit calibrates decoders that read nothing but text")
    if not torch.isfinite(seen.output).all() or distance(seen.output, hidden) == 0:
        raise QuantkitError(
            f"{skeleton.description}: layer {layer} computes nothing finite of random weights",
            ROUTE,
        )
    order = tuple(
        name
        for name in seen.inputs
        if next(module.get_submodule(name).parameters(recurse=False), None) is not None
    )
    halves, first = _halves(watcher)
    factors = {name: _factor(name, watcher) for name in experts}
    plan = replace(
        plan,
        linears=_sites(linears, seen),
        halves=halves,
        experts={name: factor or 1.0 for name, factor in factors.items()},
    )
    behind: frozenset[str] = frozenset()
    for name in (name for name, factor in factors.items() if factor is None):
        behind = _behind(name, watcher, order)
        plan = replace(plan, beside=_beside(name, watcher, halves, linears))
    output_linears = frozenset(name for name in linears if _is_end(name, watcher, first))
    groups = tuple(
        group
        for group in watcher.groups()
        if len({one in first for one in (group.producer, *group.consumers)}) == 1
    )
    offsets = {name: watcher.gain_offset(name) for name in order if watcher.is_norm(name)}
    return LayerTrace(plan, groups, first, output_linears, order, offsets, weights.chosen, behind)


def _watched(
    skeleton: Skeleton,
    layer: int,
    linears: dict[str, tuple[str, ...]],
    experts: list[str],
    weights: ProbeWeights,
) -> tuple[LayerTracer, list[str]]:
    """The layer once it has run, and those of `experts` that were asked as experts are."""
    hidden = torch.randn(
        PROBED, skeleton.hidden_size, generator=torch.Generator().manual_seed(layer)
    )
    while True:
        plan = LayerPlan(linears, experts=dict.fromkeys(experts, 1.0))
        try:
            return LayerTracer(
                DecoderLayer(skeleton, layer, plan, weights), weights, hidden
            ), experts
        except NotExperts as other:
            experts = [name for name in experts if name != other.name]
        except SeveralInputs as fault:
            told = f"{skeleton.description}: a token gives each of the experts that it asks another input"
            raise QuantkitError(told, ROUTE) from fault


def _answered(name: str, watcher: LayerTracer) -> tuple[Tensor, ForwardTrace, ForwardTrace]:
    """Answers of a module of experts, and the layer with these and with none."""
    answer = torch.randn(watcher.hidden.shape, generator=torch.Generator().manual_seed(17))
    seen = []
    for value in (answer, torch.zeros_like(answer)):
        watcher.weights.restore()
        watcher.weights.answers[watcher.block.experts_name(name)] = value
        seen.append(watcher.look())
    watcher.weights.restore()
    return answer, seen[0], seen[1]


def _factor(name: str, watcher: LayerTracer) -> float | None:
    """What the answers of a module of experts are multiplied by before they are added to the
    residual stream; None where more is done."""
    answer, seen, without = _answered(name, watcher)
    added = seen.output - without.output
    factor = float((added * answer).sum() / answer.square().sum())
    return None if distance(added, factor * answer) > SAME or factor == 0 else factor


def _behind(name: str, watcher: LayerTracer, order: tuple[str, ...]) -> frozenset[str]:
    """Modules with tensors of their own that read what the experts make. Raises QuantkitError where
    there is none, or a linear is one."""
    _, seen, without = _answered(name, watcher)
    reads = [
        one
        for one in order
        if one != name
        and one in seen.inputs
        and not torch.equal(seen.inputs[one], without.inputs[one])
    ]
    if not reads or any(watcher.is_read_by(one) for one in reads):
        raise QuantkitError(
            f"{watcher.block.skeleton.description}: more is done with what the routed experts make than "
            "to add it",
            ROUTE,
        )
    return frozenset(reads)


def _beside(
    name: str, watcher: LayerTracer, halves: Halves | None, linears: list[str]
) -> tuple[str, ...]:
    """Of the linears those whose outputs are read behind the experts, beside what these make
    together: the others may answer zeros then."""
    block, context = watcher.block, CausalContext([len(watcher.hidden)])
    before = block.plan
    block.plan = replace(before, halves=halves)
    hidden = watcher.hidden if halves is None else block.attend(watcher.hidden, context)
    answer = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(17))
    watcher.weights.answers[block.experts_name(name)] = answer
    expected = block.feed_forward(hidden, context)

    def joined(beside: list[str]) -> Tensor:
        block.plan = replace(block.plan, beside=tuple(beside))
        kept = torch.cat((hidden, block.mlp_output(hidden, context)[:, hidden.shape[1] :]), dim=1)
        return block.add_mlp_output(kept, answer, context)

    kept = [one for one in linears if one in watcher.first.called]
    for one in list(kept):
        fewer = [other for other in kept if other != one]
        if distance(joined(fewer), expected) < SAME:
            kept = fewer
    same = distance(joined(kept), expected) < SAME
    block.plan = before
    watcher.weights.restore()
    if not same:
        raise QuantkitError(
            f"{block.skeleton.description}: what is behind its routed experts cannot be computed after "
            "them",
            ROUTE,
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


def _halves(watcher: LayerTracer) -> tuple[Halves | None, frozenset[str]]:
    """Where the layer can be cut in two, and the modules of the first half."""
    block, seen, hidden = watcher.block, watcher.first, watcher.hidden
    children = {name for name, _ in block.module.named_children()}
    called = [
        name
        for name in seen.outputs
        if name in children and seen.inputs[name].shape[-1] == hidden.shape[-1]
    ]
    for place, cut in enumerate(called[1:], start=1):
        stream = seen.inputs[cut].reshape(-1, hidden.shape[-1])
        if stream.shape != hidden.shape or torch.equal(stream, hidden):
            continue
        halves = Halves({name: seen.returned[name] for name in called[:place]}, cut)
        block.plan = replace(block.plan, halves=halves)
        context = CausalContext([len(hidden)])
        try:
            joined = block.feed_forward(block.attend(hidden, context), context)
        except Exception:  # a layer that cannot do without what its first children return
            continue
        finally:
            block.plan = replace(block.plan, halves=None)
        if distance(joined, seen.output) < SAME:
            first = frozenset(name for name in seen.inputs if name.split(".")[0] in halves.first)
            return halves, first
    return None, frozenset()


def _is_end(name: str, watcher: LayerTracer, first: frozenset[str]) -> bool:
    """Whether nothing in its half looks at what a linear makes but the sum that is the residual
    stream."""
    seen = watcher.first
    if name not in seen.outputs or seen.outputs[name].shape[-1] != watcher.hidden.shape[-1]:
        return False
    watcher.weights.restore()
    watcher.weights.rows[watcher.block.disk(name)] = torch.zeros(seen.outputs[name].shape[-1])
    without = watcher.look()
    watcher.weights.restore()
    others = [
        one for one in seen.inputs if (one in first) == (name in first) and watcher.is_read_by(one)
    ]
    return distance(without.output, seen.output) > 0 and all(
        torch.equal(without.inputs[one], seen.inputs[one]) for one in others
    )
