"""Engram of DeepSeek-V4.1: rows of a table, found by hashes of a token and those before it, are
added to the residual streams under a gate.

Token ids are first mapped to classes of tokens with one normalized text (tokenizer/token_classes.py),
then each of the last n classes is multiplied by a number of the layer, and the products are joined
by XOR: after the second is the hash of the 2-gram, and so on. Every n and head has a range of rows,
as many as a prime that no other has, modulo which the hash is taken.

Symbols: T tokens, H hidden_size, n streams, N longest n-gram, h heads, C = (N - 1) h columns, D width
of a row.
"""

import functools
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.models.config import check_count, refusal
from quantkit.models.ngram_table import NgramRows
from quantkit.models.weights import Weights

_SEED = 10007
_LEAST_DOT = 1e-6
SCALE_GROUP = 32
"""Values of a row with one scale."""


@dataclass(frozen=True)
class EngramLayout:
    """Fields of config.json after engram_. rows: of the tables of `layers`."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @classmethod
    def from_dict(
        cls, text: dict[str, Any], num_layers: int, vocab_size: int
    ) -> "EngramLayout | None":
        """None without tables. Raises QuantkitError naming a field."""
        layers = text.get("engram_layer_ids") or []
        if not layers:
            return None
        known = isinstance(layers, list | tuple) and all(type(one) is int for one in layers)
        if not known or sorted({*layers} & {*range(num_layers)}) != [*layers]:
            raise refusal(
                "engram_layer_ids", layers, f"rising numbers of layers below {num_layers}"
            )

        def count(name: str, least: int = 1) -> int:
            return check_count(f"engram_{name}", text.get(f"engram_{name}"), least=least)

        rows = text.get("engram_num_embeddings")
        made = cls(
            tuple(layers),
            tuple(rows) if isinstance(rows, list | tuple) else (),
            count("max_ngram_size", 2),
            count("vocab_size", 2),
            count("n_heads"),
            count("head_dim"),
            count("pad_token_id", 0),
            count("compressed_vocab_size", 2),
        )
        if made.pad_token_id >= vocab_size:
            raise refusal("engram_pad_token_id", made.pad_token_id, f"a token below {vocab_size}")
        hashed = tuple(sum(made.primes(layer)) for layer in layers)
        if made.rows != hashed:
            raise refusal("engram_num_embeddings", rows, f"{[*hashed]}, as the other fields give")
        return made

    def check(self, classes: Tensor) -> None:
        """Raise QuantkitError where the classes are another tokenizer's: every hash would differ."""
        if (found := int(classes.max()) + 1) != self.compressed_vocab_size:
            raise QuantkitError(
                f"the tokenizer has {found} normalized texts, and config.json has "
                f"engram_compressed_vocab_size = {self.compressed_vocab_size}",
                "use the tokenizer that came with the model",
            )

    @property
    def columns(self) -> int:
        """Rows read for a token."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def width(self) -> int:
        """Values read for a token."""
        return self.columns * self.head_dim

    def primes(self, layer: int) -> tuple[int, ...]:
        """Rows of each column, by n and then by head."""
        at = self.layers.index(layer) * self.columns
        every = _primes(len(self.layers) * self.columns, self.n_heads, self.vocab_size)
        return every[at : at + self.columns]

    def multipliers(self, layer: int) -> Tensor:
        """Odd numbers int64 [N], by how far before the token a class is."""
        bound = max(1, np.iinfo(np.int64).max // self.compressed_vocab_size // 2)
        found = np.random.default_rng(_SEED * layer).integers(
            0, bound, size=self.max_ngram_size, dtype=np.int64
        )
        return torch.from_numpy(2 * found + 1)

    def row_numbers(self, layer: int, classes: Tensor, recent: Tensor) -> Tensor:
        """recent: ids int64 [T, N] as of `ngram_table.recent_ids`; before a text is the pad.
        classes int64 [tokens] -> int64 [T, C]."""
        pad = classes[self.pad_token_id]
        classes = classes[recent.clamp(min=0)].where(recent >= 0, pad)
        products, primes = classes * self.multipliers(layer), torch.tensor(self.primes(layer))
        hashes, joined = [], products[:, 0]
        for back in range(1, self.max_ngram_size):
            joined = joined ^ products[:, back]
            first = (back - 1) * self.n_heads
            hashes.append(joined[:, None] % primes[first : first + self.n_heads])
        return torch.cat(hashes, dim=1) + primes.cumsum(0) - primes


@functools.cache
def _primes(count: int, heads: int, start: int) -> tuple[int, ...]:
    """For each n of each table, `heads` primes from `start` on; none twice."""
    found, now = dict[int, None](), start
    for number in range(count):
        now = start if number % heads == 0 else now
        while now in found or not _is_prime(now):
            now += 1
        found[now] = None
    return tuple(found)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % one for one in range(2, isqrt(number) + 1))


class Engram:
    """Of one layer."""

    def __init__(
        self, layout: EngramLayout, prefix: str, layer: int, eps: float, weights: Weights
    ) -> None:
        self.eps, self.kv = eps, weights.dequantized(f"{prefix}.wkv")
        table = weights.ngram_table(f"{prefix}.embed")
        of_each = (layout.max_ngram_size, layout.width, self.kv.dtype)
        numbers = partial(layout.row_numbers, layer, table.classes())
        self.rows = NgramRows(table, *of_each, numbers)
        gains = (weights.tensor(f"{prefix}.{side}_weight").float() for side in ("q", "k"))
        query, key = gains
        self.gain = query * key

    def __call__(self, streams: Tensor, found: Tensor) -> Tensor:
        """streams [T, n, H] and what `rows` reads, [T, C D] -> streams."""
        n, hidden = self.gain.shape
        both = F.linear(found, self.kv)
        key, value = both.split([n * hidden, hidden], dim=-1)
        key, plain = key.float().unflatten(-1, (n, hidden)), streams.float()
        norms = torch.rsqrt(plain.square().mean(-1) + self.eps)
        norms = norms * torch.rsqrt(key.square().mean(-1) + self.eps)
        dot = (plain * self.gain * key).sum(-1) * norms * hidden**-0.5
        gate = torch.copysign(dot.abs().clamp_min(_LEAST_DOT).sqrt(), dot).sigmoid()
        return (plain + gate[..., None] * value.float()[:, None]).to(streams.dtype)
