"""Statistics of every linear input of a sublayer over the calibration tokens: the sublayer is run
with observers on its inputs (input_sums.py), on the quantized and, for drift, on the original path.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.hidden_states import (
    HiddenStatePair,
    HiddenStates,
    RoutedTokens,
    RoutingRecorder,
    TokenBatch,
    mean_row_distance,
    no_experts,
)
from quantkit.calibrate.hidden_states import Observer as InputHook
from quantkit.calibrate.input_sums import (
    Drift,
    DriftAccumulator,
    InputStatistics,
    Observer,
    row_weights,
)
from quantkit.calibrate.ranks import BatchParallel, Ranks
from quantkit.calibrate.sublayer import LayerWeights, Sublayer
from quantkit.models.decoder import DecoderLayer
from quantkit.models.weights import ExpertsOp
from quantkit.quant.tensor_cores import sample_linear

HELD_OUT_ROWS = 128
"""Held-out rows kept for each linear input."""
SCALE_ROWS = 4096
"""Approximate number of calibration rows kept for each linear input."""
SEARCH_TOKENS = 4096
"""Calibration tokens on which the scale of an input that is observed again later is searched."""
PROBED_TOKENS = 64
SKETCHED = 512
"""Directions of random signs by which the size of a row of the residual stream is estimated, to 3 %;
of streams of fewer than four times as many channels it is computed. On held-out tokens of SmolLM2's
first layers the loss is 1.0006 of that by exact sizes, 1.0016 with 256, 1.0058 with 64."""
SAME_OUTPUT = 1e-3
"""Mean squared distance, relative, up to which a linear's outputs are what a sublayer adds."""


def adds_alone(module: str, tensors: Mapping[str, Tensor], x: Tensor, added: Tensor) -> bool:
    """Whether a linear's outputs of x [T, K] are all that a sublayer adds to the stream, [T, H]."""
    y, bias = sample_linear(x, tensors[f"{module}.weight"]), tensors.get(f"{module}.bias")
    y = y if bias is None else y + bias
    return y.shape == added.shape and mean_row_distance(y, added) < SAME_OUTPUT


@dataclass(frozen=True)
class SublayerProbe:
    """What a sublayer adds to the first tokens' hidden states, [t, H], and its expert routing, if
    it has experts."""

    output: Tensor
    routed: RoutedTokens | None


@dataclass(frozen=True)
class SublayerStatistics:
    """A sublayer before anything of it is changed.

    sites: linears that read one input, by the module under which it is observed. inputs: statistics
    of these inputs, and of the routed experts' input. routed: tokens routed to experts on both
    paths. probe: reference against which folding is verified. drifts: of the inputs, where
    calibration tokens also run through the original path.
    """

    sublayer: Sublayer
    sites: dict[str, tuple[str, ...]]
    inputs: dict[str, InputStatistics]
    routed: RoutedTokens | None
    probe: SublayerProbe
    drifts: dict[str, Drift]


class OutputInputs:
    """Inputs of linears that write to the residual stream, held until the stream after the sublayer
    is known, which gives their rows' weights. total: also of their drift."""

    def __init__(self, observer: Observer, total: DriftAccumulator | None = None) -> None:
        self._observer, self._total = observer, total
        self._seen, self._original = dict[str, list[Tensor]](), dict[str, list[Tensor]]()

    def add(self, module: str, x: Tensor) -> None:
        """x float32 [..., K]: input of `module` on the quantized path."""
        self._seen.setdefault(module, []).append(x.reshape(-1, x.shape[-1]))

    def add_original(self, module: str, o: Tensor) -> None:
        """o: its input for the same tokens on the original path."""
        self._original.setdefault(module, []).append(o.reshape(-1, o.shape[-1]))

    def seen(self, module: str) -> Tensor:
        """Its inputs on the quantized path in this batch, [T, K]."""
        return torch.cat(self._seen[module])

    def original(self, module: str) -> Tensor:
        """Its inputs on the original path in this batch, [T, K]."""
        return torch.cat(self._original[module])

    def finish_batch(self, after: Tensor, lost: Tensor | None = None) -> None:
        """after [T, H]: the residual stream after the sublayer at the tokens of these inputs, or a
        sketch of it. lost [T, H]: what it lacks before, if these linears' outputs are added to
        it."""
        for module, parts in self._seen.items():
            x = torch.cat(parts)
            w = row_weights(x, after)
            self._observer(module, x, w)
            if self._total is None:
                continue
            o = self.original(module) * w
            stream = None if lost is None else lost * w
            if self._observer.held_out:
                self._total.add_held_out(module, o, stream)
            else:
                self._total.add_quantized(module, x * w)
                self._total.add_original(module, o, stream)
        self._seen.clear()
        self._original.clear()


class InputsObserved(Exception):
    """Ends a run of a sublayer after the last input that it was to show."""


class PartialRun:
    """Runs of a sublayer that end once the inputs of some modules were observed for all tokens of a
    batch: most of the work comes after the first inputs."""

    def __init__(self) -> None:
        self._left = dict[str, int]()

    def hook(self, listen: InputHook) -> InputHook:
        """Calls `listen`, after which the run may end."""

        def see(module: str, x: Tensor) -> None:
            listen(module, x)
            if module in self._left:  # several times for a batch, if it runs sequence by sequence
                self._left[module] -= x.numel() // x.shape[-1]
                if all(left <= 0 for left in self._left.values()):
                    raise InputsObserved

        return see

    def __call__(self, run: Callable[[], object], wanted: Iterable[str], tokens: int) -> None:
        """A run of a batch of so many tokens until the inputs of `wanted` were observed; without
        modules: to the end."""
        self._left = dict.fromkeys(wanted, tokens)
        with suppress(InputsObserved):
            run()


@dataclass(frozen=True)
class StreamSketch:
    """The residual stream after a sublayer that adds x W^T + b to it, in SKETCHED directions of
    random signs: what its rows' sizes need, for a few per cent of the product with W.

    module: the linear. signs [S, H], through [S, K] = signs W, offset [S] = signs b.
    """

    module: str
    signs: Tensor
    through: Tensor
    offset: Tensor

    @classmethod
    def of(
        cls,
        sublayer: Sublayer,
        tensors: Mapping[str, Tensor],
        states: HiddenStates,
        modules: Sequence[str],
    ) -> "StreamSketch | None":
        """modules: those that write to the stream. None if they are not one large linear whose
        outputs are all that is added, as the first tokens show."""
        if len(modules) != 1 or len(tensors[f"{modules[0]}.weight"]) < 4 * SKETCHED:
            return None
        (module,), seen = modules, list[Tensor]()
        w, b = tensors[f"{module}.weight"], tensors.get(f"{module}.bias")

        def see(name: str, x: Tensor) -> None:
            if name == module:
                seen.append(x.reshape(-1, x.shape[-1]))

        count = min(PROBED_TOKENS, states.lengths[0])
        hidden, weights = states.hidden[:count], LayerWeights(tensors, no_experts, see)
        added = sublayer.run(sublayer.build(weights), hidden, [count]) - hidden
        if not seen or not adds_alone(module, tensors, torch.cat(seen), added):
            return None
        signs = torch.randint(0, 2, (SKETCHED, len(w)), generator=torch.Generator().manual_seed(0))
        scaled = (2.0 * signs - 1).to(w.device) / len(w) ** 0.5
        return cls(module, scaled, scaled @ w, scaled @ (w.new_zeros(len(w)) if b is None else b))

    def stream(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden [T, H]: before the sublayer; x [T, K]: input of the linear -> [T, S], whose rows
        have about the mean squares of the stream's."""
        return sample_linear(hidden, self.signs) + sample_linear(x, self.through) + self.offset


def enough(batches: Iterable[TokenBatch], tokens: int) -> Iterator[TokenBatch]:
    """The first of the batches that together have so many tokens."""
    for batch in batches:
        if tokens > 0:
            tokens -= batch.tokens
            yield batch


def collect_statistics(
    sublayer: Sublayer,
    tensors: Mapping[str, Tensor],
    states: HiddenStatePair,
    ranks: Ranks,
    original: HiddenStates | None = None,
) -> SublayerStatistics:
    """Run the original weights `tensors` over `states`, and over `original`, the calibration tokens
    on the original path, if given. The hidden states are not changed.

    With `original`, inputs of linears that write to the residual stream are observed again later
    (sublayer_solver.py): here on SEARCH_TOKENS if a scale depends on them. All tokens run through
    the whole sublayer if it has experts, as their routing is recorded.
    """
    calibration, held_out = states.quantized.parts()
    runs = BatchParallel(ranks, states.quantized.hidden.device)
    recorder = RoutingRecorder(len(states.quantized.hidden) + len(states.original.hidden))
    fitted_recorder = RoutingRecorder(states.quantized.fitted)
    total = DriftAccumulator(HELD_OUT_ROWS, ranks)
    whole, again = sublayer.experts is not None, original is not None
    searched = calibration
    if again and not whole:
        count = SEARCH_TOKENS if sublayer.searches_output_inputs else 0
        apart = max(1, states.quantized.fitted // max(count, 1))
        searched = list(enough(calibration[::apart], count))
    if not whole:
        held_out = list(enough(held_out, HELD_OUT_ROWS))
    every, every_last = (
        max(1, sum(batch.tokens for batch in some) // SCALE_ROWS)
        for some in (calibration, searched)
    )
    observer = Observer(HELD_OUT_ROWS, ranks, every)
    last = Observer(HELD_OUT_ROWS, ranks, every_last)
    outputs, partial = OutputInputs(last), PartialRun()

    def add(module: str, x: Tensor) -> None:
        if module in output_sites:
            outputs.add(module, x)
            return
        observer(module, x)
        if again and not observer.held_out:
            total.add_quantized(module, x)

    def add_original(module: str, o: Tensor) -> None:
        if module not in output_sites:
            (total.add_held_out if observer.held_out else total.add_original)(module, o)

    def build(experts: ExpertsOp, hook: InputHook) -> tuple[DecoderLayer, LayerWeights]:
        weights = LayerWeights(
            tensors,
            runs.shared_experts(experts),
            partial.hook(runs.shared_hook(hook)),
            product=sample_linear,
        )
        return sublayer.build(weights), weights

    finish = runs.shared_hook(lambda _, after: outputs.finish_batch(after))

    def finish_by_sketch(module: str, hidden: Tensor) -> None:
        assert sketch is not None, module
        outputs.finish_batch(sketch.stream(hidden, outputs.seen(module)))

    finish_sketched = runs.shared_hook(finish_by_sketch)
    block, weights = build(recorder, add)
    source, _ = build(fitted_recorder, add_original)
    held_out_source, _ = build(recorder, add_original)
    own = {row.module for row in sublayer.rows}
    sites = {first: modules for first, modules in weights.sites.items() if first in own}
    output_sites = sublayer.output_sites(sites)
    first_sites = sites.keys() - output_sites
    writers = [module for site in output_sites for module in sites[site]]
    sketch = None if whole else StreamSketch.of(sublayer, tensors, states.quantized, writers)

    def begin(batch: TokenBatch) -> None:
        observer.held_out = last.held_out = batch.held_out

    def run_both(batch: TokenBatch) -> None:
        hidden = states.quantized.hidden[batch.part]
        to_end = not first_sites or batch in searched or (bool(searched) and batch.held_out)

        def run() -> None:
            after = sublayer.run(block, hidden, batch.lengths)
            if sketch is None:
                finish("", after[:, : sublayer.width])

        if not to_end:
            partial(run, first_sites, batch.tokens)
        elif sketch is None:
            partial(run, (), 0)
        else:
            partial(run, sites, batch.tokens)
            finish_sketched(sketch.module, hidden)
        if original is not None and not batch.held_out:
            run_original(source, original.hidden, batch)

    def run_original(block: DecoderLayer, hidden: Tensor, batch: TokenBatch) -> None:
        partial(
            lambda: sublayer.run(block, hidden[batch.part], batch.lengths),
            () if whole else first_sites,
            batch.tokens,
        )

    runs.over([*calibration, *held_out], run_both, begin)
    if recorder.count or again:  # routing and linear inputs of the original path
        runs.over(
            enough(states.original.batches(), sum(batch.tokens for batch in held_out)),
            lambda batch: run_original(held_out_source, states.original.hidden, batch),
            begin,
        )
    routed = recorder.routed(states.quantized.fitted, len(states.quantized.hidden))
    if routed is not None:
        _observe_experts_input(
            sublayer, routed, states, observer, (total, fitted_recorder) if again else None
        )
    return SublayerStatistics(
        sublayer,
        sites,
        observer.finish() | last.finish(),
        routed,
        run_probe(sublayer, tensors, states),
        total.finish(),
    )


def _observe_experts_input(
    sublayer: Sublayer,
    routed: RoutedTokens,
    states: HiddenStatePair,
    observer: Observer,
    drift: tuple[DriftAccumulator, RoutingRecorder] | None,
) -> None:
    """Observe the experts' input where only a router reads it, which is not a linear. drift: the
    accumulator, and the routing of calibration tokens on the original path."""
    site = sublayer.experts_site
    if site is None or site in observer:
        return
    for batch in states.quantized.batches():
        observer.held_out = batch.held_out
        observer(site, routed.x[batch.part])
    if drift is None:
        return
    total, recorder = drift
    original = recorder.routed(routed.fitted, routed.fitted)
    assert original is not None, "experts on the original path"
    total.add_quantized(site, routed.x[: routed.fitted])
    total.add_original(site, original.x)
    for batch in states.original.batches():
        total.add_held_out(site, routed.x[routed.quantized :][batch.part])


def run_probe(
    sublayer: Sublayer, tensors: Mapping[str, Tensor], states: HiddenStatePair
) -> SublayerProbe:
    """Run the first tokens of the quantized path."""
    count = min(PROBED_TOKENS, states.quantized.lengths[0])
    recorder = RoutingRecorder(count)
    hidden = states.quantized.hidden[:count]
    output = sublayer.run(sublayer.build(LayerWeights(tensors, recorder)), hidden, [count]) - hidden
    return SublayerProbe(output, recorder.routed(count, count))
