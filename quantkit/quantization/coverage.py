"""How much of a model a run quantizes, and what it leaves in 16 bits."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.models.table import Parameter

_NAMED = 6
"""Kinds of tensors that are listed."""


@dataclass(frozen=True)
class Coverage:
    """share: of the weights outside embeddings and heads, those that are quantized. left: how many
    weights stay as they are, by name with N for numbers, the most first."""

    share: float
    left: dict[str, int]

    def __str__(self) -> str:
        names = [
            f"{name} ({count / 1e6:.3g} M)" for name, count in list(self.left.items())[:_NAMED]
        ]
        more = f" and {len(self.left) - _NAMED} kinds more" if len(self.left) > _NAMED else ""
        return (
            f"{self.share:.1%} of the weights; left at 16 bits: {', '.join(names) or 'none'}{more}"
        )


def coverage(
    rows: Iterable[Parameter], quantized: Collection[str], config: dict[str, Any]
) -> Coverage:
    """quantized: modules that the output holds so. config: config.json, whose vocab_size tells
    embeddings and heads."""
    vocab = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    total, taken, left = 0, 0, Counter[str]()
    for row in rows:
        count = math.prod(row.shape)
        if len(row.shape) < 2:
            continue
        if row.module in quantized:
            taken += count
        else:
            left[re.sub(r"\.\d+(?=\.|$)", ".N", row.name)] += count
        total += count if row.shape[0] != vocab or row.module in quantized else 0
    return Coverage(taken / total if total else 0.0, dict(left.most_common()))
