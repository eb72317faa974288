"""A norm behind the routed experts, as openPangu-Ultra-MoE has it: it reads what all experts of a layer make together.

Routed experts add their outputs one after the other. Where such a norm is, the hidden states meanwhile hold the residual stream and the
plain sum of these outputs; the norm is computed when all are there.
"""

from collections.abc import Iterable

from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.models.decoder import DecoderLayer
from quantkit.models.table import Parameter


def norm_behind(rows: Iterable[Parameter]) -> Parameter | None:
    """Of a layer's rows the norm behind its experts."""
    return next((row for row in rows if row.behind_experts), None)


def run_before_norm(block: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
    """The expert half without the norm behind its experts: hidden [T, H] -> [T, H]."""
    del lengths  # as in `feed_forward`, every token by itself
    return hidden + block.mlp_sum(rms_norm(hidden, block.mlp_norm, block.eps))


class StreamBefore:
    """The residual stream of some paths before an expert half, kept until all experts have added to them."""

    def __init__(self, paths: Iterable[HiddenStates]) -> None:
        self._kept = [(path, path.hidden.clone()) for path in paths]

    def join(self, gain: Tensor, eps: float) -> None:
        """The paths' hidden states become those after the half. gain [H]: of the norm behind the experts."""
        for path, stream in self._kept:
            for batch in path.batches():
                summed = path.hidden[batch.part] - stream[batch.part]
                path.hidden[batch.part] = stream[batch.part] + rms_norm(summed, gain, eps)
