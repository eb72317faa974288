"""Products of float32 matrices on a GPU's tensor cores: operands rounded to TF32, which has float32's range and 11 bits, sums in float32.

What they are for is itself an estimate from a sample of tokens, or goes into 16 bits when the model is served: the sums behind a Hessian,
what GPTQ and descent make up for, what rounded experts answer. Scales are proven, sources' answers computed and paths compared without.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """While it lasts. Nothing changes on a processor. May be nested."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
