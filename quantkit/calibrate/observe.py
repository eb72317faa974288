"""A sublayer's first value: what its linears read on the calibration tokens, with its original weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStatePair
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.routing import Recorder, Routed
from quantkit.calibrate.statistics import InputStatistics, Observer
from quantkit.calibrate.sublayer import Sublayer

HELD_OUT_ROWS = 128
"""Held-out rows kept at each linear's input."""
PROBED_TOKENS = 64


@dataclass(frozen=True)
class Probe:
    """What a sublayer adds to the first tokens' hidden states, [t, H], and what it asks of the routed experts, if there are any."""

    output: Tensor
    routed: Routed | None


@dataclass(frozen=True)
class Observed:
    """A sublayer as it was before anything of it changed.

    sites: the linears that read one input, by the module it is observed under. inputs: the statistics of these inputs, and of the routed
    experts' input. routed: what the experts are asked, on both paths. probe: against which folding is checked.
    """

    sublayer: Sublayer
    sites: dict[str, tuple[str, ...]]
    inputs: dict[str, InputStatistics]
    routed: Routed | None
    probe: Probe


def observe(sublayer: Sublayer, tensors: Mapping[str, Tensor], states: HiddenStatePair) -> Observed:
    """Run the original weights `tensors` over `states`, which are left as they are."""
    observer, recorder = Observer(HELD_OUT_ROWS), Recorder(len(states.quantized.hidden) + len(states.original.hidden))
    weights = LayerWeights(tensors, recorder, observer, unread=sublayer.ends)
    block = sublayer.build(weights)
    for batch in states.quantized.batches():
        observer.held_out = batch.held_out
        sublayer.run(block, states.quantized.hidden[batch.part], batch.lengths)
    if recorder.asked:  # which experts the original path chooses
        block = sublayer.build(LayerWeights(tensors, recorder, unread=sublayer.ends))
        for batch in states.original.batches():
            sublayer.run(block, states.original.hidden[batch.part], batch.lengths)
    routed = recorder.routed(states.quantized.fitted, len(states.quantized.hidden))
    if routed is not None:
        _observe_experts_input(sublayer, routed, states, observer)
    own = {row.module for row in sublayer.rows}
    sites = {first: modules for first, modules in weights.sites.items() if first in own}
    return Observed(sublayer, sites, observer.means(), routed, probe(sublayer, tensors, states))


def _observe_experts_input(sublayer: Sublayer, routed: Routed, states: HiddenStatePair, observer: Observer) -> None:
    """Where no linear but a router reads the experts' input, it was not observed: a router is no linear."""
    site = sublayer.experts_site
    if site is None or site in observer:
        return
    for batch in states.quantized.batches():
        observer.held_out = batch.held_out
        observer(site, routed.x[batch.part])


def probe(sublayer: Sublayer, tensors: Mapping[str, Tensor], states: HiddenStatePair) -> Probe:
    """Run the first tokens of the quantized path."""
    count = min(PROBED_TOKENS, states.quantized.lengths[0])
    recorder = Recorder(count)
    hidden = states.quantized.hidden[:count]
    output = sublayer.run(sublayer.build(LayerWeights(tensors, recorder)), hidden, [count]) - hidden
    return Probe(output, recorder.routed(count, count))
