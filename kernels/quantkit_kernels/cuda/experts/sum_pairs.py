"""The sum over each token's experts."""

from torch import Tensor

from quantkit_kernels.cuda.build import library
from quantkit_kernels.cuda.launch import DTYPES, checked, stream_of


def sum_pairs(weighed: Tensor, y: Tensor, counters: Tensor | None = None) -> None:
    """y[T, H] = the sum over each token's k rows of weighed float32 [T * k, H]. Sets `counters` int32 to zero."""
    sizes = (y.shape[0], weighed.shape[0] // y.shape[0], y.shape[1])
    cleared = (None, 0) if counters is None else (counters.data_ptr(), counters.numel())
    checked(library().qk_sum_pairs(weighed.data_ptr(), y.data_ptr(), DTYPES[y.dtype], *sizes, *cleared, stream_of(y.device)))


def sum_rounded_pairs(weighed: Tensor, y: Tensor) -> None:
    """The same of weighed[T * k, H] in the dtype of y."""
    sizes = (y.shape[0], weighed.shape[0] // y.shape[0], y.shape[1])
    checked(library().qk_sum_rounded_pairs(weighed.data_ptr(), y.data_ptr(), DTYPES[y.dtype], *sizes, stream_of(y.device)))
