"""One sublayer of a decoder layer, attention or feed-forward with its residual sum, run by the
model's own forward with any tensors that the caller passes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import HiddenStates, TokenBatch
from quantkit.calibrate.layer_weights import LayerWeights, no_experts
from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.ranks import BatchParallel, Ranks
from quantkit.calibrate.source_model import ParameterReader, SourceModel, feed_forward_unit
from quantkit.grids.base import Weight, dequantize
from quantkit.models.activation_quant import ActivationQuant
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import ExpertsOp
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import sample_linear

Build = Callable[[LayerWeights], DecoderLayer]
"""Weights -> the model's decoder layer."""
Run = Callable[[DecoderLayer, Tensor, list[int]], Tensor]
"""(decoder layer, hidden [T, H], lengths of its sequences) -> hidden [T, H] after this sublayer."""


def run_attention(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The attention half of a decoder layer."""
    return block.attend(hidden, CausalContext(lengths, hidden.device))


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
        build=lambda weights: model.architecture.DecoderLayer(model.config, layer, weights),
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
        states.hidden[started[-1].part] = after

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
    plain: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Values of the output's tensors, float32 on the source's device. weights: by module; plain:
    tensors in their stored dtype; absent ones are the source's."""
    tensors = {}
    for row in sublayer.needed:
        if row.module in weights:
            tensors[row.name] = dequantize(weights[row.module])
        elif row.name in plain:
            tensors[row.name] = plain[row.name].float().to(source.device)
        else:
            tensors[row.name] = source.dequantized(row).to(sublayer.stored[row.name]).float()
    return tensors


def run_without_post_moe(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The expert half without what follows its experts: hidden [T, W] -> [T, W]."""
    after, summed = hidden.clone(), block.mlp_output(hidden, CausalContext(lengths, hidden.device))
    after[:, : summed.shape[1]] += summed
    return after


@contextmanager
def feed_forward(model: SourceModel, layer: int, paths: Iterable[HiddenStates]) -> Iterator[Run]:
    """Context manager that returns how the layer's MLP or expert half is run.

    Some layers compute something from the sum of all experts' outputs: openPangu-Ultra-MoE's norm,
    DeepSeek-V4's hyper-connection. Routed experts add their outputs one after the other to the
    first channels of the hidden states, which meanwhile hold their previous values plus the sum,
    and in further channels the output of linears parallel to the experts that is read there too, as
    in Gemma 4. On exit all experts have added theirs, and the rest of the layer is computed.
    """
    if not any(row.after_experts for row in model.layer_rows(layer)):
        yield run_feed_forward
        return
    width, extra = (
        model.config.hidden_size,
        sum(row.shape[0] for row in model.layer_rows(layer) if row.parallel_to_experts),
    )
    kept = [
        (path, path.hidden[:, :width].clone()) for path in paths
    ]  # experts only add to these channels
    for path, _ in kept:
        path.hidden = F.pad(path.hidden, (0, extra)) if extra else path.hidden
    yield run_without_post_moe
    rows = [
        row
        for row in model.layer_rows(layer)
        if row.expert is None and row.role not in ("linear", "embedding", "head", "mtp_proj")
    ]
    block = model.architecture.DecoderLayer(
        model.config, layer, LayerWeights(model.weights.dequantized_all(rows), no_experts)
    )
    for path, before in kept:
        for batch in path.batches():
            states = path.hidden[batch.part]
            summed = states[:, :width] - before[batch.part]
            states[:, :width] = before[batch.part]
            after = block.add_mlp_output(
                states, summed, CausalContext(batch.lengths, states.device)
            )
            states[:, : after.shape[1]] = after
        path.hidden = path.hidden[:, : path.hidden.shape[1] - extra].contiguous()
