"""A linear to be rounded, and the grids it is rounded to: what tests of compensation share."""

import torch
from torch import Tensor

from quantkit.grids.base import Quantizer
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.grids.nvfp4 import Nvfp4Quantizer, global_scale

K, N = 256, 40
QUANTIZERS: dict[str, Quantizer] = {
    "int4": IntQuantizer(IntGrid(4, 128, symmetric=False), torch.float16),
    "int4-fitted": IntQuantizer(IntGrid(4, 64, symmetric=False), torch.float16, (1.0, 0.9, 0.8)),
    "int8": IntQuantizer(IntGrid(8, None, symmetric=True), torch.float32),
    "fp4": Nvfp4Quantizer(global_scale(torch.tensor(4.0)), (0, -1, 1)),
}


def problem(seed: int = 0, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Weights [..., N, K], and the Hessian of inputs whose channels are correlated and of very
    different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(*batch, K, K, generator=generator) / K**0.5
    x = (
        torch.randn(*batch, 1024, K, generator=generator)
        @ mix
        * torch.randn(K, generator=generator).exp()
    )
    return torch.randn(*batch, N, K, generator=generator), x.mT @ x / 1024
