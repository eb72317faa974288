"""Drawing tokens as a graph: some forty launches over logits and parameters of fixed places,
captured once for each number of rows."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.executor.runner.graphs import Capture, power_of_two
from quantkit.executor.sampling.params import Batch, sample


class _Buffers:
    """Of `rows` rows; rows that are not filled are greedy over whatever lies there."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.logits = torch.zeros(rows, vocab, device=device)
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)
        floats, integers = (
            torch.ones(3, rows, device=device),
            torch.ones(2, rows, dtype=torch.int64, device=device),
        )
        self.batch = Batch(*floats, *integers)
        self.filled: Batch | None = None
        """Whose values `batch` has."""

    def fill(self, logits: Tensor, batch: Batch, places: Tensor) -> None:
        count = len(places)
        self.logits[:count].copy_(logits)
        self.places[:count].copy_(places)
        if batch is not self.filled:
            for own, given in zip(self.batch, batch):
                own[:count].copy_(given)
            self.filled = batch


class Draws:
    """As `sampling.sample`. capture: None where draws are launched one by one."""

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._sizes: dict[tuple[int, int], tuple[_Buffers, Callable[[], Tensor]]] = {}

    def __call__(self, logits: Tensor, batch: Batch, places: Tensor) -> Tensor:
        if self._capture is None:
            return sample(logits, batch, places)
        size = (power_of_two(len(logits)), logits.shape[1])
        if size not in self._sizes:
            buffers = _Buffers(*size, logits.device)
            buffers.fill(logits, batch, places)
            try:
                self._sizes[size] = (
                    buffers,
                    self._capture(
                        lambda: sample(buffers.logits, buffers.batch, buffers.places), []
                    ),
                )
            except RuntimeError as fault:
                self._capture = None
                told = str(fault).partition("\n")[0]
                warnings.warn(
                    f"drawing tokens could not be captured: {told}; it is launched one by one",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return sample(logits, batch, places)
        buffers, step = self._sizes[size]
        buffers.fill(logits, batch, places)
        # The next draw of this size writes to the same place.
        return step()[: len(logits)].clone()
