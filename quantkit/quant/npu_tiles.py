"""The in-memory layout of the Ascend FP4 kernels of chitu (QingCheng-AI/ascend-kernel), for weights and for scales.

A tile is 64 inputs x 256 outputs. Within it, 64 rows (K1, K2, N2) of 128 bytes (N1, K0, N0) let the vector unit expand eight
inputs times eight neighbouring outputs of one scale group at a time. Bytes only: on disk the weight stays in ModelOpt's layout.
"""

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.quant.packing import pack_pairs, unpack_pairs
from quantkit.quant.weights import Fp4Weight

TILE_INPUTS = 64
TILE_OUTPUTS = 256
# k = 64 K3 + 16 K2 + 8 K1 + K0, and a byte holding outputs 2j (low) and 2j + 1 has j = 128 N3 + 16 N2 + 4 N1 + N0
_PLAIN = ("K3", "K2", "K1", "K0", "N3", "N2", "N1", "N0")
_TILED = ("K3", "K1", "K2", "N2", "N3", "N1", "K0", "N0")
_SIZES = {"K2": 4, "K1": 2, "K0": 8, "N2": 8, "N1": 4, "N0": 4}
_TO_TILED = [_PLAIN.index(axis) for axis in _TILED]
_TO_PLAIN = [_TILED.index(axis) for axis in _PLAIN]


def tile_fp4(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [N, K] -> uint8 [K, N / 2] in the order of the kernels. K must divide by 64 and N by 256."""
    rows, columns = codes.shape
    if rows % TILE_OUTPUTS or columns % TILE_INPUTS:
        fault = f"a weight of {rows} x {columns} does not fit the FP4 kernels' tiles of {TILE_OUTPUTS} x {TILE_INPUTS}"
        raise QuantkitError(fault, "run this weight in another way")
    outputs = (rows // TILE_OUTPUTS, _SIZES["N2"], _SIZES["N1"], _SIZES["N0"])
    inputs = (columns // TILE_INPUTS, _SIZES["K2"], _SIZES["K1"], _SIZES["K0"])
    return pack_pairs(codes.T).view(*inputs, *outputs).permute(_TO_TILED).reshape(columns, rows // 2)


def untile_fp4(tiles: Tensor) -> Tensor:
    """uint8 [K, N / 2] -> E2M1 codes uint8 [N, K]"""
    columns, pairs = tiles.shape
    sizes = _SIZES | {"K3": columns // TILE_INPUTS, "N3": pairs * 2 // TILE_OUTPUTS}
    plain = tiles.view([sizes[axis] for axis in _TILED]).permute(_TO_PLAIN).reshape(columns, pairs)
    return unpack_pairs(plain).T.contiguous()


def single_scale(weight: Fp4Weight) -> Tensor:
    """The one scale per group that the kernels take: scale * global_scale rounded to bfloat16, [K / 16, N]."""
    return (weight.scale.float() * weight.global_scale).to(torch.bfloat16).T.contiguous()
