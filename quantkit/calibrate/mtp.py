"""What an MTP layer reads: the final hidden state of a token and the embedding of the next; a sequence's last token has none."""

import torch
from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.routing import no_experts
from quantkit.calibrate.source_model import SourceModel
from quantkit.models.table import Parameter


def mtp_states(model: SourceModel, layer: int, norm: Parameter, states: HiddenStatePair, sequences: Sequences) -> HiddenStatePair:
    """The inputs of MTP layer `layer` from the outputs of the last layer; norm: the model's final one."""
    weights, config, rows = model.weights, model.config, model.layer_rows(layer)
    tensors = weights.dequantized_all(row for row in rows if row.expert is None and row.role not in ("embedding", "head", "linear"))
    gain = weights.dequantized(norm)
    table = next(row for row in rows if row.role == "embedding")
    following = [s[1:] for s in (*sequences.calibration, *sequences.held_out)]
    unique, compact = torch.cat(following).unique(return_inverse=True)
    tensors[table.name] = weights.checkpoint.read(table.name)[unique].float().to(weights.device)
    assert model.architecture.MtpLayer is not None, "rows of an MTP layer, and nothing that computes one"
    block = model.architecture.MtpLayer(config, LayerWeights(tensors, no_experts), layer - config.num_hidden_layers)

    def inputs(of: HiddenStates, compact: Tensor) -> HiddenStates:
        keep = torch.ones(len(of.hidden), dtype=torch.bool)
        keep[torch.tensor(of.lengths, dtype=torch.int64).cumsum(0) - 1] = False
        hidden = rms_norm(of.hidden[keep.to(of.hidden.device)], gain, config.rms_norm_eps)
        lengths = [length - 1 for length in of.lengths]
        fitted = sum(lengths[: len(sequences.calibration)]) if of.fitted else 0
        out = HiddenStates(hidden, fitted, lengths, of.batch_tokens)
        for batch in out.batches():
            hidden[batch.part] = block.inputs(compact[batch.part].to(hidden.device), hidden[batch.part])
        return out

    held_out = sum(len(s) - 1 for s in sequences.held_out)
    return HiddenStatePair(inputs(states.quantized, compact), inputs(states.original, compact[len(compact) - held_out :]))
