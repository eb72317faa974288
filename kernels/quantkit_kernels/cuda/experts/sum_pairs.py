"""The sum over each token's experts."""

import torch
from torch import Tensor

from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of
from quantkit_kernels.pairs import UnsummedPairs


def sum_pairs(
    weighed: Tensor, y: Tensor, ids: Tensor | None = None, counters: Tensor | None = None
) -> None:
    """y[T, H] = the sum over each token's k rows of weighed float32 [T * k, H]. ids: of the pairs,
    [T, k] int32 or int64; those of NO_EXPERT are left out. Sets `counters` int32 to zero."""
    sizes = (*_place(ids), DTYPES[y.dtype], y.shape[0], weighed.shape[0] // y.shape[0], y.shape[1])
    cleared = (None, 0) if counters is None else (counters.data_ptr(), counters.numel())
    checked(
        library().qk_sum_pairs(
            weighed.data_ptr(), y.data_ptr(), *sizes, *cleared, stream_of(y.device)
        )
    )


def add_up(pairs: UnsummedPairs) -> Tensor:
    y = torch.empty(
        pairs.tokens, pairs.weighed.shape[1], dtype=pairs.dtype, device=pairs.weighed.device
    )
    sum_pairs(pairs.weighed, y, None, pairs.counters)
    return y


def sum_rounded_pairs(weighed: Tensor, y: Tensor, ids: Tensor | None = None) -> None:
    """The same of weighed[T * k, H] in the dtype of y."""
    sizes = (*_place(ids), DTYPES[y.dtype], y.shape[0], weighed.shape[0] // y.shape[0], y.shape[1])
    checked(
        library().qk_sum_rounded_pairs(
            weighed.data_ptr(), y.data_ptr(), *sizes, stream_of(y.device)
        )
    )


def _place(ids: Tensor | None) -> tuple[int | None, int]:
    """Where ids are, and how many ints apart."""
    return (None, 0) if ids is None else (ids.data_ptr(), ids.element_size() // 4)
