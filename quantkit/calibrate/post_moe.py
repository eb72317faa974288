"""What is behind the routed experts: openPangu-Ultra-MoE's norm, DeepSeek-V4's hyper-connection. It
reads what all experts of a layer make together.

Routed experts add their outputs one after the other, to the first channels of the hidden states.
Where something is behind them, the hidden states meanwhile hold what they held before and the plain
sum of these outputs, and in further channels what linears beside the experts made that is read
there, too, as in Gemma 4; the rest of the layer is computed when all are there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import functional as F

from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.routing import no_experts
from quantkit.calibrate.source_model import SourceModel
from quantkit.calibrate.sublayer import Run, run_feed_forward
from quantkit.models.context import CausalContext
from quantkit.models.decoder import DecoderLayer


def run_to_sum(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The expert half without what is behind its experts: hidden [T, W] -> [T, W]."""
    after, summed = hidden.clone(), block.summed(hidden, CausalContext(lengths, hidden.device))
    after[:, : summed.shape[1]] += summed
    return after


@contextmanager
def feed_forward(model: SourceModel, layer: int, paths: Iterable[HiddenStates]) -> Iterator[Run]:
    """How the layer's MLP or expert half is run.

    All experts have added to the paths' hidden states when this ends; what is behind them is
    computed then.
    """
    if not any(row.behind_experts for row in model.layer_rows(layer)):
        yield run_feed_forward
        return
    width, beside = (
        model.config.hidden_size,
        sum(row.shape[0] for row in model.layer_rows(layer) if row.beside_experts),
    )
    kept = [
        (path, path.hidden[:, :width].clone()) for path in paths
    ]  # experts add to no other channels
    for path, _ in kept:
        path.hidden = F.pad(path.hidden, (0, beside)) if beside else path.hidden
    yield run_to_sum
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
            after = block.with_sum(states, summed, CausalContext(batch.lengths, states.device))
            states[:, : after.shape[1]] = after
        path.hidden = path.hidden[:, : path.hidden.shape[1] - beside].contiguous()
