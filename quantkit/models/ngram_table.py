"""A table of n-gram embeddings that stays in its file: a pass reads the rows that its tokens need
(DeepSeek-V4.1's are 98 GB each). The page cache keeps what is read often."""

from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.tokenizer.token_classes import token_classes


class StoredNgramTable:
    """The table `module` of a checkpoint: module.weight [R, D], and module.scale [R, D / group] of
    FP8 values, each a multiplier of as many values."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self._checkpoint, self._module = checkpoint, module

    def classes(self) -> Tensor:
        """As `token_classes`."""
        return token_classes(self._checkpoint.path)

    def rows(self, numbers: Tensor) -> Tensor:
        """numbers int64 [n] -> float32 [n, D], on the host."""
        found, places = numbers.unique(return_inverse=True)
        values = self._checkpoint.read_rows(f"{self._module}.weight", found).float()
        name = f"{self._module}.scale"
        if self._checkpoint.has(name):
            scales = self._checkpoint.read_rows(name, found).float()
            group = values.shape[1] // scales.shape[1]
            values *= scales.repeat_interleave(group, dim=1)
        return values[places]
