"""Weights as the Ascend kernels read them: whole tiles, each one run of memory without gaps.

`PackedTiles` holds one expert after the other (one linear is one expert), and of each expert its
column tiles, BN output features wide, the last padded with zeros:
  4 bits   int8 [E, tiles, K/128, 64, BN]: byte (s, r, c) of a tile has W[c, 128 s + r] in its low and W[c, 128 s + 64 + r] in its high
           nibble, so each half is a run of input features, as x is
  int8     int8 [E, tiles, K/128, 128, BN]
  scales   [E, tiles, groups, BN]; per channel and global scales [E, tiles, BN]
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.ascend.chip import COLUMNS, SPAN
from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, group_size, kind, shape

HALF = SPAN // 2
FP4_RESCALE = 2.0**22
"""E2M1 codes are decoded to 2^-14 of their value and e4m3 scales to 2^-8; the global scale makes up
for both."""


@dataclass(frozen=True)
class PackedTiles:
    """Tensors of `num_experts` weights W[n, k] of one grid, as the kernel of that grid takes them
    between x and `experts`."""

    kind: str
    n: int
    k: int
    num_experts: int
    tensors: tuple[Tensor, ...]
    group: int = 0
    has_zero: bool = False

    @property
    def bn(self) -> int:
        return COLUMNS[self.kind]

    @property
    def tiles(self) -> int:
        return -(-self.n // self.bn)


def pack(weight: Weight) -> PackedTiles:
    """One weight, on its own device."""
    packed = allocate(weight, 1, weight[0].device)
    place(packed, 0, weight)
    return packed


def allocate(weight: Weight, num_experts: int, device: torch.device) -> PackedTiles:
    """Room for `num_experts` weights like this one."""
    n, k = shape(weight)
    name = kind(weight)
    assert k % SPAN == 0, (n, k)
    parts = [
        torch.empty(num_experts, *part.shape, dtype=part.dtype, device=device)
        for part in _tiles(weight)
    ]
    group = group_size(weight) if isinstance(weight, Int4) else 0
    return PackedTiles(
        name,
        n,
        k,
        num_experts,
        tuple(parts),
        group,
        isinstance(weight, Int4) and weight.zero_point is not None,
    )


def place(packed: PackedTiles, index: int, weight: Weight) -> None:
    """Write expert `index`."""
    for room, part in zip(packed.tensors, _tiles(weight)):
        room[index].copy_(part)


def _tiles(weight: Weight) -> tuple[Tensor, ...]:
    """The tensors of one expert."""
    bn = COLUMNS[kind(weight)]
    n = shape(weight)[0]
    if isinstance(weight, Int8):
        return _column_tiles(weight.codes, bn).unflatten(1, (-1, SPAN)), _column_tiles(
            weight.scale, bn
        )[:, 0]
    if isinstance(weight, Int4):
        scale = _column_tiles(weight.scale, bn)
        # The kernel takes a zero point whether it reads it or not.
        zero_point = (
            torch.zeros(1, 1, 1, dtype=torch.int8)
            if weight.zero_point is None
            else _column_tiles(weight.zero_point, bn)
        )
        return pack_nibbles(weight.codes, bn), scale, zero_point
    assert isinstance(weight, Fp4), kind(weight)
    global_scale = weight.global_scale.expand(n).unsqueeze(1) * FP4_RESCALE
    scale_bits = weight.scale.view(torch.int8)
    return (
        pack_nibbles(weight.codes.to(torch.int8), bn),
        _column_tiles(scale_bits, bn),
        _column_tiles(global_scale, bn)[:, 0],
    )


def _column_tiles(values: Tensor, bn: int) -> Tensor:
    """[N, X] -> [tiles, X, bn], padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % bn))
    return padded.unflatten(0, (-1, bn)).transpose(1, 2).contiguous()


def pack_nibbles(codes: Tensor, bn: int) -> Tensor:
    """int8 [N, K], of which the low four bits count -> int8 [tiles, K/128, 64, bn]."""
    low, high = codes.unflatten(1, (-1, 2, HALF)).unbind(2)
    return _column_tiles(((low & 15) | (high << 4)).flatten(1), bn).unflatten(1, (-1, HALF))


def unpack_nibbles(packed: Tensor, n: int) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, K], 0..15."""
    rows = packed.flatten(1, 2).transpose(1, 2).flatten(0, 1)[:n].unflatten(1, (-1, HALF))
    halves = torch.stack([rows & 15, (rows >> 4) & 15], dim=2)
    return halves.flatten(1).to(torch.uint8)
