"""A table of n-gram embeddings that stays in its file: the host reads the rows that a pass needs,
before it where it is captured (DeepSeek-V4.1's are 98 GB each, Qwen3.8-Flash-Next's 102). The page
cache keeps what is read often."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor
from torch.nn import functional as F

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.weights import NgramTable
from quantkit.tokenizer.token_classes import token_classes


def recent_ids(known: Tensor, first: int, count: int) -> Tensor:
    """Of the tokens from `first` on of a text: ids of each and of the count - 1 before it, its own
    first, int64 [n - first, count]; -1 before the beginning. known: ids int64 [n]."""
    return F.pad(known, (count - 1, 0), value=-1).unfold(0, count, 1).flip(1)[first:]


@dataclass(frozen=True, eq=False)
class NgramRows:
    """What a layer reads of its table. size: tokens of the longest n-gram; width: values read for a
    token. numbers: ids int64 [T, size] as of `recent_ids` -> rows of each token, int64 [T, n]."""

    table: NgramTable
    size: int
    width: int
    dtype: torch.dtype
    numbers: Callable[[Tensor], Tensor]

    def __call__(self, recent: Tensor) -> Tensor:
        """recent as of `recent_ids` -> [T, width] of `dtype`, on the host."""
        found = self.table.rows(self.numbers(recent).flatten())
        return found.view(len(recent), self.width).to(self.dtype)


ReadNgrams = Callable[[NgramRows], Tensor]
"""What the tokens of a pass read, [T, width] on their device."""


def read_by_ids(recent: Callable[[int], Tensor], device: torch.device | str) -> ReadNgrams:
    """recent: the ids of the tokens of a pass, by `count` of `recent_ids`."""
    return lambda rows: rows(recent(rows.size)).to(device)


class StoredNgramTable:
    """The table `module` of a checkpoint: module.weight [R, D], or its rows in order as
    module.shard_N.weight. Of FP8 values module.scale [R, D / group], each a multiplier of as many,
    or module.weight_scale [1] of all."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self._checkpoint, self._module = checkpoint, module
        names = (f"{module}.shard_{part}.weight" for part in count())
        self._parts = [*takewhile(checkpoint.has, names)] or [f"{module}.weight"]
        rows = [checkpoint.tensors[name].shape[0] for name in self._parts]
        self._starts = torch.tensor([0, *rows]).cumsum(0)

    def classes(self) -> Tensor:
        """As `token_classes`."""
        return token_classes(self._checkpoint.path)

    def rows(self, numbers: Tensor) -> Tensor:
        """numbers int64 [n] -> float32 [n, D], on the host."""
        found, places = numbers.unique(return_inverse=True)
        values = self._values(found)
        name, whole = f"{self._module}.scale", f"{self._module}.weight_scale"
        if self._checkpoint.has(name):
            scales = self._checkpoint.read_rows(name, found).float()
            group = values.shape[1] // scales.shape[1]
            values *= scales.repeat_interleave(group, dim=1)
        elif self._checkpoint.has(whole):
            values *= self._checkpoint.read(whole).float()
        return values[places]

    def _values(self, numbers: Tensor) -> Tensor:
        """Rows by rising numbers int64 [n], float32 [n, D], without scales."""
        ends, read = torch.searchsorted(numbers, self._starts[1:]).tolist(), list[Tensor]()
        for name, start, first, end in zip(self._parts, self._starts, [0, *ends], ends):
            if first < end:
                read.append(self._checkpoint.read_rows(name, numbers[first:end] - start).float())
        return torch.cat(read)
