"""DSpark heads (models/dspark.py) in a calibrated run: what their stages read, and how many drafts
in a row the model accepts on held-out text, before and after both are quantized; and the same of
MTP layers' single drafts.

A head reads the model's residual streams at some layers. Its linear over them, which stays as it
is, is summed while the layers pass, so that one vector of each token is kept. After the last layer
blocks are laid over the text: the next token and noise, each reading the text before it. Their
hidden states pass the stages as those of text pass layers, and their linears are calibrated by
them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.embed_and_head import EmbedAndHead, TableEmbedAndHead, mtp_layer
from quantkit.calibrate.hidden_states import HiddenStatePair, HiddenStates, no_experts
from quantkit.calibrate.output_cost import BLOCK_ROWS, accepted_shares, likeliest_tokens
from quantkit.calibrate.source_model import SourceModel
from quantkit.calibrate.sublayer import LayerWeights, bare_layer
from quantkit.models import find_block_head
from quantkit.models.context import CausalContext, Context, Positions
from quantkit.models.decoder import DecoderLayer
from quantkit.models.dspark import BlockContext, BlockHead, BlockHeadConfig, Window
from quantkit.models.hyper_connections import packed_ids
from quantkit.models.mtp import DSPARK, has_block_head
from quantkit.models.table import Parameter

BLOCKS = 512
"""Blocks over held-out text, as far apart as it allows; over calibration text they are side by
side."""
_PATHS = ("head_quantized", "head_original")
"""Names of `BlockDrafts.projected`, of states.quantized and states.original."""


@dataclass(frozen=True)
class _Places:
    """Where blocks begin. rows int64 [B]: of the first token in all text; positions int64 [B]: in
    its sequence."""

    rows: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], block: int, most: int | None = None) -> "_Places":
        """Side by side; or `most` blocks, wherever they are. There is a token before each, and text
        under all of it."""
        step, start, every = block if most is None else 1, 0, list[tuple[int, int]]()
        for length in lengths:
            every += [(start + at, at) for at in range(1, length - block + 1, step)]
            start += length
        apart = 1 if most is None else math.ceil(len(every) / most) or 1
        rows, positions = torch.tensor(every[::apart], dtype=torch.int64).view(-1, 2).unbind(1)
        return cls(rows, positions)

    def then(self, other: "_Places", tokens: int) -> "_Places":
        """Both, the others in a text that follows `tokens` of this one."""
        rows, positions = (self.rows, other.rows + tokens), (self.positions, other.positions)
        return _Places(torch.cat(rows), torch.cat(positions))


class BlockDrafts:
    """projected: outputs of the head's linear over what it reads, so far, float32 [T, H], of the
    tokens of both paths, under the names of a saved state."""

    def __init__(self, model: SourceModel, projected: dict[str, Tensor]) -> None:
        self._model, self.projected = model, projected
        self._module = find_block_head(model.weights.checkpoint.config).HEAD
        self._config = cast(BlockHeadConfig, model.config)
        self._reads = self._module.reads(self._config.dspark)

    @classmethod
    def of(
        cls, model: SourceModel, states: HiddenStatePair, saved: Mapping[str, Tensor] | None
    ) -> "BlockDrafts | None":
        """None without a head. saved: tensors of a run that goes on."""
        if not has_block_head(model.rows):
            return None
        found, width = dict[str, Tensor](), model.config.hidden_size
        for path, of in zip(_PATHS, (states.quantized, states.original)):
            found[path] = (
                of.empty(len(of.hidden), width).zero_()
                if saved is None
                else saved[path].to(of.hidden.device)
            )
        return cls(model, found)

    def read(self, layer: int, states: HiddenStatePair) -> None:
        """Add what the head reads before a layer, or after the last one."""
        if layer not in self._reads:
            return
        model, config = self._model, self._config
        number, width = self._reads.index(layer), config.hidden_size
        weight = model.weights.dequantized(model.by_name[DSPARK])
        weight = weight[:, number * width : (number + 1) * width]
        block = bare_layer(model, layer) if layer in model.layers else None
        for path, of in zip(_PATHS, (states.quantized, states.original)):
            for batch in of.batches():
                context = CausalContext(batch.lengths, weight.device)
                read = self._module.read(config, block, of.hidden[batch.part], context)
                self.projected[path][batch.part] += read @ weight.t()

    def blocks(self, states: HiddenStatePair, sequences: Sequences) -> "Blocks":
        """The blocks before the first stage. states: after the last layer; blocks take their
        memory."""
        model, block = self._model, self._config.dspark.block
        lengths = [[len(one) for one in own] for own in (sequences.calibration, sequences.held_out)]
        calibration = _Places.of(lengths[0], block)
        held_out = _Places.of(lengths[1], block, BLOCKS)
        fitted = sum(lengths[0])
        places = calibration.then(held_out, fitted)
        rows = [
            row
            for row in model.rows
            if row.mtp and row.expert is None and row.role not in ("linear", "mtp_proj")
        ]
        bare = LayerWeights(model.weights.dequantized_all(rows), no_experts)
        head: BlockHead = self._module(self._config, bare)
        ends = TableEmbedAndHead(model.weights, model.rows, model.config)
        under = held_out.rows[:, None] + torch.arange(block)
        own = [
            ends.final_norm(of.hidden[(under + of.fitted).flatten().to(of.hidden.device)])
            for of in (states.original, states.quantized)
        ]
        for of in (states.original, states.quantized):
            of.hidden = of.hidden[:0].clone()
        token_ids = torch.cat([*sequences.calibration, *sequences.held_out])
        block_ids = head.block_ids(token_ids[places.rows])
        embedded = model.weights.checkpoint.read(ends.embedding.name)[block_ids].float()

        def packed(first: int, count: int, number: int) -> HiddenStates:
            """The blocks from `first` on, of which `count` are calibration's. In place of ids they
            have numbers, from `number` on, by which `Blocks.attend` finds their texts."""
            own = embedded[first * block :]
            numbers = torch.arange(number, number + len(own) // block).repeat_interleave(block)
            of, lengths = states.quantized, [block] * (len(own) // block)
            hidden = of.empty(len(own), head.streams.packed_width)
            made = HiddenStates(hidden, count * block, lengths, of.batch_tokens, of.scratch)
            for batch in made.batches():
                part = batch.part
                hidden[part] = head.streams.first(own[part], numbers[part]).to(hidden.device)
            return made

        count = len(calibration.rows)
        ends_at = torch.tensor(lengths[1], dtype=torch.int64).cumsum(0)
        sequence = torch.searchsorted(ends_at, held_out.rows.contiguous(), right=True)
        written = torch.tensor([one in sequences.written for one in sequence.tolist()]).bool()
        return Blocks(
            model,
            head,
            HiddenStatePair(packed(0, count, 0), packed(count, 0, len(places.rows))),
            torch.cat([head.window_input(self.projected[path]) for path in _PATHS]),
            places.then(held_out, len(token_ids)),
            token_ids[fitted + under],
            torch.cat(own),
            written,
        )


@dataclass(frozen=True)
class Blocks:
    """states: of the blocks, before a stage. texts float32 [T, H]: what stages make keys of, of the
    quantized path and then of the original one; places: where each block begins in them. ids int64
    [B, b]: the text under the blocks over held-out text; own [2 B b, H]: input of the model's head
    there, of the original path and then of the quantized one; written bool [B]: which of these
    texts the model wrote."""

    model: SourceModel
    head: BlockHead
    states: HiddenStatePair
    texts: Tensor
    places: _Places
    ids: Tensor
    own: Tensor
    written: Tensor

    def attend(self, stage: DecoderLayer, hidden: Tensor, lengths: list[int]) -> Tensor:
        """The attention half of a stage, as `run_attention`. Its linear of keys reads the texts
        before the blocks, too."""
        numbers = packed_ids(hidden)[:: self.head.block_size].cpu()
        rows, positions = self.places.rows[numbers], self.places.positions[numbers]
        back, device = torch.arange(self.head.window, 0, -1), hidden.device
        there = positions[:, None] >= back
        read, which = (rows[:, None] - back)[there].unique(return_inverse=True)
        at = torch.empty_like(read)
        at[which] = (positions[:, None] - back)[there]
        attention: Any = stage.attention
        made = attention.window_keys(self.texts[read.to(device)], Positions(at.to(device)))
        keys = made.new_zeros(*there.shape, 1, made.shape[1])
        keys[there.to(device), 0] = made[which.to(device)]
        tokens = positions[:, None] + torch.arange(len(hidden) // len(numbers))
        window = Window(keys, there.to(device))
        at = tokens.flatten().to(device)
        context = cast(Context, BlockContext(at, window, attention.layer))
        return stage.attend(hidden, context)

    def accepted(self) -> dict[str, float]:
        """Mean accepted length, 1 with no draft accepted, of the quantized model and head, with its
        95 % interval, and of the source, after the last stage; under names with _own over texts
        that the model wrote. Each place of a block follows the text, and counts while the drafts
        before it are the model's own tokens."""
        if not len(self.ids):
            return {}
        weights, (before, after) = self.model.weights, self.head.pairs
        (of_model,) = (row for row in self.model.rows if row.role == "head" and not row.mtp)
        quantized, original = self.states.quantized, self.states.original
        pairs = before[self.ids.flatten().to(before.device)]
        drafted = [
            torch.cat((self.head.head_input(hidden), pairs), dim=-1)
            for hidden in (original.hidden, quantized.hidden[quantized.fitted :])
        ]
        tokens = likeliest_tokens(self.own, weights.blocks(of_model, BLOCK_ROWS))
        heads = zip(weights.blocks(of_model, BLOCK_ROWS), after.split(BLOCK_ROWS))
        drafts = likeliest_tokens(torch.cat(drafted), (torch.cat(pair, dim=1) for pair in heads))
        same = (tokens == drafts).long().view(2, *self.ids.shape)
        lengths = (1 + same.cumprod(dim=2).sum(dim=2)).double().cpu()
        found = _mean_lengths("accepted_length", lengths)
        if bool(self.written.any()):
            found |= _mean_lengths("accepted_length_own", lengths[:, self.written])
            found["accepted_length_own_tokens"] = int(self.written.sum()) * self.ids.shape[1]
        return found


def _mean_lengths(name: str, lengths: Tensor) -> dict[str, float]:
    """lengths float64 [2, B]: of the source and of what was quantized."""
    source, own = lengths
    mean = float(own.mean())
    half = 1.96 * float(own.std()) / math.sqrt(len(own)) if len(own) > 1 else 0.0
    parts = {"": mean, "_low": mean - half, "_high": mean + half, "_source": float(source.mean())}
    return {f"{name}{part}": value for part, value in parts.items()}


def accepted_mtp_drafts(
    model: SourceModel,
    embed_and_head: EmbedAndHead,
    head: Parameter,
    layer: int,
    states: HiddenStatePair,
    drafts: HiddenStatePair,
    sequences: Sequences,
) -> dict[str, float]:
    """How often the first MTP layer's likeliest token is the model's own, of the source and of what
    was quantized, each with its own model, on held-out text; _own: on what it wrote. head: the
    model's; states, drafts: after the last layer, and after the MTP layer."""
    weights, rows = model.weights, model.layer_rows(layer)
    of_layer = next((row for row in rows if row.role == "head"), head)
    block = mtp_layer(model, layer, torch.zeros(1, model.config.hidden_size))
    # A draft of token i + 2 is made after token i, and checked after token i + 1.
    lengths = torch.tensor(states.original.lengths)
    checked = torch.ones(len(states.original.hidden), dtype=torch.bool)
    checked[lengths.cumsum(0) - lengths] = False

    def held_out(pair: HiddenStatePair) -> tuple[Tensor, Tensor]:
        return pair.original.hidden, pair.quantized.hidden[pair.quantized.fitted :]

    normed = [embed_and_head.final_norm(one[checked.to(one.device)]) for one in held_out(states)]
    made = map(block.head_input, held_out(drafts))
    token = likeliest_tokens(torch.cat(normed), weights.blocks(head, BLOCK_ROWS))
    draft = likeliest_tokens(torch.cat([*made]), weights.blocks(of_layer, BLOCK_ROWS))
    right = (token == draft).double().view(2, -1).cpu()
    found = accepted_shares("accepted_drafts", right)
    written = torch.tensor([one in sequences.written for one in range(len(lengths))])
    if bool(written.any()):
        own = written.repeat_interleave(lengths - 1)
        found |= accepted_shares("accepted_drafts_own", right[:, own])
        found["accepted_drafts_own_tokens"] = int(own.sum())
    return found
