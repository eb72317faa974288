"""NVFP4 linears on the FP4 units of compute capability 10 and 12, by torch's scaled_mm. Activations
are rounded to NVFP4 inside.

Those units multiply FP4 by FP4 only. A weight in W4A16 wants activations of 16 bits, for which no
library has a product on these units, so "auto" never takes this backend: the Triton kernels decode
the weight to 16 bits there, too. Who asks for it by name gets W4A4. Never run on
such a card: written from PyTorch's sources and NVIDIA's description of the layout, and held against
a product in torch that reads it.
"""

import torch

from quantkit_kernels.backends import Shape
from quantkit_kernels.scaled_mm.linear import linear

LIMITS = {
    "linear_fp4": "activations are rounded to NVFP4 inside (W4A4): taken only where it is asked for"
}
_CAPABILITIES = (10, 12)


def unusable(
    operator: str, device: torch.device, dtype: torch.dtype | None, shapes: tuple[Shape, ...]
) -> str | None:
    if operator != "linear_fp4":
        return "FP4 linears only"
    if device.type != "cuda" or torch.version.hip:
        return f"runs on NVIDIA's FP4 units, not on {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _CAPABILITIES:
        return (
            f"FP4 units have compute capability 10 and 12, this device has {major}.{minor}: "
            "weights are decoded to 16 bits here"
        )
    if dtype not in (None, torch.bfloat16):
        return "computes in bfloat16 only"
    for n, k in shapes:
        if n % 16 or k % 32:
            return (
                f"needs output features in multiples of 16 and input features of 32, not {n} "
                f"and {k}"
            )
    return None
