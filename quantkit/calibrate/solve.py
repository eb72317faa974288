"""A sublayer's third value: what the output holds of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.calibrate.attention_cost import attention_costs
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates
from quantkit.calibrate.linear_solver import Rounded, Solver
from quantkit.calibrate.observe_ends import observe_ends
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.scale import FoldedTensors, Scaled
from quantkit.grids.weights import Weight
from quantkit.models.table import Parameter
from quantkit.quant.gptq import Curvature


@dataclass(frozen=True)
class SolvedSublayer:
    """linears: rounded, by module. plain: unquantized tensors that folding changed, in their stored
    dtype."""

    linears: dict[str, Rounded]
    plain: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, Weight]:
        return {module: one.weight for module, one in self.linears.items()}


def solve_sublayer(
    scaled: Scaled,
    source: ParameterReader,
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates | None = None,
) -> SolvedSublayer:
    """Every linear that the output holds quantized. The linears of one input at a time are held in
    float32, the widest input's first.

    states, original: before this sublayer; where `original` has the calibration tokens on the
    original path, those who write to the residual stream come last, and make up for what was
    rounded before them.
    """
    sublayer, folded = scaled.sublayer, FoldedTensors(scaled.sublayer, source, scaled.folding)
    rows = {row.module: row for row in sublayer.rows}
    linears: dict[str, Rounded] = {}
    sites = sorted(scaled.sites.items(), key=lambda site: -rows[site[0]].shape[1])
    if original is not None:
        sites.sort(key=lambda site: sublayer.ends.issuperset(site[1]))
    costs = attention_costs(scaled, folded) | (
        {} if sublayer.outputs is None else dict.fromkeys(sublayer.ends, sublayer.outputs)
    )
    seen = original is None
    for first, modules in sites:
        if not seen and sublayer.ends.issuperset(modules):
            assert original is not None
            weights = {module: one.weight for module, one in linears.items()}
            scaled, seen = (
                replace(
                    scaled,
                    inputs=scaled.inputs
                    | observe_ends(scaled, folded, weights, states, ranks, original),
                ),
                True,
            )
        own = [rows[module] for module in modules if module in sublayer.quantized]
        for solver, alike in sublayer.solvers.alike([row.module for row in own]).items():
            linears |= _solve_site(
                scaled, first, [rows[module] for module in alike], folded, solver, costs, ranks
            )
    changed = [
        row
        for row in sublayer.rows
        if row.module not in sublayer.quantized and scaled.folding.changes(row.name)
    ]
    return SolvedSublayer(
        linears, {row.name: folded[row.name].to(sublayer.stored[row.name]) for row in changed}
    )


def _solve_site(
    scaled: Scaled,
    first: str,
    rows: list[Parameter],
    folded: FoldedTensors,
    solver: Solver,
    costs: Mapping[str, Curvature],
    ranks: Ranks,
) -> dict[str, Rounded]:
    """The linears of one input that are on one grid."""
    read = scaled.inputs[first]
    weights = {row.module: read.aimed(folded[row.name]) for row in rows}
    fused = {row.module: row.fused for row in rows if row.fused}
    solved = solver.solve_stack(weights, fused, read.curvature, read.sample, costs, ranks)
    return {
        module: solver.reading_under(one, read.largest).rounded for module, one in solved.items()
    }
