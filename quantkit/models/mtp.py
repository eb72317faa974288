"""The multi-token prediction layer of DeepSeek-V3 (arXiv 2412.19437, section 2.2) and its
successors.

Symbols: T tokens, H hidden_size.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Protocol

import torch
from quantkit_kernels import by_own_backend, rms_norm
from torch import Tensor

from quantkit.models import decoder
from quantkit.models.context import Context
from quantkit.models.table import Parameter
from quantkit.models.weights import LinearOp, Weights

MtpReads = Literal["normed", "merged", "streams"]
"""What an MTP layer reads of the main model: hidden states after the final norm or before it, or
the residual streams."""


DSPARK = "mtp.0.main_proj.weight"
"""A tensor of DeepSeek's DSpark heads alone: it projects hidden states of several layers. As an MTP
layer such a head would guess nothing right."""
FINAL_NORM = "shared_head.norm"
"""Name, within the layer, of the norm after an MTP layer's block."""


def has_block_head(rows: Iterable[Parameter]) -> bool:
    """Whether the MTP layers of a table are stages of a head that drafts blocks (dspark.py)."""
    return any(row.name == DSPARK for row in rows)


class MtpStackConfig(decoder.StackConfig, Protocol):
    @property
    def num_nextn_predict_layers(self) -> int: ...


def mtp_layers(config: MtpStackConfig) -> range:
    """Numbers of the MTP layers, which follow the others."""
    return range(
        config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers
    )


def mtp_parameters(
    hidden: int, vocab: int, layer: int, block: Iterable[Parameter]
) -> list[Parameter]:
    """Every tensor of one MTP layer with its own embedding and head. block: those of its decoder
    layer."""
    p = f"model.layers.{layer}"
    return [
        Parameter(f"{p}.embed_tokens.weight", (vocab, hidden), "embedding", layer=layer, mtp=True),
        *sharing_mtp_parameters(hidden, layer, block, FINAL_NORM),
        Parameter(
            f"{p}.shared_head.head.weight",
            (vocab, hidden),
            "head",
            "gathered",
            layer=layer,
            mtp=True,
        ),
    ]


def sharing_mtp_parameters(
    hidden: int, layer: int, block: Iterable[Parameter], final_norm: str
) -> list[Parameter]:
    """Every tensor of one MTP layer that shares the main model's embedding and head."""
    p = f"model.layers.{layer}"
    return [
        Parameter(f"{p}.enorm.weight", (hidden,), "norm", layer=layer, mtp=True),
        Parameter(f"{p}.hnorm.weight", (hidden,), "norm", layer=layer, mtp=True),
        Parameter(
            f"{p}.eh_proj.weight",
            (hidden, 2 * hidden),
            "mtp_proj",
            "gathered",
            layer=layer,
            mtp=True,
        ),
        *block,
        Parameter(f"{p}.{final_norm}.weight", (hidden,), "norm", layer=layer, mtp=True),
    ]


def without_own_ends(rows: Iterable[Parameter]) -> list[Parameter]:
    """A table whose MTP layers share the main model's embedding and head, of one where each has its
    own."""
    return [row for row in rows if not (row.mtp and row.role in ("embedding", "head"))]


class MtpLayer:
    """Predicts token i + 2 from the hidden state of token i and the embedding of token i + 1."""

    layer_class: ClassVar[type[Any]]
    final_norm: ClassVar[str] = FINAL_NORM
    shares_embedding: ClassVar[bool] = False
    """Whether embedding and head are the main model's."""
    reads: MtpReads = "normed"
    backend: str = "auto"
    """As in `decoder.Model`."""

    def __init__(self, config: MtpStackConfig, weights: Weights, index: int = 0) -> None:
        layer = config.num_hidden_layers + index
        p = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.embedding: Tensor
        self.head: LinearOp
        self.enorm = weights.tensor(f"{p}.enorm.weight")
        self.hnorm = weights.tensor(f"{p}.hnorm.weight")
        self.eh_proj = weights.linear(f"{p}.eh_proj")
        self.block: decoder.DecoderLayer = self.layer_class(config, layer, weights)
        self.norm = weights.tensor(f"{p}.{self.final_norm}.weight")
        if not self.shares_embedding:
            self.embedding = weights.tensor(f"{p}.embed_tokens.weight")
            self.head = weights.linear(f"{p}.shared_head.head")

    def follow(self, model: decoder.Model) -> None:
        """Share the main model's embedding and head if they are shared. It reads hidden states that
        every model outputs."""
        if self.shares_embedding:
            self.embedding, self.head = model.embedding, model.head

    def inputs(self, next_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_token_ids [T], hidden [T, H] after the main model's final norm -> the block's input
        [T, H]."""
        embedded = rms_norm(decoder.embed(next_token_ids, self.embedding), self.enorm, self.eps)
        return self.eh_proj(torch.cat((embedded, rms_norm(hidden, self.hnorm, self.eps)), dim=-1))

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] after the block -> input of the head, [T, H]."""
        return rms_norm(hidden, self.norm, self.eps)

    @by_own_backend
    def __call__(
        self, next_token_ids: Tensor, hidden: Tensor, context: Context, rows: Tensor | None = None
    ) -> Tensor:
        """-> hidden [T, H] after the final norm, also the input of a further MTP step. rows int64
        [R]: of these tokens only."""
        inputs = self.inputs(next_token_ids, hidden)
        normed, _ = self.block(
            rms_norm(inputs, self.block.input_norm, self.eps), inputs, context, self.norm, rows
        )
        return normed

    @by_own_backend
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> float32 [T, vocab]."""
        return self.head(hidden).float()
