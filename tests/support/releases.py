"""Layouts that models are published in: codes in FP4 and FP8 with a power of two for each group or
block, experts of a layer in two tensors; and what such a checkpoint stands for."""

import torch
from torch.nn import functional as F

from quantkit.grids.base import dequantize

_HALF = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = torch.tensor([*_HALF, *(-value for value in _HALF)])


def _power(size):
    """The least power of two that is not below."""
    return size.clamp(min=1e-30).log2().ceil().exp2()


def fp4(weight):
    """[N, K] -> E2M1 codes two to a byte, the first in the low bits, uint8 [N, K / 2]; E8M0 scales
    [N, K / 32]; what they are worth."""
    groups = weight.float().unflatten(1, (-1, 32))
    scale = _power(groups.abs().amax(-1) / 6)
    codes = ((groups / scale[..., None])[..., None] - E2M1).abs().argmin(-1)
    worth = (E2M1[codes] * scale[..., None]).flatten(1)
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.to(torch.float8_e8m0fnu), worth


def fp8(weight, tall, wide):
    """[N, K] -> E4M3 codes, E8M0 scales of blocks of tall x wide, what they are worth."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale = _power(blocks.abs().amax((1, 3)) / 448)
    spread = scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:rows, :columns]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu), codes.float() * spread


def packed(tensors, packer):
    """Tensors as they are stored, scales beside weights, and what each weight is worth. packer: of
    a name and a tensor, fp4 or fp8 of one's blocks; None for one that is stored as it is."""
    stored, worth = {}, {}
    for name, one in tensors.items():
        if (pack := packer(name, one)) is None:
            stored[name] = worth[name] = one
        else:
            scale = f"{name.removesuffix('weight')}scale"
            stored[name], stored[scale], worth[name] = pack(one)
    return stored, worth


def check_read(checkpoint, worth):
    """Every tensor is read to the bit."""
    for name, expected in worth.items():
        module = name.removesuffix(".weight")
        is_linear = module in checkpoint.linears
        read = dequantize(checkpoint.weight(module)) if is_linear else checkpoint.read(name)
        assert torch.equal(read.float(), expected.float()), name


def stacked(tensors):
    """Tensors with the routed experts of a layer in two: rows of gate, then of up; and down."""
    found = {name: one for name, one in tensors.items() if ".experts." not in name}
    for mlp in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{mlp}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{mlp}.experts.{n}.{side}_proj.weight"] for n in range(count)])
            for side in ("gate", "up", "down")
        )
        found[f"{mlp}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        found[f"{mlp}.experts.down_proj"] = down
    return found
