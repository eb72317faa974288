"""A transformers model as an `Architecture`: rows of a checkpoint, scale groups and decoder layers,
as found by tracing."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from quantkit_kernels import SILU, Gating, Routing

from quantkit.checkpoint.stacked_experts import Stack
from quantkit.common.errors import QuantkitError
from quantkit.models import tensor_names
from quantkit.models.architecture import ModelConfig
from quantkit.models.hf_traced.embed_and_head import (
    EmbedAndHead,
    LastNorm,
    Read,
    check_logits,
    last_norm,
)
from quantkit.models.hf_traced.experts import StackedExperts, UnsupportedExperts, trace_experts
from quantkit.models.hf_traced.layer import DecoderLayer, SiteWeights
from quantkit.models.hf_traced.module_tree import RTN_REMEDY, check_built
from quantkit.models.hf_traced.skeleton import Skeleton
from quantkit.models.hf_traced.sublayers import LayerTrace, trace_layer
from quantkit.models.hyper_connections import packed_width
from quantkit.models.table import Parameter, Projection, Role, ScaleGroup, Split


@dataclass(frozen=True)
class TracedConfig(ModelConfig):
    """The fields of `ModelConfig` that calibration uses. num_attention_heads is 0, because heads
    are not traced."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    routing: Routing | None = None
    gating: Gating = SILU
    num_nextn_predict_layers: int = 0
    copied_prefixes: tuple[str, ...] = ()
    num_attention_heads: int = 0
    stream_count: int = 1
    max_independent_tokens: int | None = None

    @property
    def state_width(self) -> int:
        return packed_width(self.hidden_size, self.stream_count)

    def is_moe(self, layer: int) -> bool:
        return False


class TracedArchitecture:
    """The architecture of one config.json. Raises QuantkitError where transformers is missing, does
    not know it, or has a forward that cannot be run layer by layer."""

    MtpLayer = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_built(config)
        self.skeleton = skeleton = Skeleton(config)
        skeleton.check_chain()
        check_logits(skeleton)
        self._by_kind: dict[str, LayerTrace] = {}
        for layer in range(len(skeleton.layers)):
            if skeleton.kind(layer) not in self._by_kind:
                self._by_kind[skeleton.kind(layer)] = trace_layer(skeleton, layer)
        self.kinds = [self._by_kind[skeleton.kind(layer)] for layer in range(len(skeleton.layers))]
        self.norm: LastNorm | None = last_norm(skeleton)
        self.experts = {
            layer: found
            for layer in range(len(self.kinds))
            if (found := self._experts_of(layer)) is not None
        }

    @cached_property
    def config(self) -> TracedConfig:
        eps = 1e-6 if self.norm is None else self.norm.eps
        vocab = self.skeleton.text.get_input_embeddings().weight.shape[0]
        first = next(iter(self.experts), None)
        routing = (
            None
            if first is None
            else Routing(len(self.experts[first].names), self.kinds[first].topk)
        )
        gating = SILU if first is None else self.experts[first].gating
        skeleton = self.skeleton
        return TracedConfig(
            vocab,
            skeleton.hidden_size,
            len(skeleton.layers),
            eps,
            routing,
            gating,
            stream_count=skeleton.stream_count,
            max_independent_tokens=skeleton.selected_tokens if skeleton.shares_selections else None,
        )

    @property
    def stacks(self) -> list[Stack]:
        """Stored tensors that hold several experts."""
        return [stack for found in self.experts.values() for stack in found.stacks]

    def DecoderLayer(self, config: TracedConfig, layer: int, weights: SiteWeights) -> DecoderLayer:
        return DecoderLayer(self.skeleton, layer, self.kinds[layer].plan, weights)

    def embed_and_head(self, read: Read, device: torch.device) -> EmbedAndHead:
        return EmbedAndHead(self.skeleton, read, self._embedding, device)

    def parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Parameter]:
        """shapes: logical shape of every stored tensor, by name. In the order of a forward pass;
        tensors outside the text model's layers come last. Raises QuantkitError where a tensor that
        transformers needs is not stored."""
        skeleton, rows = self.skeleton, list[Parameter]()
        linears = {
            skeleton.published[name] for name in skeleton.linears if name in skeleton.published
        }
        tensors = [
            {name: tuple(one.shape) for name, one in module.state_dict().items()}
            for module in skeleton.layers
        ]
        for layer, kind in enumerate(self.kinds):
            experts = self.experts.get(layer)
            inner = () if experts is None else experts.parameters
            stored = [
                (name, disk, tensors[layer][name])
                for name, disk in skeleton.names(layer).items()
                if f"{skeleton.prefixes[layer]}.{name}" not in inner
            ] + [
                (name, disk, shape)
                for name, one in skeleton.assembled_names(layer).items()
                for disk, shape in one.parts.items()
            ]
            called = {module: place for place, module in enumerate(kind.order)}
            stored.sort(key=lambda own: called.get(own[0].rpartition(".")[0], len(called)))
            for name, disk, made in stored:
                if disk not in shapes:
                    raise QuantkitError(
                        f"{skeleton.label}: transformers computes with {disk}, and it is not "
                        "stored",
                        RTN_REMEDY,
                    )
                if made != shapes[disk]:
                    raise QuantkitError(
                        f"{disk} has shape {list(shapes[disk])}, and its config.json makes it "
                        f"{list(made)}",
                        "use the model's own config.json",
                    )
                row = Parameter(disk, made, "norm", layer=layer)
                rows.append(self._row(name, layer, kind, row, linears))
            if experts is not None:
                rows += self._expert_rows(layer, experts, shapes)
        own = {row.name for row in rows}
        rest = [
            self._outside(Parameter(name, shape, "copied"))
            for name, shape in shapes.items()
            if name not in own
        ]
        first = [row for row in rest if row.role == "embedding"]
        return first + rows + [row for row in rest if row.role != "embedding"]

    def scale_groups(self, config: TracedConfig, layer: int) -> list[ScaleGroup]:
        """The groups that were found and proven."""
        kind, names = self.kinds[layer], self.skeleton.names(layer)
        groups = []
        for group in kind.groups:
            reaches = any(name in kind.plan.experts for name in group.consumers)
            alone = [
                name for name in (group.producer, *group.consumers) if name not in kind.plan.experts
            ]
            disk = {
                name: names.get(f"{name}.weight", names.get(name, "")).removesuffix(".weight")
                for name in alone
            }
            readers = [disk[name] for name in alone[1:]]
            if reaches:
                readers += [
                    one.removesuffix(".weight")
                    for triple in self.experts[layer].names
                    for one in dict.fromkeys(triple[:2])
                ]
            first = next((name for name in alone[1:] if name in kind.plan.linears), None)
            if first is None and not reaches:
                continue
            observed = (
                readers[0]
                if first is None
                else names[f"{kind.plan.linears[first][0]}.weight"].removesuffix(".weight")
            )
            made = ScaleGroup(
                observed,
                disk[group.producer],
                group.gain_offset is not None,
                tuple(readers),
                observed,
            )
            groups.append(replace(made, reaches_experts=reaches, biased=group.biased))
        if layer not in self.experts or not self.experts[layer].gating.is_linear_in_up:
            return groups
        for expert, triple in enumerate(self.experts[layer].names):
            _, up, down = (name.removesuffix(".weight") for name in triple)
            groups.append(ScaleGroup(down, up, False, (down,), down, expert))
        return groups

    @property
    def summary(self) -> str:
        """The number of proven scale groups, and the inputs without one, over all kinds of
        layers."""
        linears = [
            (group, len(kind.plan.linears))
            for kind in self._by_kind.values()
            for group in kind.groups
        ]
        left = dict.fromkeys(
            site[0]
            for kind in self._by_kind.values()
            for site in kind.plan.linears.values()
            if not any(set(site) & set(group.consumers) for group in kind.groups)
        )
        left |= dict.fromkeys(
            name
            for kind in self._by_kind.values()
            for name in kind.plan.experts
            if not any(name in one.consumers for one in kind.groups)
        )
        kinds = len(self._by_kind)
        summary = (
            f"computed by transformers' modules: {len(linears)} scale groups proven in {kinds} "
            f"kind{'s' * (kinds > 1)} of layers"
        )
        return summary + (f"; no scale for what is read by {', '.join(left)}" if left else "")

    def _experts_of(self, layer: int) -> StackedExperts | None:
        """The experts of a layer. Raises QuantkitError where they are not supported."""
        kind, skeleton = self.kinds[layer], self.skeleton
        if not kind.plan.experts:
            return None
        name, *more = kind.plan.experts
        try:
            if more:
                raise UnsupportedExperts("a layer has several mixtures of experts")
            found = trace_experts(
                skeleton.model,
                f"{skeleton.prefixes[layer]}.{name}",
                skeleton.layers[layer].get_submodule(name),
            )
            if found.zero_expert_scale:
                raise UnsupportedExperts(
                    f"some experts of layer {layer} hand on what they read, which calibration does "
                    "not compute"
                )
            return found
        except UnsupportedExperts as fault:
            raise QuantkitError(f"{skeleton.label}: {fault}", RTN_REMEDY) from fault

    def _row(
        self, name: str, layer: int, kind: LayerTrace, row: Parameter, linears: Collection[str]
    ) -> Parameter:
        module = name.rpartition(".")[0]
        row = replace(
            row,
            block="attention" if module in kind.first else "mlp",
            after_experts=module in kind.after_experts,
        )
        row = replace(row, parallel_to_experts=module in kind.plan.parallel and len(row.shape) == 2)
        if len(row.shape) == 2 and module in kind.plan.linears:
            role: Role = tensor_names.role(row.module) if row.name in linears else "router"
            return replace(
                row, role=role, split="row" if module in kind.output_linears else "replicate"
            )
        if len(row.shape) == 2:
            return replace(row, role="router")
        is_gain = module in kind.gain_offsets and name == f"{module}.weight"
        return (
            replace(row, role="norm", gain_offset=kind.gain_offsets[module])
            if is_gain
            else replace(row, role="bias")
        )

    def _expert_rows(
        self, layer: int, experts: StackedExperts, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[Parameter]:
        width, hidden = experts.width, self.skeleton.hidden_size
        projections: tuple[Projection, ...] = ("gate", "up", "down")
        for number, names in enumerate(experts.names):
            has_gate = names[0] != names[1]
            for projection, name in list(zip(projections, names))[0 if has_gate else 1 :]:
                shape = (hidden, width) if projection == "down" else (width, hidden)
                if shapes.get(name) != shape:
                    reason = (
                        f"{name} is not stored"
                        if name not in shapes
                        else f"{name} has shape {list(shapes[name])}"
                    )
                    raise QuantkitError(
                        f"{self.skeleton.label}: {reason}, and its config.json makes it "
                        f"{list(shape)}",
                        RTN_REMEDY,
                    )
                both = f"{names[0].removesuffix('.weight')}_up" if has_gate else None
                fused = None if projection == "down" else both
                split: Split = "row" if projection == "down" else "column"
                yield Parameter(
                    name,
                    shape,
                    "linear",
                    split,
                    layer,
                    number,
                    fused,
                    block="expert",
                    projection=projection,
                )

    def _outside(self, row: Parameter) -> Parameter:
        """A tensor outside the layers: embedding, head and last norm have roles, the rest is
        copied."""
        if row.name == self._embedding:
            return replace(row, role="embedding")
        if row.name == self._head:
            return replace(row, role="head", split="gathered")
        if self.norm is not None and row.name == f"{self.norm.module}.weight":
            return replace(row, role="norm", gain_offset=self.norm.gain_offset)
        return row

    @cached_property
    def _embedding(self) -> str:
        return self._name_of(self.skeleton.text.get_input_embeddings())

    @cached_property
    def _head(self) -> str:
        """Empty where it is the embedding."""
        return (
            "" if self.skeleton.tied else self._name_of(self.skeleton.model.get_output_embeddings())
        )

    def _name_of(self, module: Any) -> str:
        """Stored name of a module's matrix; empty where it is not stored."""
        name = next(
            (name for name, one in self.skeleton.model.named_modules() if one is module), ""
        )
        return self.skeleton.published.get(f"{name}.weight", "")
