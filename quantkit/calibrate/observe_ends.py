"""What those who write to the residual stream read once the linears before them in the sublayer are
rounded.

While a sublayer is observed its weights are the original ones. Where a linear is to make up for
what was rounded before it, it has to be
seen after that: o_proj behind rounded q, k and v, down_proj behind rounded gate and up. Scales are
folded by now.
"""

from collections.abc import Mapping

from torch import Tensor

from quantkit.calibrate.data_parallel import SharedRuns
from quantkit.calibrate.drift import DriftSum
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates, TokenBatch
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.layer_weights import Observer as Listener
from quantkit.calibrate.observe import HELD_OUT_ROWS
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.routing import no_experts
from quantkit.calibrate.scale import Scaled, ScaledInput, scaled_input
from quantkit.calibrate.statistics import Observer
from quantkit.grids.weights import Weight, dequantize


def observe_ends(
    scaled: Scaled,
    folded: Mapping[str, Tensor],
    rounded: Mapping[str, Weight],
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates,
) -> dict[str, ScaledInput]:
    """By the module that each input is observed under. folded: the sublayer's tensors; rounded:
    those linears that are solved, by module;
    states, original: before this sublayer, the latter of the calibration tokens on the original
    path."""
    sublayer = scaled.sublayer
    sites = {first for first, modules in scaled.sites.items() if sublayer.ends.issuperset(modules)}
    observer, total = Observer(HELD_OUT_ROWS, ranks), DriftSum(HELD_OUT_ROWS, ranks)

    runs = SharedRuns(ranks, states.quantized.hidden.device)

    def hear(module: str, x: Tensor) -> None:
        observer(module, x)
        if not observer.held_out:
            total.hear(module, x)

    def compare(module: str, o: Tensor) -> None:
        (total.keep if observer.held_out else total.compare)(module, o)

    def at_ends(listen: Listener) -> Listener:
        """Nothing else is sent to other ranks."""
        see = runs.heard_by(listen)
        return lambda module, x: see(module, x) if module in sites else None

    tensors = {row.name: folded[row.name] for row in sublayer.needed}
    written = {f"{module}.weight": dequantize(weight) for module, weight in rounded.items()}
    readings = sublayer.solvers.readings(rounded, rounded)
    block = sublayer.build(
        LayerWeights(
            {**tensors, **written},
            no_experts,
            at_ends(hear),
            unread=sublayer.ends,
            readings=readings,
        )
    )
    source = sublayer.build(
        LayerWeights(tensors, no_experts, at_ends(compare), unread=sublayer.ends)
    )

    def begin(batch: TokenBatch) -> None:
        observer.held_out = batch.held_out

    def run(batch: TokenBatch) -> None:
        sublayer.run(block, states.quantized.hidden[batch.part], batch.lengths)
        if not batch.held_out:
            sublayer.run(source, original.hidden[batch.part], batch.lengths)

    runs.over(states.quantized.batches(), run, begin)
    observer.held_out = True
    runs.over(
        states.original.batches(),
        lambda batch: sublayer.run(source, states.original.hidden[batch.part], batch.lengths),
        begin,
    )
    drifts = total.means()
    return {
        site: scaled_input(own, sublayer.solvers, None, drift=drifts[site])
        for site, own in observer.means().items()
    }
