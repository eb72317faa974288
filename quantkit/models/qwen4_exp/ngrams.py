"""Qwen3.8-Flash-Next's n-gram embeddings: before a layer, each residual stream gets a gated value of
the n-grams that end at a token, and a short convolution over these values.

An n-gram of 2 to `size` tokens has `heads` rows of a table, which a hash of its tokens names: the
exclusive or of products of token ids with odd multipliers, modulo a prime per head. Tokens before
the end of a text (eos) do not count: they are taken for eos. The table stays where it is stored.
Symbols: T tokens, H hidden_size, n streams, E width of all rows of a token, K width of the
convolution, whose taps lie `size` tokens apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from quantkit_kernels.gating import sigmoid
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.models.config import check_count, refusal
from quantkit.models.context import Context
from quantkit.models.decoder import gain_of
from quantkit.models.ngram_table import NgramRows
from quantkit.models.qwen4_exp.gated_streams import norm_streams
from quantkit.models.table import Parameter, Role
from quantkit.models.weights import Weights

_COUNTS = {
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
    "ple_conv_kernel_size": 4,
}
_SEED = 1234
"""transformers' defaults."""
_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele et al. 2014)."""
_APART = 10007
"""Between the seeds of two tables."""
_LEAST_GATE = 1e-6
TABLE = "ple_embedding.ngram_embedding"


@dataclass(frozen=True)
class NGramSizes:
    """Of one table. size: most tokens of an n-gram; heads: rows for each length; width: E. rows: of
    the table, of which `parts` tensors hold as many each; primes: of each head. eos: id of the
    token at which texts end."""

    size: int
    heads: int
    width: int
    kernel: int
    parts: int
    rows: int
    primes: tuple[int, ...]
    multipliers: tuple[int, ...]
    eos: int

    @classmethod
    def from_dict(cls, text: dict[str, Any], hidden: int, place: int) -> "NGramSizes":
        """place: of the table among the model's."""
        size, heads, base, divisor, parts, kernel = (
            check_count(name, text.get(name, default)) for name, default in _COUNTS.items()
        )
        if size < 2:
            raise refusal("ngram_size", size, "at least 2")
        width, count = check_count("ple_embed_dim", text.get("ple_embed_dim", hidden)), 0
        count = (size - 1) * heads
        if width % count:
            raise refusal("ple_embed_dim", width, f"a multiple of the {count} heads of n-grams")
        eos = text.get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        eos = check_count("eos_token_id", eos, least=0, most=text["vocab_size"] - 1)
        seed = check_count("seed", text.get("seed", _SEED), least=0)
        primes = _primes_from(base, place * count, count)
        rows = -(-sum(primes) // divisor) * divisor
        multipliers = _multipliers(text["vocab_size"], size, seed + _APART * place)
        return cls(size, heads, width, kernel, parts, rows, primes, multipliers, eos)

    @property
    def reach(self) -> int:
        """Tokens that the convolution reads, itself included."""
        return (self.kernel - 1) * self.size + 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each head."""
        return tuple(sum(self.primes[:head]) for head in range(len(self.primes)))

    @property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Of the hash, as they are stored too, by name."""
        return {
            "layer_multipliers": self.multipliers,
            "ngram_heads_vocab_sizes": self.primes,
            "ngram_heads_offsets": self.offsets,
        }

    @property
    def part_rows(self) -> list[int]:
        """Rows of each tensor of the table."""
        each = -(-self.rows // self.parts)
        return [min(each, self.rows - first) for first in range(0, self.rows, each)]

    def row_numbers(self, recent: Tensor) -> Tensor:
        """recent: ids int64 [T, size] as of `ngram_table.recent_ids` -> rows of the table, int64
        [T, heads of all lengths]."""
        seen = recent[:, 0]
        mixed, found = seen * self.multipliers[0], list[Tensor]()
        primes, offsets = (
            torch.tensor(one).view(self.size - 1, self.heads) for one in (self.primes, self.offsets)
        )
        for length in range(2, self.size + 1):
            token = recent[:, length - 1]
            ended = (token < 0) if length == 2 else (token < 0) | (seen == self.eos)
            seen = torch.where(ended, self.eos, token)
            mixed = mixed ^ (seen * self.multipliers[length - 1])
            found.append(mixed[:, None] % primes[length - 2] + offsets[length - 2])
        return torch.cat(found, dim=1)


def ngram_parameters(
    sizes: NGramSizes, prefix: str, count: int, hidden: int, layer: int
) -> list[Parameter]:
    """Every tensor of the n-gram embedding before one layer. count: residual streams. The hash's
    numbers are stored, too, and follow from config.json."""
    wide, heads = count * hidden, len(sizes.primes)

    def row(name: str, shape: tuple[int, ...], role: Role, **more: Any) -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, role, layer=layer, block="attention", **more)

    own = sizes.width // heads
    return [
        *(
            row(f"ple_embedding.{name}", (len(one),), "state")
            for name, one in sizes.numbers.items()
        ),
        *(
            Parameter(f"{prefix}.{TABLE}.shard_{part}.weight", (rows, own), "ngram_table")
            for part, rows in enumerate(sizes.part_rows)
        ),
        Parameter(f"{prefix}.{TABLE}.weight_scale", (1,), "ngram_table", optional=True),
        row("key_proj.weight", (wide, sizes.width), "streams"),
        row("value_proj.weight", (hidden, sizes.width), "streams"),
        *(
            row(f"norm_{name}.weight", (wide,), "norm", gain_offset=1.0)
            for name in ("key", "query", "conv")
        ),
        row("conv1d.weight", (wide, 1, sizes.kernel), "streams"),
    ]


class NGramEmbedding:
    def __init__(
        self, sizes: NGramSizes, layer: int, prefix: str, eps: float, weights: Weights
    ) -> None:
        self.sizes, self.layer, self.eps = sizes, layer, eps
        _check_numbers(sizes, prefix, weights)
        self.key, self.value = (
            weights.dequantized(f"{prefix}.{name}_proj") for name in ("key", "value")
        )
        table = weights.ngram_table(f"{prefix}.{TABLE}")
        of_each = (sizes.size, sizes.width, self.key.dtype)
        self.rows = NgramRows(table, *of_each, sizes.row_numbers)
        self.of_key, self.of_query, self.of_conv = (
            gain_of(weights, f"{prefix}.norm_{name}.weight", 1.0)
            for name in ("key", "query", "conv")
        )
        self.kernel = weights.tensor(f"{prefix}.conv1d.weight").float()[:, 0]

    def __call__(self, streams: Tensor, token_ids: Tensor, context: Context) -> Tensor:
        """streams [T, n, H], token_ids int64 [T] -> the streams with what the n-grams add."""
        found = context.ngrams(token_ids, self.rows).to(streams.dtype)
        keys = norm_streams(F.linear(found, self.key).view_as(streams), self.of_key, self.eps)
        queries = norm_streams(streams, self.of_query, self.eps)
        score = (keys.float() * queries.float()).sum(-1, keepdim=True) / math.sqrt(keys.shape[2])
        score = score.abs().clamp_min(_LEAST_GATE).sqrt() * score.sign()
        gated = (sigmoid(score) * F.linear(found, self.value).float()[:, None]).to(streams.dtype)
        mixed = norm_streams(gated, self.of_conv, self.eps).flatten(1)
        added = gated.float().flatten(1) + F.silu(self._convolve(mixed, context))
        return (streams.float() + added.view_as(streams)).to(streams.dtype)

    def _convolve(self, x: Tensor, context: Context) -> Tensor:
        """x [T, C] -> float32 [T, C]."""
        before, sizes = context.shifted(self.layer, 0, x, self.sizes.reach), self.sizes
        total = torch.zeros(1, device=x.device)
        for tap in range(sizes.kernel):
            own = before((sizes.kernel - 1 - tap) * sizes.size).float()
            total = own * self.kernel[:, tap] + total
        return total


def _check_numbers(sizes: NGramSizes, prefix: str, weights: Weights) -> None:
    """Raise QuantkitError where stored numbers of the hash are not those of config.json."""
    for name, expected in sizes.numbers.items():
        stored = f"{prefix}.ple_embedding.{name}"
        found = weights.tensor(stored).float().cpu()
        if not torch.equal(found, torch.tensor(expected).float()):
            raise QuantkitError(
                f"{stored} is not what config.json makes it", "use the model's own config.json"
            )


def _primes_from(base: int, skipped: int, count: int) -> tuple[int, ...]:
    """`count` primes from `base` on, after the first `skipped` ones."""

    def primes() -> Iterator[int]:
        number = base
        while True:
            if number > 1 and all(number % one for one in range(2, math.isqrt(number) + 1)):
                yield number
            number += 1

    found = primes()
    for _ in range(skipped):
        next(found)
    return tuple(next(found) for _ in range(count))


def _multipliers(vocab: int, count: int, seed: int) -> tuple[int, ...]:
    """Odd numbers below 2^63 / vocab."""
    bound = max(1, (2**63 - 1) // max(vocab, 1) // 2)
    found = []
    for number in range(1, count + 1):
        value = (seed + _GOLDEN * (number + 1)) & _WORD
        value = ((value ^ value >> 30) * _FIRST) & _WORD
        value = ((value ^ value >> 27) * _SECOND) & _WORD
        found.append(2 * ((value ^ value >> 31) % bound) + 1)
    return tuple(found)
