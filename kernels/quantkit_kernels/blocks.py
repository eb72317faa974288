"""x @ W.T for a W that is expanded a few rows at a time.

A block small enough to stay in a CPU cache is written and read again there: expanding 4096 x 4096
int8 to float32 costs 1.4 ms in blocks of 4 MB and 40 ms in one piece (AVX2, one core), and memory
stays bounded for any weight.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20


def blocked_matmul(
    x: Tensor, out_features: int, expand: Callable[[int, int], Tensor], multiple: int = 1
) -> Tensor:
    """x[M, K] @ W.T -> [M, N] in x's dtype, W's rows start..stop being expand(start, stop), [stop -
    start, K] of x's dtype; start is a multiple of `multiple`."""
    y = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    step = max(1, BLOCK_BYTES // (x.shape[1] * x.element_size() * multiple)) * multiple
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        torch.mm(x, expand(start, stop).T, out=y[:, start:stop])
    return y
