"""What is around the decoder layers: what the first one reads, and what the last one's output says
of the next token."""

from collections.abc import Sequence
from typing import Protocol

import torch
from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.common.errors import QuantkitError
from quantkit.models.architecture import ModelConfig
from quantkit.models.hyper_connections import StreamsEnd, begun, packed, unpacked
from quantkit.models.table import Parameter


class Ends(Protocol):
    """Of one model, on one device."""

    @property
    def centred(self) -> bool:
        """Whether the last norm takes the mean off, as LayerNorm does."""

    def embedded(self, sequences: Sequence[Tensor]) -> Tensor:
        """Token ids of sequences -> what the first layer reads, float32 [T, H], one sequence after
        the other; of several streams `hyper.packed`."""

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] after the last layer -> what the head multiplies, [T, H]."""

    def logits(self, products: Tensor, first: int) -> Tensor:
        """Products [T, R] with rows first .. first + R of the head -> the logits of these tokens,
        [T, R]."""


class TableEnds:
    """Of an architecture with a table: an embedding, an RMSNorm, a head, and what makes one stream
    of several."""

    centred = False

    def __init__(
        self, source: ParameterReader, rows: Sequence[Parameter], config: ModelConfig
    ) -> None:
        self.source, self.eps, self.streams = source, config.rms_norm_eps, config.streams
        self._end = [row for row in rows if row.role == "streams" and row.layer is None]
        self.embedding = next(row for row in rows if row.role == "embedding" and row.layer is None)
        self.norm = next(row for row in rows if row.layer is None and row.role == "norm")

    def embedded(self, sequences: Sequence[Tensor]) -> Tensor:
        table, ids = self.source.checkpoint.read(self.embedding.name), torch.cat([*sequences])
        check_vocabulary(ids, len(table))
        embedded = table[ids].float()
        return (
            embedded if self.streams is None else packed(begun(embedded, self.streams.count), ids)
        )

    def normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(self.merged(hidden), self.source.gain(self.norm), self.eps)

    def merged(self, hidden: Tensor) -> Tensor:
        """hidden behind the last layer as one stream, [T, H]."""
        if self.streams is None:
            return hidden
        end = StreamsEnd(self.streams, LayerWeights(self.source.dequantized_all(self._end)))
        return end(unpacked(hidden, self.streams.count)[0])

    def logits(self, products: Tensor, first: int) -> Tensor:
        return products


def check_vocabulary(ids: Tensor, rows: int) -> None:
    """Raise QuantkitError where a token has no row in the embedding."""
    if int(ids.max()) >= rows:
        raise QuantkitError(
            f"the tokenizer gives token {int(ids.max())}, the model has {rows}",
            "use the model's own tokenizer",
        )
