"""What an MTP layer reads: the hidden state of a token and the embedding of the next; a sequence's
last token has none."""

import torch
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.embed_and_head import TableEnds
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.routing import no_experts
from quantkit.calibrate.source_model import SourceModel
from quantkit.models.architecture import MtpModel
from quantkit.models.hyper_connections import repacked


def mtp_states(
    model: SourceModel, layer: int, states: HiddenStatePair, sequences: Sequences
) -> HiddenStatePair:
    """The inputs of MTP layer `layer` from the outputs of the last layer; of several streams
    `hyper.packed`, as those are."""
    weights, config, rows = model.weights, model.config, model.layer_rows(layer)
    ends = TableEnds(weights, model.rows, config)
    tensors = weights.dequantized_all(
        row
        for row in rows
        if row.expert is None and row.role not in ("embedding", "head", "linear")
    )
    table = next((row for row in rows if row.role == "embedding"), ends.embedding)
    following = [s[1:] for s in (*sequences.calibration, *sequences.held_out)]
    unique, compact = torch.cat(following).unique(return_inverse=True)
    tensors[table.name] = weights.checkpoint.read(table.name)[unique].float().to(weights.device)
    assert model.architecture.MtpLayer is not None, (
        "rows of an MTP layer, and nothing that computes one"
    )
    block = model.architecture.MtpLayer(
        config, LayerWeights(tensors, no_experts), layer - config.num_hidden_layers
    )
    block.embedding = tensors[table.name]

    def inputs(of: HiddenStates, compact: Tensor) -> HiddenStates:
        keep = torch.ones(len(of.hidden), dtype=torch.bool)
        keep[torch.tensor(of.lengths, dtype=torch.int64).cumsum(0) - 1] = False
        hidden = _read(block, ends, of.hidden[keep.to(of.hidden.device)])
        lengths = [length - 1 for length in of.lengths]
        fitted = sum(lengths[: len(sequences.calibration)]) if of.fitted else 0
        out = HiddenStates(hidden, fitted, lengths, of.batch_tokens)
        for batch in out.batches():
            hidden[batch.part] = _block_inputs(
                block, compact[batch.part].to(hidden.device), hidden[batch.part]
            )
        return out

    held_out = sum(len(s) - 1 for s in sequences.held_out)
    return HiddenStatePair(
        inputs(states.quantized, compact),
        inputs(states.original, compact[len(compact) - held_out :]),
    )


def _read(block: MtpModel, ends: TableEnds, hidden: Tensor) -> Tensor:
    """Of hidden states [T, W] behind the last layer."""
    if block.reads == "streams":
        return hidden
    return ends.merged(hidden) if block.reads == "merged" else ends.normed(hidden)


def _block_inputs(block: MtpModel, next_rows: Tensor, hidden: Tensor) -> Tensor:
    """next_rows int64 [T]: of the embedding that the layer has."""
    if block.reads != "streams":
        return block.inputs(next_rows, hidden)
    made = block.inputs(next_rows, hidden[:, :-1])
    return repacked(hidden, made[:, None])
