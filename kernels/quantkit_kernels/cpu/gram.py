"""Sums of x x^T over tokens in bfloat16 with float32 sums: gram.cpp, for processors that multiply
bfloat16."""

import torch
from torch import Tensor

from quantkit_kernels.cpu.build import once

_GROUP = 64
"""Channels, as gram.cpp has them."""


def has_gram() -> bool:
    """Whether this processor has AVX512_BF16, and the C++ is there or can be compiled."""
    return once("gram") is not None


class GramOperand:
    """x float32 [T, K], rounded to bfloat16, as gram.cpp reads it."""

    def __init__(self, x: Tensor) -> None:
        assert (x.dtype, x.stride(1)) == (torch.float32, 1), f"{x.dtype}, {x.stride()}"
        tokens, self.channels = x.shape
        self._pairs, groups = -(-tokens // 2), -(-self.channels // _GROUP)
        self._words = torch.empty(groups, self._pairs, _GROUP, dtype=torch.int32)
        loaded = once("gram")
        assert loaded is not None, "has_gram() was called before"
        self._loaded = loaded
        loaded.qk_gram_words(
            x.data_ptr(),
            self._words.data_ptr(),
            tokens,
            self.channels,
            x.stride(0),
            torch.get_num_threads(),
        )

    def add_to(self, out: Tensor, rows: slice) -> None:
        """These rows, from a multiple of 64 on, of out float32 [K, K] plus x^T x, at least up to
        the diagonal."""
        start, stop = rows.start, min(rows.stop, self.channels)
        assert out.shape == (self.channels, self.channels), out.shape
        assert out.is_contiguous(), out.stride()
        assert (out.dtype, start % _GROUP) == (torch.float32, 0), f"{out.dtype}, {start}"
        self._loaded.qk_gram_add(
            self._words.data_ptr(),
            out.data_ptr(),
            self._pairs,
            self.channels,
            start,
            stop,
            torch.get_num_threads(),
        )
