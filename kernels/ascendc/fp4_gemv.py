"""The NumPy twin of fp4_gemv.cpp: the same layout, tiles, order and number formats. Its packing is what the kernel reads.

Every step of the kernel is one statement here, on whole tiles: what the vector instructions do in repeats, NumPy does in axes.
"""

import numpy as np
from numpy.typing import NDArray

TILE_K, TILE_N, GROUP = 64, 256, 16
RESCALE = 2.0**22
K_AXES, N_AXES = (4, 2, 8), (8, 4, 4)  # K2, K1, K0 and N2, N1, N0; K3 and N3 come before


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [N, K] codes 0..15 -> the kernel's K * N / 2 bytes. N a multiple of 256, K of 64."""
    n, k = codes.shape
    assert n % TILE_N == 0, f"{n} output features are no multiple of {TILE_N}"
    assert k % TILE_K == 0, f"{k} input features are no multiple of {TILE_K}"
    by_column = codes.T  # [K, N]
    bytes_ = by_column[:, 0::2] | by_column[:, 1::2] << 4
    axes = bytes_.reshape(-1, *K_AXES, n // TILE_N, *N_AXES)  # K3 K2 K1 K0 N3 N2 N1 N0
    return np.ascontiguousarray(axes.transpose(0, 2, 1, 5, 4, 6, 3, 7)).reshape(-1)


def unpack(packed: NDArray[np.uint8], n: int, k: int) -> NDArray[np.uint8]:
    """The inverse of `pack`."""
    axes = packed.reshape(-1, 2, 4, 8, n // TILE_N, 4, 8, 4)  # K3 K1 K2 N2 N3 N1 K0 N0
    bytes_ = axes.transpose(0, 2, 1, 6, 4, 3, 5, 7).reshape(k, n // 2)
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(k, n).T


def gemv(
    x: NDArray[np.float32],
    weight: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    global_scale: NDArray[np.float32],
    experts: NDArray[np.int32],
    *,
    rows_per_x: int = 1,
    splits: int = 1,
) -> NDArray[np.float32]:
    """y float32 [R, N].

    x float32 [R / rows_per_x, K], its values those of bf16; weight [E, K * N / 2] of `pack`; scale [E, K / 16, N] bits of e4m3;
    global_scale [E, N], times RESCALE; experts [R]; splits divides K / 64.
    """
    k, n = x.shape[1], global_scale.shape[1]
    y = np.zeros((experts.shape[0], n), dtype=np.float32)
    per_split = k // TILE_K // splits
    for row, expert in enumerate(experts):
        tiles = weight[expert].reshape(k // TILE_K, 64, n // TILE_N, 128)
        scales = scale[expert].reshape(k // TILE_K, 4, n // TILE_N, TILE_N)
        for n3 in range(n // TILE_N):
            for split in range(splits):
                acc = np.zeros((8, 4, 8, 8), dtype=np.float32)  # N2 N1 K0 n
                for k3 in range(split * per_split, (split + 1) * per_split):
                    x_tile = x[row // rows_per_x, k3 * TILE_K : (k3 + 1) * TILE_K].astype(np.float32)
                    _accumulate(acc, tiles[k3, :, n3], scales[k3, :, n3], x_tile)
                columns = slice(n3 * TILE_N, (n3 + 1) * TILE_N)
                y[row, columns] += _tree(acc).reshape(-1) * global_scale[expert, columns]
    return y


def _accumulate(acc: NDArray[np.float32], tile: NDArray[np.uint8], scale: NDArray[np.uint8], x: NDArray[np.float32]) -> None:
    """acc += value * scale * x. tile [64 runs (K1 K2 N2), 128 bytes (N1 K0 N0)]; scale [K2, n]; x [k]."""
    scale_values = (scale.astype(np.int16) << 7).view(np.float16).astype(np.float32).reshape(4, 8, 4, 1, 8)  # K2 N2 N1 . n
    x_blocks = x.reshape(4, 2, 8, 1)  # K2 K1 K0 .
    for k1, half in enumerate(tile.reshape(2, 4, 8, 4, 8, 4)):
        values = _decode(half).astype(np.float32)  # K2 N2 N1 K0 n
        for k2 in range(4):
            scaled = values[k2] * scale_values[k2]
            acc += scaled * x_blocks[k2, k1]


def _decode(bytes_: NDArray[np.uint8]) -> NDArray[np.float16]:
    """[..., N0] bytes -> [..., n] fp16, 2^-14 of the codes' values: widened with sign, shifted, masked."""
    nibbles = np.stack([bytes_ << 4, bytes_ & 0xF0], axis=-1).view(np.int8).reshape(*bytes_.shape[:-1], 8)
    widened = (nibbles >> 4).astype(np.int16)
    return ((widened << 9).view(np.uint16) & np.uint16(0x8E00)).view(np.float16)


def _tree(acc: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sum over K0 in the kernel's order: halves, quarters, eighths."""
    fours = acc[:, :, :4] + acc[:, :, 4:]
    twos = fours[:, :, :2] + fours[:, :, 2:]
    return twos[:, :, 0] + twos[:, :, 1]
