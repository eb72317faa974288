"""Two references on the same tokens as the quantized path: the source's weights, and
round-to-nearest.

The unquantized run of the calibration tokens gives the inputs that linears should have had. The
round-to-nearest (RTN) run of the held-out tokens shows what calibration gains: same grid and
layers, scales from each group's extremes, NVFP4 input divisors from the largest value, and int8
cache scales that clip nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.calibrate.cache_scales import QuantizedCache
from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.linear_solver import LinearSolver, SolverTable
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.routing import RoutedTokens, RoutingRecorder, no_experts
from quantkit.calibrate.source_model import ParameterReader
from quantkit.calibrate.sublayer import NO_ACTIVATION_QUANTS, LayerWeights, Sublayer, advance
from quantkit.models.table import GatedMlp, Parameter
from quantkit.quant.tensor_cores import sample_products


@dataclass
class ReferenceRun:
    """states: of the calibration tokens at the input of the next sublayer, in the quantized path's
    order. routed: routing in the last sublayer; None without experts."""

    states: HiddenStates
    routed: RoutedTokens | None = None

    def advance(self, sublayer: Sublayer, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Through this sublayer with the source's tensors. Routed experts add their outputs
        afterwards."""
        recorder = RoutingRecorder(len(self.states.hidden))
        advance(
            sublayer,
            tensors,
            self.states,
            NO_ACTIVATION_QUANTS,
            ranks,
            no_experts if sublayer.experts is None else recorder,
        )
        self.routed = recorder.routed(len(self.states.hidden), len(self.states.hidden))

    @sample_products()
    def expert_outputs(self, number: int, original: ExpertWeights) -> Tensor:
        """One expert's outputs [n, H], unweighted, for the tokens routed to it."""
        assert self.routed is not None, "a sublayer with routed experts"
        return original(self.routed.x[self.routed.of(number)[0]])


@dataclass
class RtnRun:
    """states: of the held-out tokens at the input of the next sublayer. solvers: only their grids
    are used. cache: of a scheme with an 8-bit cache. routed: routing in the last sublayer; None
    without experts."""

    states: HiddenStates
    source: ParameterReader
    solvers: SolverTable
    cache: QuantizedCache | None = None
    routed: RoutedTokens | None = None

    def advance(self, sublayer: Sublayer, ranks: Ranks) -> None:
        """Through this sublayer. Routed experts add their outputs afterwards."""
        recorder = RoutingRecorder(len(self.states.hidden))
        tensors = self._rounded(sublayer)
        activation_quants = self.solvers.activation_quants(
            [row.module for row in sublayer.rows if row.module in sublayer.quantized]
        )
        if self.cache is not None and self.cache.covers(sublayer):
            block = sublayer.build(
                LayerWeights(tensors, no_experts, activation_quants=activation_quants)
            )
            sublayer = replace(
                sublayer, run=self.cache.run_uncalibrated(sublayer, block, self.states)
            )
        advance(
            sublayer,
            tensors,
            self.states,
            activation_quants,
            ranks,
            no_experts if sublayer.experts is None else recorder,
        )
        self.routed = recorder.routed(0, 0)

    def expert_outputs(
        self, number: int, rows: GatedMlp, original: ExpertWeights, solver: LinearSolver | None
    ) -> Tensor:
        """One expert's outputs [n, H], unweighted, for the tokens routed to it. solver: on the
        experts' grid; None if they are not quantized."""
        assert self.routed is not None, "a sublayer with routed experts"
        rounded, (tokens, _) = original, self.routed.of(number)
        if solver is not None:
            weights = dict(zip(rows.modules, (original.gate, original.up, original.down)))
            nearest = _nearest(weights, rows.rows, solver)
            gate, up, down = (nearest[module] for module in rows.modules)
            rounded = replace(
                original, gate=gate, up=up, down=down, activation_quants=solver.activation_quants()
            )
        return rounded(self.routed.x[tokens])

    def _rounded(self, sublayer: Sublayer) -> dict[str, Tensor]:
        """The sublayer's tensors, read and rounded one at a time."""
        tensors = {}
        for row in sublayer.needed:
            tensor = self.source.dequantized(row)
            if row.module in sublayer.quantized:
                (tensor,) = _nearest(
                    {row.module: tensor}, (row,), self.solvers.of(row.module)
                ).values()
            tensors[row.name] = tensor
        return tensors


def _nearest(
    weights: dict[str, Tensor], rows: tuple[Parameter, ...], solver: LinearSolver
) -> dict[str, Tensor]:
    """Values of the rounded weights by module, in their order."""
    fused = {row.module: row.fused for row in rows if row.fused}
    return solver.rtn_values(weights, fused)
