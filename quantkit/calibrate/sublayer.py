"""One sublayer of a decoder layer, attention or feed-forward with its residual sum, run by the
model's own forward with any tensors that the caller passes.

One decoder layer's weights in float32 behind the interface that the model's forward uses, with
hooks on every linear input.

Routed experts are not included: `experts` is any operator that the caller passes, such as a
`RoutingRecorder`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from quantkit_kernels import SILU, Gating, UnsummedPairs, add_rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import (
    HiddenStates,
    Observer,
    TokenBatch,
    copied_states,
    no_experts,
)
from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.ranks import BatchParallel, Ranks
from quantkit.calibrate.source_model import ParameterReader, SourceModel, feed_forward_unit
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import Weight, dequantize
from quantkit.models.activation_quant import NO_ACTIVATION_QUANT, ActivationQuant
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer
from quantkit.models.ngram_table import StoredNgramTable
from quantkit.models.rope import Rope
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import ExpertsOp, LinearOp, NgramTable, PrologOp
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import sample_linear

NO_ACTIVATION_QUANTS: Mapping[str, ActivationQuant] = {}


@dataclass(eq=False)
class LayerWeights:
    """tensors: by full name, float32, on one device. Looked up at every call, so a caller may
    replace a weight between calls.

    stored: the checkpoint whose n-gram tables, and rotations of inputs, are read. activation_quants: of linears with
    quantized inputs. product: of an input and a weight. sites:
    linears that read one input, by the name it is observed under.
    """

    tensors: Mapping[str, Tensor]
    routed: ExpertsOp | None = None
    observer: Observer | None = None
    activation_quants: Mapping[str, ActivationQuant] = field(default_factory=dict)
    product: Callable[[Tensor, Tensor], Tensor] = F.linear
    stored: Checkpoint | None = None
    sites: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dequantized(self, module: str) -> Tensor:
        return self.tensors[f"{module}.weight"]

    def ngram_table(self, module: str) -> NgramTable:
        assert self.stored is not None, f"no checkpoint for {module}"
        return StoredNgramTable(self.stored, module)

    def input_rotation(self, module: str) -> int:
        return 0 if self.stored is None else self.stored.input_rotation(module)

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


Build = Callable[[LayerWeights], DecoderLayer]
"""Weights -> the model's decoder layer."""
Run = Callable[[DecoderLayer, Tensor, list[int]], Tensor]
"""(decoder layer, hidden [T, H], lengths of its sequences) -> hidden [T, H] after this sublayer."""


def decoder_layer(model: SourceModel, layer: int, weights: LayerWeights) -> DecoderLayer:
    """The model's layer, whose n-gram tables are the source's."""
    weights.stored = model.weights.checkpoint
    block = model.architecture.DecoderLayer(model.config, layer, weights)
    block.product = lambda x, w: weights.product(x, w)  # replaced from batch to batch
    return block


def bare_layer(model: SourceModel, layer: int) -> DecoderLayer:
    """The source's layer without its linears and experts, for what is next to them."""
    rows = [
        row
        for row in model.layer_rows(layer)
        if row.expert is None and row.role not in ("linear", "embedding", "head", "mtp_proj")
    ]
    return decoder_layer(
        model, layer, LayerWeights(model.weights.dequantized_all(rows), no_experts)
    )


def run_attention(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The attention half of a decoder layer."""
    context = CausalContext(lengths, hidden.device, product=block.product)
    return block.attend(hidden, context)


def run_feed_forward(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The MLP or expert half."""
    return block.feed_forward(hidden, CausalContext(lengths, hidden.device))


@dataclass(frozen=True)
class Sublayer:
    """One sublayer.

    rows: its parameters without routed experts. needed: the rows that the layer is built from and
    this sublayer reads; a decoder layer is built whole, but the other sublayer's linears are only
    accessed when they run. groups: its scale groups, without those inside a routed expert. stored:
    dtype on disk of unquantized tensors, by name. quantized: modules to quantize; frozen: modules
    that the output holds packed as in the source. experts: the first linear of its routed experts,
    None without experts. importance: weight of a squared error in each channel of the residual
    stream after this sublayer, float32 [H]; None: uniform. outputs: the cost of an error there, [H,
    H], if GPTQ uses it. heads: query heads of attention; 0 if unknown. width: channels of the
    residual stream.
    """

    name: str
    build: Build
    run: Run
    rows: list[Parameter]
    needed: list[Parameter]
    groups: list[ScaleGroup]
    stored: dict[str, torch.dtype]
    quantized: set[str]
    frozen: set[str]
    solvers: SolverTable
    experts: str | None
    importance: Tensor | None
    outputs: Curvature | None
    heads: int
    width: int

    @property
    def output_linears(self) -> frozenset[str]:
        """Modules that write to the residual stream: no linear of this sublayer reads their
        outputs."""
        return frozenset(row.module for row in self.rows if row.split == "row")

    def output_sites(self, sites: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
        """Those of the sites, linears that read one input by the first, that write there."""
        return frozenset(
            first for first, modules in sites.items() if self.output_linears.issuperset(modules)
        )

    @property
    def searches_output_inputs(self) -> bool:
        """Whether a scale is searched for inputs of these linears."""
        return any(
            group.observe in self.output_linears and self.searches(group) for group in self.groups
        )

    def searches(self, group: ScaleGroup) -> bool:
        """Whether the scale of a group is searched, if it has consumers that are quantized."""
        if not {"awq", "smooth"} & set(self.solvers.methods) or self.is_frozen(group):
            return False
        own = self.quantized.intersection(group.consumers)
        # scales between values and o were not measured with 16-bit activations
        return group.heads is None or any(self.solvers.of(one).activation_bits == 8 for one in own)

    def is_frozen(self, group: ScaleGroup) -> bool:
        """Whether a scale would change a linear that must stay as in the source."""
        return not self.frozen.isdisjoint((group.producer, *group.consumers))

    @property
    def experts_group(self) -> ScaleGroup | None:
        """The group whose scale the routed experts read; None without experts, or without a
        verified group."""
        return next((group for group in self.groups if group.reaches_experts), None)

    @property
    def experts_site(self) -> str | None:
        """The module under which the routed experts' input is observed; None without experts."""
        group = self.experts_group
        return self.experts if group is None else group.observe


def sublayer_of(
    model: SourceModel,
    solvers: SolverTable,
    unit: str,
    layer: int,
    run: Run,
    importance: Tensor | None = None,
    outputs: Curvature | None = None,
) -> Sublayer:
    """One half of a decoder layer by its unit, from the model's table."""
    rows, needed = model.sublayer_rows(unit, layer)
    own = {row.name for row in rows}
    experts = (
        next(iter(model.experts(layer).values()), None)
        if unit == feed_forward_unit(layer)
        else None
    )
    return Sublayer(
        name=unit,
        build=lambda weights: decoder_layer(model, layer, weights),
        run=run,
        rows=rows,
        needed=needed,
        groups=[
            group
            for group in model.groups[layer]
            if group.expert is None and f"{group.producer}.weight" in own
        ],
        stored={
            row.name: model.weights.dtype(row)
            for row in needed
            if row.module not in model.quantized
        },
        quantized=model.quantized,
        frozen=model.frozen,
        solvers=solvers,
        experts=None if experts is None else experts.gate.module,
        importance=importance,
        outputs=outputs,
        heads=model.config.num_attention_heads,
        width=model.config.hidden_size,
    )


def advance(
    sublayer: Sublayer,
    tensors: Mapping[str, Tensor],
    states: HiddenStates,
    activation_quants: Mapping[str, ActivationQuant],
    ranks: Ranks,
    experts: ExpertsOp = no_experts,
) -> None:
    """Replace the hidden states by those after this sublayer with these tensors; ranks divide the
    batches. Routed experts add their outputs afterwards.

    activation_quants: of modules with quantized inputs. experts: called on every rank with the
    routing; returns zeros.
    """
    runs, started = BatchParallel(ranks, states.hidden.device), list[TokenBatch]()
    weights = LayerWeights(
        tensors,
        experts if experts is no_experts else runs.shared_experts(experts),
        activation_quants=activation_quants,
    )
    block = sublayer.build(weights)

    def take(_: str, after: Tensor) -> None:
        states.put(started[-1].part, after)

    give = runs.shared_hook(take)

    def run(batch: TokenBatch) -> None:
        weights.product = batch_product(batch)
        give("", sublayer.run(block, states.hidden[batch.part], batch.lengths))

    runs.over(states.batches(), run, started.append)


def batch_product(batch: TokenBatch) -> Callable[[Tensor, Tensor], Tensor]:
    """Of inputs and weights: in float32 for held-out tokens, whose paths are compared."""
    return F.linear if batch.held_out else sample_linear


def output_tensors(
    sublayer: Sublayer,
    source: ParameterReader,
    weights: Mapping[str, Weight],
    unquantized: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Values of the output's tensors, float32 on the source's device. weights: by module; unquantized:
    tensors in their stored dtype; absent ones are the source's."""
    tensors = {}
    for row in sublayer.needed:
        if row.module in weights:
            tensors[row.name] = dequantize(weights[row.module])
        elif row.name in unquantized:
            tensors[row.name] = unquantized[row.name].float().to(source.device)
        else:
            tensors[row.name] = source.dequantized(row).to(sublayer.stored[row.name]).float()
    return tensors


def run_without_post_moe(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The expert half without what follows its experts: hidden [T, W] -> [T, W]."""
    after, summed = hidden.clone(), block.mlp_output(hidden, CausalContext(lengths, hidden.device))
    after[:, : summed.shape[1]] += summed
    return after


class AfterExperts:
    """What a layer computes from the sum of all experts' outputs: openPangu-Ultra-MoE's norm,
    DeepSeek-V4's hyper-connection, Kimi-K3's linear back from the latent space.

    Routed experts add their outputs one after the other to the first `width` channels of the hidden
    states, which meanwhile hold their previous values plus the sum, and in `extra` further channels
    the output of linears parallel to the experts that is read there too, as in Gemma 4.
    """

    def __init__(self, model: SourceModel, layer: int) -> None:
        self.model, self.layer, self.width = model, layer, model.config.mlp_output_width
        parallel = (row for row in model.layer_rows(layer) if row.parallel_to_experts)
        self.extra = sum(row.shape[0] for row in parallel)

    @classmethod
    def of(cls, model: SourceModel, layer: int) -> "AfterExperts | None":
        """None for a layer that only adds the sum to its residual stream."""
        late = any(row.after_experts for row in model.layer_rows(layer))
        return cls(model, layer) if late else None

    @cached_property
    def block(self) -> DecoderLayer:
        return bare_layer(self.model, self.layer)

    def padded(self, hidden: Tensor, scratch: Path | None = None) -> Tensor:
        """hidden [T, W] with room for the parallel linears; scratch: as of `HiddenStates`."""
        return copied_states(hidden, scratch, self.extra) if self.extra else hidden

    def finish_(self, states: HiddenStates, before: Tensor) -> None:
        """Replace the hidden states by those after the layer. before [T, width]: their first
        channels before any expert."""
        for batch in states.batches():
            hidden = states.hidden[batch.part]
            summed = hidden[:, : self.width] - before[batch.part]
            hidden[:, : self.width] = before[batch.part]
            context = CausalContext(batch.lengths, hidden.device)
            after = self.block.add_mlp_output(hidden, summed, context)
            states.put(batch.part, after)
        if self.extra:
            states.hidden = copied_states(states.hidden[:, : -self.extra], states.scratch)


@contextmanager
def feed_forward(model: SourceModel, layer: int, paths: Iterable[HiddenStates]) -> Iterator[Run]:
    """Context manager that returns how the layer's MLP or expert half is run. On exit all experts
    have added their outputs, and the rest of the layer is computed (`AfterExperts`)."""
    end = AfterExperts.of(model, layer)
    if end is None:
        yield run_feed_forward
        return
    kept = [(path, copied_states(path.hidden[:, : end.width], path.scratch)) for path in paths]
    for path, _ in kept:
        path.hidden = end.padded(path.hidden, path.scratch)
    yield run_without_post_moe
    for path, before in kept:
        end.finish_(path, before)
