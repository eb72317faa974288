"""A sublayer's first value: what its linears read on the calibration tokens, with its original
weights, and what they read on the original path."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.data_parallel import SharedRuns
from quantkit.calibrate.drift import Drift, DriftSum
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates, TokenBatch
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.routing import Recorder, Routed
from quantkit.calibrate.statistics import InputStatistics, Observer
from quantkit.calibrate.sublayer import Sublayer

HELD_OUT_ROWS = 128
"""Held-out rows kept at each linear's input."""
SCALE_ROWS = 4096
"""About so many calibration rows kept there."""
PROBED_TOKENS = 64


@dataclass(frozen=True)
class Probe:
    """What a sublayer adds to the first tokens' hidden states, [t, H], and what it asks of the
    routed experts, if there are any."""

    output: Tensor
    routed: Routed | None


@dataclass(frozen=True)
class Observed:
    """A sublayer as it was before anything of it changed.

    sites: the linears that read one input, by the module it is observed under. inputs: the
    statistics of these inputs, and of the routed experts' input. routed: what the experts are
    asked, on both paths. probe: against which folding is checked. drifts: of the inputs, where
    calibration tokens run through the original path too. stream: what the residual stream holds
    before the sublayer of the tokens whose rows are kept, [R, H].
    """

    sublayer: Sublayer
    sites: dict[str, tuple[str, ...]]
    inputs: dict[str, InputStatistics]
    routed: Routed | None
    probe: Probe
    drifts: dict[str, Drift]
    stream: Tensor


def observe(
    sublayer: Sublayer,
    tensors: Mapping[str, Tensor],
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates | None = None,
) -> Observed:
    """Run the original weights `tensors` over `states`, and over `original`, the calibration tokens
    on the original path, if given. All are left as they are."""
    every = max(1, states.quantized.fitted // SCALE_ROWS)
    observer = Observer(HELD_OUT_ROWS, ranks, every)
    recorder = Recorder(len(states.quantized.hidden) + len(states.original.hidden))
    asked, total = Recorder(states.quantized.fitted), DriftSum(HELD_OUT_ROWS, ranks)
    runs = SharedRuns(ranks, states.quantized.hidden.device)
    ask = runs.asked_of(recorder)

    def see(module: str, x: Tensor) -> None:
        observer(module, x)
        if original is not None and not observer.held_out:
            total.hear(module, x)

    weights = LayerWeights(tensors, ask, runs.heard_by(see), unread=sublayer.ends)
    block = sublayer.build(weights)
    beside = LayerWeights(
        tensors, runs.asked_of(asked), runs.heard_by(total.compare), unread=sublayer.ends
    )
    source = None if original is None else sublayer.build(beside)

    def begin(batch: TokenBatch) -> None:
        observer.held_out = batch.held_out

    def run(batch: TokenBatch) -> None:
        sublayer.run(block, states.quantized.hidden[batch.part], batch.lengths)
        if original is not None and source is not None and not batch.held_out:
            sublayer.run(source, original.hidden[batch.part], batch.lengths)

    runs.over(states.quantized.batches(), run, begin)
    if (
        recorder.asked or original is not None
    ):  # which experts the original path chooses, and what its linears read
        keep = None if original is None else runs.heard_by(total.keep)
        last = sublayer.build(LayerWeights(tensors, ask, keep, unread=sublayer.ends))
        runs.over(
            states.original.batches(),
            lambda batch: sublayer.run(last, states.original.hidden[batch.part], batch.lengths),
            begin,
        )
    routed = recorder.routed(states.quantized.fitted, len(states.quantized.hidden))
    if routed is not None:
        _observe_experts_input(
            sublayer, routed, states, observer, None if original is None else (total, asked)
        )
    own = {row.module for row in sublayer.rows}
    sites = {first: modules for first, modules in weights.sites.items() if first in own}
    fitted = (
        states.quantized.hidden[batch.part]
        for batch in states.quantized.batches()
        if not batch.held_out
    )
    stream = torch.cat([hidden[::every, : sublayer.width] for hidden in fitted])
    return Observed(
        sublayer,
        sites,
        observer.means(),
        routed,
        probe(sublayer, tensors, states),
        total.means(),
        stream,
    )


def _observe_experts_input(
    sublayer: Sublayer,
    routed: Routed,
    states: HiddenStatePair,
    observer: Observer,
    drift: tuple[DriftSum, Recorder] | None,
) -> None:
    """Where no linear but a router reads the experts' input, it was not observed: a router is no
    linear. drift: what is summed up, and what the experts are asked by calibration tokens on the
    original path."""
    site = sublayer.experts_site
    if site is None or site in observer:
        return
    for batch in states.quantized.batches():
        observer.held_out = batch.held_out
        observer(site, routed.x[batch.part])
    if drift is None:
        return
    total, asked = drift
    original = asked.routed(routed.fitted, routed.fitted)
    assert original is not None, "a path that asks the experts"
    total.hear(site, routed.x[: routed.fitted])
    total.compare(site, original.x)
    for batch in states.original.batches():
        total.keep(site, routed.x[routed.quantized :][batch.part])


def probe(sublayer: Sublayer, tensors: Mapping[str, Tensor], states: HiddenStatePair) -> Probe:
    """Run the first tokens of the quantized path."""
    count = min(PROBED_TOKENS, states.quantized.lengths[0])
    recorder = Recorder(count)
    hidden = states.quantized.hidden[:count]
    output = sublayer.run(sublayer.build(LayerWeights(tensors, recorder)), hidden, [count]) - hidden
    return Probe(output, recorder.routed(count, count))
