"""A table of n-gram embeddings that stays in its file: a pass reads the rows that its tokens need
(DeepSeek-V4.1's are 98 GB each, Qwen3.8-Flash-Next's 102). The page cache keeps what is read
often."""

from itertools import count, takewhile

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.tokenizer.token_classes import token_classes


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
