"""A norm behind the routed experts, as openPangu-Ultra-MoE has it: it reads what all experts of a layer make together.

Routed experts add their outputs one after the other. Where such a norm is, the hidden states meanwhile hold the residual stream and the
plain sum of these outputs; the norm is computed when all are there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.source_model import SourceModel
from quantkit.calibrate.sublayer import Run, run_feed_forward
from quantkit.models.decoder import DecoderLayer


def run_before_norm(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The expert half without the norm behind its experts: hidden [T, H] -> [T, H]."""
    del lengths  # as in `feed_forward`, every token by itself
    return hidden + block.mlp_sum(rms_norm(hidden, block.mlp_norm, block.eps))


@contextmanager
def feed_forward(model: SourceModel, layer: int, paths: Iterable[HiddenStates]) -> Iterator[Run]:
    """How the layer's MLP or expert half is run.

    All experts have added to the paths' hidden states when this ends; a norm behind them is computed then.
    """
    norm = next((row for row in model.layer_rows(layer) if row.behind_experts), None)
    if norm is None:
        yield run_feed_forward
        return
    kept = [(path, path.hidden.clone()) for path in paths]
    yield run_before_norm
    gain, eps = model.weights.dequantized(norm), model.config.rms_norm_eps
    for path, stream in kept:
        for batch in path.batches():
            summed = path.hidden[batch.part] - stream[batch.part]
            path.hidden[batch.part] = stream[batch.part] + rms_norm(summed, gain, eps)
