"""What surrounds the decoder layers: embedding, final norm, head, and the inputs of MTP layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.hidden_states import (
    HiddenStatePair,
    HiddenStates,
    copied_states,
    empty_states,
    no_experts,
)
from quantkit.calibrate.source_model import ParameterReader, SourceModel
from quantkit.calibrate.sublayer import LayerWeights
from quantkit.common.errors import QuantkitError
from quantkit.common.scratch import give_back
from quantkit.models.architecture import ModelConfig, MtpModel
from quantkit.models.hyper_connections import repack_streams
from quantkit.models.table import Parameter


class EmbedAndHead(Protocol):
    """Embedding, final norm and logits of one model on one device."""

    @property
    def centred(self) -> bool:
        """Whether the final norm subtracts the mean, as LayerNorm does."""

    def embed(self, sequences: Sequence[Tensor]) -> Tensor:
        """Token ids of sequences -> input of the first layer, float32 [T, H], the sequences
        concatenated; packed (`pack_streams`) with several residual streams."""

    def merged(self, hidden: Tensor) -> Tensor:
        """hidden after the last layer as one stream, before the final norm, [T, H]."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """hidden after the last layer -> input of the head, [T, H]."""

    def logits(self, products: Tensor, first: int) -> Tensor:
        """Products [T, R] with rows first .. first + R of the head -> the logits of these tokens,
        [T, R]."""


class TableEmbedAndHead:
    """Of an architecture with a table: an embedding, an RMSNorm, a head, and the merging of several
    residual streams."""

    centred = False

    def __init__(
        self, source: ParameterReader, rows: Sequence[Parameter], config: ModelConfig
    ) -> None:
        self.source, self.eps, self.streams = source, config.rms_norm_eps, config.streams
        self._end = [row for row in rows if row.role == "streams" and row.layer is None]
        self.embedding = next(row for row in rows if row.role == "embedding" and row.layer is None)
        self.norm = next(row for row in rows if row.layer is None and row.role == "norm")

    def embed(self, sequences: Sequence[Tensor]) -> Tensor:
        return self.embedded(torch.cat([*sequences]), self.table())

    def table(self) -> Tensor:
        return self.source.checkpoint.read(self.embedding.name)

    def embedded(self, ids: Tensor, table: Tensor) -> Tensor:
        """As `embed`, by this table."""
        check_vocabulary(ids, len(table))
        embed = table[ids].float()
        return embed if self.streams is None else self.streams.first(embed, ids)

    def final_norm(self, hidden: Tensor) -> Tensor:
        merged, gain = self.merged(hidden), self.source.gain(self.norm)
        # After streams that are normed one by one there is no norm.
        return rms_norm(merged, gain, self.eps) if len(gain) == merged.shape[1] else merged

    def merged(self, hidden: Tensor) -> Tensor:
        if self.streams is None:
            return hidden
        weights = LayerWeights(self.source.dequantized_all(self._end))
        return self.streams.merged(hidden, weights, self.source.gain(self.norm), self.eps)

    def logits(self, products: Tensor, first: int) -> Tensor:
        return products


def embedded_states(
    embed_and_head: EmbedAndHead,
    sequences: Sequence[Tensor],
    scratch: Path | None,
    table: Tensor | None = None,
) -> Tensor:
    """Input of the first layer, [T, W], on the CPU, as `empty_states`. table: in place of the
    source's."""
    if not isinstance(embed_and_head, TableEmbedAndHead):
        hidden = embed_and_head.embed(sequences)
        return hidden if scratch is None else copied_states(hidden, scratch)
    table = embed_and_head.table() if table is None else table
    lengths = [len(one) for one in sequences]
    width = embed_and_head.embedded(sequences[0][:1], table).shape[1]
    states = empty_states(sum(lengths), width, table.device, scratch)
    for to, ids in zip(states.split(lengths), sequences):
        to.copy_(embed_and_head.embedded(ids, table))
        give_back()
    return states


def check_vocabulary(ids: Tensor, rows: int) -> None:
    """Raise QuantkitError if a token has no row in the embedding."""
    if int(ids.max()) >= rows:
        raise QuantkitError(
            f"the tokenizer gives token {int(ids.max())}, the model has {rows}",
            "use the model's own tokenizer",
        )


def mtp_states(
    model: SourceModel, layer: int, states: HiddenStatePair, sequences: Sequences
) -> HiddenStatePair:
    """Inputs of MTP layer `layer` from the outputs of the last layer: a token's hidden state and
    the next token's embedding, packed with several streams. A sequence's last token has none."""
    weights, config = model.weights, model.config
    embed_and_head = TableEmbedAndHead(weights, model.rows, config)
    rows = model.layer_rows(layer)
    table = next((row for row in rows if row.role == "embedding"), embed_and_head.embedding)
    following = [s[1:] for s in (*sequences.calibration, *sequences.held_out)]
    unique, compact = torch.cat(following).unique(return_inverse=True)
    embedding = weights.checkpoint.read(table.name)[unique].float().to(weights.device)
    block = mtp_layer(model, layer, embedding)

    def inputs(of: HiddenStates, compact: Tensor) -> HiddenStates:
        keep = torch.ones(len(of.hidden), dtype=torch.bool)
        keep[torch.tensor(of.lengths, dtype=torch.int64).cumsum(0) - 1] = False
        rows = keep.nonzero()[:, 0].to(of.hidden.device)
        lengths = [length - 1 for length in of.lengths]
        fitted = sum(lengths[: len(sequences.calibration)]) if of.fitted else 0
        width = _read(block, embed_and_head, of.hidden[:0]).shape[1]
        hidden = of.empty(len(rows), width)
        out = HiddenStates(hidden, fitted, lengths, of.batch_tokens, of.scratch)
        for batch in out.batches():
            read = _read(block, embed_and_head, of.hidden[rows[batch.part]])
            hidden[batch.part] = _block_inputs(block, compact[batch.part].to(rows.device), read)
        return out

    held_out = sum(len(s) - 1 for s in sequences.held_out)
    return HiddenStatePair(
        inputs(states.quantized, compact),
        inputs(states.original, compact[len(compact) - held_out :]),
    )


def mtp_layer(model: SourceModel, layer: int, embedding: Tensor) -> MtpModel:
    """MTP layer `layer` without its linears, over these rows of its embedding [R, H]."""
    assert model.architecture.MtpLayer is not None, (
        "an MTP layer in the table, but no class that computes it"
    )
    rows = [row for row in model.layer_rows(layer) if row.expert is None]
    tensors = model.weights.dequantized_all(
        row for row in rows if row.role not in ("embedding", "head", "linear")
    )
    tensors |= {row.name: embedding for row in rows if row.role == "embedding"}
    weights = LayerWeights(tensors, no_experts)
    made = model.architecture.MtpLayer(model.config, weights, layer - len(model.layers))
    made.embedding = embedding
    return made


def _read(block: MtpModel, embed_and_head: TableEmbedAndHead, hidden: Tensor) -> Tensor:
    """The hidden states [T, W] after the last layer that this MTP block reads."""
    if block.reads == "streams":
        return hidden
    return (
        embed_and_head.merged(hidden)
        if block.reads == "merged"
        else embed_and_head.final_norm(hidden)
    )


def _block_inputs(block: MtpModel, next_rows: Tensor, hidden: Tensor) -> Tensor:
    """next_rows int64 [T]: rows of the layer's embedding."""
    if block.reads != "streams":
        return block.inputs(next_rows, hidden)
    made = block.inputs(next_rows, hidden[:, :-1])
    return repack_streams(hidden, made[:, None])
