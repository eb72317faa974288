"""Quantize the linears of a sublayer, given their scales; attention's linears by what their errors
cost in the residual stream.

The cost of an error in the outputs of a linear inside attention has a closed form. With M [H, H]
the cost in the stream and O_h [H, V] the columns of o through which head h writes, an error e in
the head's values costs e^T O_h^T M O_h e: all tokens' weights are only factors. An error in its
scores moves the head's output between values, which costs the spread of these values, s_h =
tr(O_h^T M O_h cov(v_h)), times the squared score: so an error in what keys are computed from is
weighted by the second moment of the queries, and vice versa. A norm in between contributes its gain
to both. Moments are those of the calibration tokens: W H W^T for a linear W over an input of
Hessian H.

Neglected: that keys and queries of grouped heads are rotated, and that scores of the rotated part
of latent attention are alike in all channels; that the mean of the keys costs nothing; the effect
of a norm's division.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import (
    HiddenStatePair,
    HiddenStates,
    TokenBatch,
    no_experts,
)
from quantkit.calibrate.hidden_states import Observer as InputHook
from quantkit.calibrate.input_statistics import (
    HELD_OUT_ROWS,
    OutputInputs,
    PartialRun,
    adds_alone,
    enough,
)
from quantkit.calibrate.input_sums import (
    Drift,
    DriftAccumulator,
    InputStatistics,
    Observer,
    is_wide_input,
)
from quantkit.calibrate.linear_solver import LinearResult, LinearSolver
from quantkit.calibrate.ranks import BatchParallel, Ranks
from quantkit.calibrate.scales import FoldedTensors, LinearInput, SublayerScales, linear_input
from quantkit.calibrate.source_model import ParameterReader
from quantkit.calibrate.sublayer import LayerWeights, batch_product
from quantkit.grids.base import Weight, dequantize
from quantkit.models.table import Parameter, Projection
from quantkit.quant.gptq import Curvature
from quantkit.quant.tensor_cores import tensor_core_products


def observe_output_linears(
    scaled: SublayerScales,
    source: ParameterReader,
    rounded: Mapping[str, Weight],
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates,
) -> tuple[dict[str, InputStatistics], dict[str, Drift]]:
    """Inputs of the linears that write to the residual stream, with the linears before them
    quantized: o_proj after quantized q, k and v, down_proj after quantized gate and up. By module.
    rounded: linears solved so far, by module; states, original: before this sublayer, the latter
    the calibration tokens on the original path. Tokens on the original path, which run through the
    source's tensors here, advance at the same time if the sublayer has no experts.
    """
    sublayer, folded = scaled.sublayer, FoldedTensors(scaled.sublayer, source, scaled.folding)
    sites = sublayer.output_sites(scaled.sites)
    scales = {group.observe: scaled.scales.get(group.name) for group in sublayer.groups}
    tensors = source.dequantized_all(sublayer.needed)
    wide = {
        site: folded[name] if scaled.folding.changes(name) else tensors[name]
        for site in sites
        if is_wide_input(tensors[name := f"{site}.weight"], scaled.sites[site])
    }
    observer, total = Observer(HELD_OUT_ROWS, ranks), DriftAccumulator(HELD_OUT_ROWS, ranks, wide)
    outputs, partial = OutputInputs(observer, total), PartialRun()
    runs = BatchParallel(ranks, states.quantized.hidden.device)
    calibration, held_out = states.quantized.parts()
    observed = [*calibration, *enough(held_out, HELD_OUT_ROWS)]
    batches = list[TokenBatch]()

    def add_original(module: str, o: Tensor) -> None:
        scale = scales.get(module)
        outputs.add_original(module, o if scale is None else o / scale)

    def at_output_linears(listen: InputHook) -> InputHook:
        """Only these inputs are sent to other ranks."""
        shared = runs.shared_hook(listen)
        return lambda module, x: shared(module, x) if module in sites else None

    written = {f"{module}.weight": dequantize(weight) for module, weight in rounded.items()}
    kept = [  # the last linears' outputs are not used
        row.name
        for row in sublayer.needed
        if row.module not in rounded and row.module not in sublayer.output_linears
    ]
    both = (
        LayerWeights(
            tensors | {name: folded[name] for name in kept} | written,
            no_experts,
            partial.hook(at_output_linears(outputs.add)),
            activation_quants=sublayer.solvers.activation_quants(rounded, rounded),
        ),
        LayerWeights(tensors, no_experts, at_output_linears(add_original)),
    )
    block, exact = map(sublayer.build, both)

    def original_part(batch: TokenBatch) -> tuple[HiddenStates, slice]:
        """The batch on the original path."""
        if not batch.held_out:
            return original, batch.part
        fitted = states.quantized.fitted
        return states.original, slice(batch.part.start - fitted, batch.part.stop - fitted)

    def original_hidden(batch: TokenBatch) -> Tensor:
        of, part = original_part(batch)
        return of.hidden[part]

    only, added = _only_writer(scaled, sites), list[bool]()

    def lost_before(after: Tensor) -> Tensor | None:
        """What the stream of the batch lacks, if the outputs of the only linear are added to it."""
        if only is None:
            return None
        before, scale = original_hidden(batches[-1]), scales.get(only)
        if not added:
            o = outputs.original(only)
            o = o if scale is None else o * scale
            added.append(adds_alone(only, tensors, o, after - before))
        return before - states.quantized.hidden[batches[-1].part] if added[0] else None

    def take(_: str, after: Tensor) -> None:
        outputs.finish_batch(after[:, : sublayer.width], lost_before(after))
        if sublayer.experts is None:
            of, part = original_part(batches[-1])
            of.put(part, after)

    give = runs.shared_hook(take)

    def run(batch: TokenBatch) -> None:
        for weights in both:
            weights.product = batch_product(batch)
        if batch in observed:
            hidden = states.quantized.hidden[batch.part]
            partial(lambda: sublayer.run(block, hidden, batch.lengths), sites, batch.tokens)
        give("", sublayer.run(exact, original_hidden(batch), batch.lengths))

    def begin(batch: TokenBatch) -> None:
        observer.held_out = batch.held_out
        batches.append(batch)

    runs.over(observed if sublayer.experts else [*calibration, *held_out], run, begin)
    return observer.finish(), total.finish()


STREAM_BITS = 4
"""Most bits of a linear that makes up for what the residual stream lacks: at 8 it gave nothing
(KL 5.03e-3 for 4.99e-3 in eight layers of SmolLM2), and moved weights by more than rounding does."""


def _only_writer(scaled: SublayerScales, sites: frozenset[str]) -> str | None:
    """The linear that makes up for what the residual stream lacks, if it alone writes there."""
    modules = [module for site in sites for module in scaled.sites[site]]
    if len(modules) != 1 or modules[0] not in scaled.sublayer.quantized:
        return None
    return modules[0] if scaled.sublayer.solvers.grid_of(modules[0]).bits <= STREAM_BITS else None


_TOGETHER = 1024
"""Channels whose cost is computed at a time."""


def attention_costs(scaled: SublayerScales, folded: FoldedTensors) -> dict[str, Curvature]:
    """By module: [P, n, n] of P heads of n rows, or [1, N, N], for `compensate_both`. Empty if the
    sublayer's cost is unknown, or it is not attention with heads of one size."""
    sublayer = scaled.sublayer
    if sublayer.outputs is None or not sublayer.heads:
        return {}
    rows = _by_projection(sublayer.needed)
    if (
        "o" not in rows
        or rows["o"].module not in sublayer.output_linears
        or rows["o"].shape[1] % sublayer.heads
    ):
        return {}
    costs: dict[str, Tensor] = {}
    if "kv_b" in rows and "q" in rows:  # queries without a low-rank projection
        rows["q_b"] = rows.pop("q")
    if {"kv_a", "kv_b", "q_b"} <= rows.keys():
        latent = _Latent.of(scaled, folded, rows, sublayer.outputs)
        costs = (
            {}
            if latent is None
            else {rows[own].module: cost for own, cost in latent.costs().items() if own in rows}
        )
    elif "v" in rows and rows["v"].module in sublayer.quantized:
        width = rows["o"].shape[1] // sublayer.heads
        groups, left = divmod(rows["v"].shape[0], width)
        if not left and groups and not sublayer.heads % groups:
            values = _value_costs(sublayer.outputs, folded[rows["o"].name], sublayer.heads)
            costs = {rows["v"].module: values.unflatten(0, (groups, -1)).sum(1)}
    damping = sublayer.solvers.recipe.output_damping
    return {
        module: Curvature.of(cost, damping)
        for module, cost in costs.items()
        if module in sublayer.quantized
    }


def _by_projection(rows: list[Parameter]) -> dict[Projection, Parameter]:
    """The attention's linears; empty if two are the same projection."""
    own = [
        row
        for row in rows
        if row.block == "attention"
        and row.projection is not None
        and row.role in ("linear", "kv_b")
    ]
    found = {row.projection: row for row in own if row.projection is not None}
    return found if len(found) == len(own) else {}


@tensor_core_products()
def _value_costs(outputs: Curvature, o: Tensor, heads: int) -> Tensor:
    """O_h^T M O_h of every head, [heads, V, V], for o [H, heads * V]."""
    width, costs = o.shape[1] // heads, list[Tensor]()
    for some in o.split(max(1, _TOGETHER // width) * width, dim=1):
        factored = _by_triangle(outputs.factor, some.index_select(0, outputs.order))
        own = factored.unflatten(1, (-1, width)).movedim(1, 0)
        costs.append(own.mT @ own)
    return torch.cat(costs)


def _by_triangle(factor: Tensor, x: Tensor) -> Tensor:
    """U^T x [H, C] of an upper triangular factor U: half of the product is zero."""
    parts = (slice(0, start + _TOGETHER) for start in range(0, len(factor), _TOGETHER))
    return torch.cat(
        [factor[rows, rows.stop - _TOGETHER : rows.stop].t() @ x[rows] for rows in parts]
    )


def _moments(w: Tensor, curvature: Curvature) -> Tensor:
    """Second moments of the outputs of w [..., N, K], [..., N, N], from the curvature of its
    input."""
    factored = w.index_select(-1, curvature.order) @ curvature.factor
    return factored @ factored.mT


@dataclass(frozen=True)
class _Latent:
    """Latent attention (MLA): h heads of N channels of scores without rotation, R with rotation,
    and V values; L latent channels, Q of the queries' own latent.

    values [h, V, V]: cost of an error in each head's values. kv_b [h, N + V, L], q_b [h, N + R, Q]:
    with the gains of the norms before them. size []: mean square that the latents' norm divides by.
    latents [L, L]: second moments after the division; rotated []: mean square of the rotated keys'
    channels; queries [h, N + R, N + R]: second moments.
    """

    values: Tensor
    kv_b: Tensor
    q_b: Tensor
    size: Tensor
    latents: Tensor
    rotated: Tensor
    queries: Tensor

    @classmethod
    def of(
        cls,
        scaled: SublayerScales,
        folded: FoldedTensors,
        rows: Mapping[Projection, Parameter],
        outputs: Curvature,
    ) -> "_Latent | None":
        """None if the shapes differ, or q_b or kv_a is not quantized, so that its input was not
        observed."""
        heads, count = scaled.sublayer.heads, rows["kv_b"].shape[1]
        values = rows["o"].shape[1] // heads
        q_input, kv_input = (
            _input_of(scaled, rows[projection].module) for projection in ("q_b", "kv_a")
        )
        wide = rows["kv_b"].shape[0] - heads * values
        if (
            q_input is None
            or kv_input is None
            or wide <= 0
            or wide % heads
            or rows["q_b"].shape[0] % heads
            or rows["kv_a"].shape[0] <= count
        ):
            return None
        q_b, kv_a = folded[rows["q_b"].name], folded[rows["kv_a"].name]
        queries = _moments(q_b.unflatten(0, (heads, -1)), q_input.curvature)
        made, rotated = (_moments(own, kv_input.curvature) for own in (kv_a[:count], kv_a[count:]))
        size = made.diagonal().mean().clamp(min=1e-30)
        return cls(
            values=_value_costs(outputs, folded[rows["o"].name], heads),
            kv_b=(folded[rows["kv_b"].name] * _gain_before(scaled, folded, rows["kv_b"])).unflatten(
                0, (heads, -1)
            ),
            q_b=(q_b * _gain_before(scaled, folded, rows["q_b"])).unflatten(0, (heads, -1)),
            size=size,
            latents=made / size,
            rotated=rotated.diagonal().mean(),
            queries=queries,
        )

    def costs(self) -> dict[Projection, Tensor]:
        """Of q_a, q_b and kv_a, [P, n, n]."""
        nope_dim = self.kv_b.shape[1] - self.values.shape[1]
        keys, values = self.kv_b[:, :nope_dim], self.kv_b[:, nope_dim:]
        weighted_values = self.values @ values
        spread = (weighted_values @ self.latents * values).sum((1, 2))
        score = (spread / self.q_b.shape[1])[
            :, None, None
        ]  # scores are divided by the root of their channels
        q_b = torch.diag_embed((score[:, 0] * self.rotated).expand(self.q_b.shape[:2]))
        q_b[:, :nope_dim, :nope_dim] = score * (keys @ self.latents @ keys.mT)
        latents = values.flatten(0, 1).t() @ weighted_values.flatten(0, 1)
        latents += keys.flatten(0, 1).t() @ (
            score * self.queries[:, :nope_dim, :nope_dim] @ keys
        ).flatten(0, 1)
        rotated = (score * self.queries[:, nope_dim:, nope_dim:]).diagonal(dim1=1, dim2=2).sum(0)
        q_a = self.q_b.flatten(0, 1).t() @ (q_b @ self.q_b).flatten(0, 1)
        kv_a = torch.block_diag(
            latents / self.size, torch.diag(rotated.mean().expand(len(rotated)))
        )
        return {"q_a": q_a[None], "q_b": q_b, "kv_a": kv_a[None]}


def _input_of(scaled: SublayerScales, module: str) -> LinearInput | None:
    """The input of a module, if it was observed for quantization."""
    return next(
        (scaled.inputs.get(first) for first, modules in scaled.sites.items() if module in modules),
        None,
    )


def _gain_before(scaled: SublayerScales, folded: FoldedTensors, row: Parameter) -> Tensor:
    """Gain of the norm whose output a linear reads, [K]; ones if the table has none."""
    sublayer = scaled.sublayer
    norm = next(
        (
            group.producer
            for group in sublayer.groups
            if group.producer_is_norm and row.module in group.consumers
        ),
        None,
    )
    gain = next((own for own in sublayer.needed if own.module == norm and own.role == "norm"), None)
    return (
        torch.ones(row.shape[1], device=folded.source.device)
        if gain is None
        else folded[gain.name] + gain.gain_offset
    )


@dataclass(frozen=True)
class SublayerSolution:
    """linears: quantized, by module. unquantized: unquantized tensors that folding changed, in their
    stored dtype. advanced: whether tokens on the original path are after the sublayer now."""

    linears: dict[str, LinearResult]
    unquantized: dict[str, Tensor]
    advanced: bool

    @property
    def weights(self) -> dict[str, Weight]:
        return {module: one.weight for module, one in self.linears.items()}


def solve_sublayer(
    scaled: SublayerScales,
    source: ParameterReader,
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates | None = None,
) -> SublayerSolution:
    """Quantize every linear of the sublayer. The linears of one input at a time are held in
    float32, the widest input's first.

    scaled: its inputs are released as they are used, but for the experts'. states, original: before
    this sublayer; if `original` has the calibration tokens on the original path, linears that write
    to the residual stream come last, and compensate for the quantization before them.
    """
    sublayer, folded = scaled.sublayer, FoldedTensors(scaled.sublayer, source, scaled.folding)
    rows = {row.module: row for row in sublayer.rows}
    linears: dict[str, LinearResult] = {}
    sites = sorted(scaled.sites.items(), key=lambda site: -rows[site[0]].shape[1])
    if original is not None:
        sites.sort(key=lambda site: sublayer.output_linears.issuperset(site[1]))
    costs = attention_costs(scaled, folded) | (
        {} if sublayer.outputs is None else dict.fromkeys(sublayer.output_linears, sublayer.outputs)
    )
    observed = original is None
    for first, modules in sites:
        if not observed and sublayer.output_linears.issuperset(modules):
            assert original is not None
            for site in sublayer.output_sites(scaled.sites):
                scaled.inputs.pop(site, None)  # of which a scale was found
            weights = {module: one.weight for module, one in linears.items()}
            inputs, drifts = observe_output_linears(
                scaled, source, weights, states, ranks, original
            )
            for site in [*inputs]:
                drift = drifts.pop(site)
                scaled.inputs[site] = linear_input(
                    inputs.pop(site), sublayer.solvers, None, drift=drift
                )
            observed = True
        own = [rows[module] for module in modules if module in sublayer.quantized]
        for solver, alike in sublayer.solvers.by_solver([row.module for row in own]).items():
            linears |= _solve_site(
                scaled, first, [rows[module] for module in alike], folded, solver, costs, ranks
            )
        if first != sublayer.experts_site:
            scaled.inputs.pop(first, None)
    changed = [
        row
        for row in sublayer.rows
        if row.module not in sublayer.quantized and scaled.folding.changes(row.name)
    ]
    return SublayerSolution(
        linears,
        {row.name: folded[row.name].to(sublayer.stored[row.name]) for row in changed},
        original is not None and observed and sublayer.experts is None,
    )


def _solve_site(
    scaled: SublayerScales,
    first: str,
    rows: list[Parameter],
    folded: FoldedTensors,
    solver: LinearSolver,
    costs: Mapping[str, Curvature],
    ranks: Ranks,
) -> dict[str, LinearResult]:
    """The linears of one input that are on one grid."""
    read = scaled.inputs[first]
    weights = {row.module: read.drift_corrected(folded[row.name]) for row in rows}
    fused = {row.module: row.fused for row in rows if row.fused}
    solved = solver.solve_stack(weights, fused, read.curvature, read.sample, costs, ranks)
    return {
        module: solver.with_input_divisor(one, read.largest).result
        for module, one in solved.items()
    }
