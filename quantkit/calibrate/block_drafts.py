"""How many drafts in a row of a DSpark head (models/dspark.py) the model accepts on held-out text,
before and after it is quantized.

The head is copied, and reads what quantizing changes: the model's residual streams. Its linear over
them is summed while the layers pass, so that one vector of each held-out token is kept. Its stages
run after the last layer, one linear or expert at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from quantkit_kernels import SILU, Gating
from torch import Tensor

from quantkit.calibrate.embed_and_head import TableEmbedAndHead
from quantkit.calibrate.experts import ExpertWeights
from quantkit.calibrate.hidden_states import HiddenStatePair
from quantkit.calibrate.output_cost import BLOCK_ROWS, likeliest_tokens
from quantkit.calibrate.source_model import ParameterReader, SourceModel
from quantkit.calibrate.sublayer import LayerWeights, bare_layer
from quantkit.models import find_block_head
from quantkit.models.context import CausalContext
from quantkit.models.dspark import BlockHead, BlockHeadConfig, Window
from quantkit.models.mtp import DSPARK
from quantkit.models.stored_parameters import block_head_rows, is_stored
from quantkit.models.table import GatedMlp, Parameter
from quantkit.models.weights import ExpertsOp

BLOCKS = 512
"""Blocks drafted for each path, as far apart as the text allows."""
_PATHS = ("head_original", "head_quantized")
"""Names of `BlockDrafts.projected`, of states.original and states.quantized."""


class _Read(Mapping[str, Tensor]):
    """Tensors of the source in float32, each read when it is asked for."""

    def __init__(self, source: ParameterReader, rows: Sequence[Parameter]) -> None:
        self._source, self._rows = source, {row.name: row for row in rows}

    def __getitem__(self, name: str) -> Tensor:
        return self._source.dequantized(self._rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _HeadWeights(LayerWeights):
    def __init__(self, source: ParameterReader, rows: Sequence[Parameter]) -> None:
        super().__init__(_Read(source, rows))
        self._source, self._rows = source, rows

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        rows: dict[int, list[Parameter]] = {}
        for row in self._rows:
            if row.expert is not None and row.name.startswith(f"{prefix}."):
                rows.setdefault(row.expert, []).append(row)
        experts = {number: GatedMlp.of(own) for number, own in rows.items()}

        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for number, own in experts.items():
                tokens, slots = (topk_ids == number).nonzero(as_tuple=True)
                if len(tokens):
                    gate, up, down = (self._source.dequantized(row) for row in own.rows)
                    made = ExpertWeights(gate, up, down, gating)(x[tokens])
                    out.index_add_(0, tokens, made * topk_weights[tokens, slots, None])
            return out

        return run


class BlockDrafts:
    """projected: outputs of the head's linear over what it reads, so far, of the held-out tokens on
    both paths, float32 [T, H], under the names of a saved state."""

    def __init__(
        self, model: SourceModel, rows: list[Parameter], projected: dict[str, Tensor]
    ) -> None:
        self._model, self._rows, self.projected = model, rows, projected
        self._module = find_block_head(model.weights.checkpoint.config).HEAD
        self._config = cast(BlockHeadConfig, model.config)
        self._reads = self._module.reads(self._config.dspark)

    @classmethod
    def of(
        cls, model: SourceModel, states: HiddenStatePair, saved: Mapping[str, Tensor] | None
    ) -> "BlockDrafts | None":
        """None without a head that is stored whole. saved: tensors of a run that goes on."""
        checkpoint = model.weights.checkpoint
        rows = block_head_rows(checkpoint, model.config)
        if not rows or not all(is_stored(checkpoint, row) for row in rows):
            return None
        if saved is not None and not saved.keys() >= {*_PATHS}:
            return None
        held = states.original.hidden
        zeros = held.new_zeros(len(held), model.config.hidden_size)
        found = {
            path: zeros.clone() if saved is None else saved[path].to(held.device) for path in _PATHS
        }
        return cls(model, rows, found)

    def read(self, layer: int, states: HiddenStatePair) -> None:
        """Add what the head reads before a layer, or after the last one."""
        if layer not in self._reads:
            return
        model, config = self._model, self._config
        number, width = self._reads.index(layer), config.hidden_size
        (row,) = (one for one in self._rows if one.name == DSPARK)
        weight = model.weights.dequantized(row)[:, number * width : (number + 1) * width]
        block = bare_layer(model, layer) if layer in model.layers else None
        for path, of in zip(_PATHS, (states.original, states.quantized)):
            for batch in of.parts()[1]:
                part = slice(batch.part.start - of.fitted, batch.part.stop - of.fitted)
                context = CausalContext(batch.lengths, weight.device)
                read = self._module.read(config, block, of.hidden[batch.part], context)
                self.projected[path][part] += read @ weight.t()

    def accepted(self, states: HiddenStatePair, token_ids: Tensor) -> dict[str, float]:
        """Mean accepted length, 1 with no draft accepted, of the quantized model, with its 95 %
        interval, and of the source. token_ids int64 [T]: the held-out text. Each place of a block
        follows the text, and counts while the drafts before it are the model's own tokens."""
        weights, device = self._model.weights, self._model.weights.device
        rows, positions = _places(states.original.lengths, self._config.dspark.block)
        if not len(rows):
            return {}
        head: BlockHead = self._module(self._config, _HeadWeights(weights, self._rows))
        ids, (before, after) = token_ids[rows], head.pairs
        ends = TableEmbedAndHead(weights, self._model.rows, self._model.config)
        (of_model,) = (row for row in self._model.rows if row.role == "head")
        block_ids = head.block_ids(ids[:, 0])
        embedded = ends.source.checkpoint.read(ends.embedding.name)[block_ids].float()
        own, drafted = list[Tensor](), list[Tensor]()
        for path, of in zip(_PATHS, (states.original, states.quantized)):
            at = (rows + of.fitted).flatten().to(of.hidden.device)
            own.append(ends.final_norm(of.hidden[at]))
            window = self._window(head, self.projected[path], states.original.lengths, rows)
            made = head.block(
                block_ids.to(device), embedded.to(device), positions.to(device), window
            )
            drafted.append(
                torch.cat((made.flatten(0, 1), before[ids.flatten().to(device)]), dim=-1)
            )
        tokens = likeliest_tokens(torch.cat(own), weights.blocks(of_model, BLOCK_ROWS))
        heads = zip(weights.blocks(of_model, BLOCK_ROWS), after.split(BLOCK_ROWS))
        drafts = likeliest_tokens(torch.cat(drafted), (torch.cat(pair, dim=1) for pair in heads))
        same = (tokens == drafts).long().view(len(_PATHS), *rows.shape)
        source, length = 1 + same.cumprod(dim=2).sum(dim=2).double()
        half = 1.96 * float(length.std()) / math.sqrt(len(length)) if len(length) > 1 else 0.0
        mean = float(length.mean())
        return {
            "accepted_length": mean,
            "accepted_length_low": mean - half,
            "accepted_length_high": mean + half,
            "accepted_length_source": float(source.mean()),
        }

    def _window(
        self, head: BlockHead, projected: Tensor, lengths: Sequence[int], rows: Tensor
    ) -> Window:
        """Keys of the tokens before each block."""
        at = torch.cat([torch.arange(length) for length in lengths])
        keys = head.projected_keys(projected, at.to(projected.device))
        back = torch.arange(head.window, 0, -1)
        there = at[rows[:, :1]] >= back
        return Window(
            keys[(rows[:, :1] - back).clamp(min=0).to(keys.device)], there.to(keys.device)
        )


def _places(lengths: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """Where blocks are drafted: numbers of their tokens in the held-out text, int64 [B, block], and
    the position of the first in its sequence, int64 [B]. There is a token before each."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    every = [
        (start + at, at)
        for start, length in zip(starts, lengths)
        for at in range(1, length - block + 1)
    ]
    chosen = torch.tensor(every[:: math.ceil(len(every) / BLOCKS) or 1], dtype=torch.int64)
    first, positions = chosen.view(-1, 2).unbind(1)
    return first[:, None] + torch.arange(block), positions
