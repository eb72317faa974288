"""A linear to be rounded, and the grids it is rounded to: what tests of compensation share."""

import torch

from quantkit.grids.base import Scales
from quantkit.grids.int_groups import IntGrid, IntQuantizer
from quantkit.grids.nvfp4 import Nvfp4Quantizer, global_scale

K, N = 256, 40
QUANTIZERS = {
    "int4": IntQuantizer(IntGrid(4, 128, symmetric=False), torch.float16),
    "int4-fitted": IntQuantizer(IntGrid(4, 64, symmetric=False), torch.float16, (1.0, 0.9, 0.8)),
    "int8": IntQuantizer(IntGrid(8, None, symmetric=True), torch.float32),
    "fp4": Nvfp4Quantizer(global_scale(torch.tensor(4.0)), (0, -1, 1)),
}


def problem(seed=0, batch=()):
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


def loss(w, values, hessian):
    """Of each row, in float64."""
    error = (w - values).double()
    return ((error @ hessian.double()) * error).sum(-1)


def two_sided_loss(w, values, hessian, cost):
    error = (w - values).double()
    return float(((cost.double() @ error) * (error @ hessian.double())).sum())


def cost_of_outputs(seed=1):
    """A few directions cost most."""
    strong = torch.randn(N, 4, generator=torch.Generator().manual_seed(seed))
    return strong @ strong.t() + 0.05 * torch.eye(N)


def spread(scales):
    """Steps [N, G] as [N, K]."""
    times = K // scales.scale.shape[-1]
    zero = scales.zero_point
    return Scales(
        scales.scale.repeat_interleave(times, -1),
        None if zero is None else zero.repeat_interleave(times, -1),
    )
