"""The calibration tokens through the source's weights, beside the quantized path: what linears
should have read."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.layer_weights import NO_READINGS
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.routing import Recorder, Routed, no_experts
from quantkit.calibrate.sublayer import Sublayer, advance
from quantkit.quant.tensor_cores import tensor_core_products


@dataclass
class OriginalPath:
    """states: of the calibration tokens, at the input of the next sublayer, in the order of the
    quantized path's. routed: what the routed experts of the last sublayer are asked; None without
    experts."""

    states: HiddenStates
    routed: Routed | None = None

    def advance(self, sublayer: Sublayer, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Through this sublayer with the source's tensors. Routed experts add their outputs
        afterwards."""
        recorder = Recorder(len(self.states.hidden))
        advance(
            sublayer,
            tensors,
            self.states,
            NO_READINGS,
            ranks,
            no_experts if sublayer.experts is None else recorder,
        )
        self.routed = recorder.routed(len(self.states.hidden), len(self.states.hidden))

    def asked(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens [n] that choose an expert, and its weights [n]."""
        assert self.routed is not None, "a sublayer with routed experts"
        return self.routed.of(number)

    @tensor_core_products()
    def expert_outputs(self, number: int, original: ExpertWeights) -> Tensor:
        """One expert's outputs [n, H], unweighted, for the tokens that choose it."""
        assert self.routed is not None, "a sublayer with routed experts"
        return original(self.routed.x[self.routed.of(number)[0]])
