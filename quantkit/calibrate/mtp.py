"""What an MTP layer reads: the final hidden state of a token and the embedding of the next; a sequence's last token has none."""

from typing import Any

import torch
from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.experts import Recorder
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.models.table import Parameter


def mtp_streams(
    source: ParameterReader,
    architecture: Any,
    config: Any,
    layer: int,
    rows: list[Parameter],
    norm: Parameter,
    streams: HiddenStatePair,
    sequences: Sequences,
) -> HiddenStatePair:
    """The inputs of MTP layer `layer`, whose parameters are `rows`, from the outputs of the last layer; norm: the model's final one."""
    tensors = source.dequantized_all(row for row in rows if row.expert is None and row.role not in ("embedding", "head", "linear"))
    gain = source.dequantized(norm)
    table = next(row for row in rows if row.role == "embedding")
    following = [s[1:] for s in (*sequences.calibration, *sequences.held_out)]
    unique, compact = torch.cat(following).unique(return_inverse=True)
    tensors[table.name] = source.checkpoint.read(table.name)[unique].float().to(source.device)
    block = architecture.MtpLayer(config, LayerWeights(tensors, Recorder(0)), layer - config.num_hidden_layers)

    def inputs(stream: HiddenStates, compact: Tensor) -> HiddenStates:
        keep = torch.ones(len(stream.hidden), dtype=torch.bool)
        keep[torch.tensor(stream.lengths).cumsum(0) - 1] = False
        hidden = rms_norm(stream.hidden[keep.to(stream.hidden.device)], gain, config.rms_norm_eps)
        lengths = [length - 1 for length in stream.lengths]
        fitted = sum(lengths[: len(sequences.calibration)]) if stream.fitted else 0
        out = HiddenStates(hidden, fitted, lengths, stream.batch_tokens)
        for one in out.batches():
            hidden[one.part] = block.inputs(compact[one.part].to(hidden.device), hidden[one.part])
        return out

    held_out = sum(len(s) - 1 for s in sequences.held_out)
    return HiddenStatePair(inputs(streams.quantized, compact), inputs(streams.original, compact[len(compact) - held_out :]))
