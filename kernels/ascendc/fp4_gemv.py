"""The NumPy twin of fp4_gemv.cpp: the same layout, tiles, order and number formats. Its packing is
what the kernel reads.

Every step of the kernel is one statement here, on whole tiles: what the vector instructions do in
repeats, NumPy does in axes.
"""

import numpy as np
from numpy.typing import NDArray

TILE_K, TILE_N, GROUP = 64, 512, 16
RESCALE = 2.0**7


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """uint8 [N, K] codes 0..15 -> the kernel's words [N / 512, K / 64, 8192]. N a multiple of 512,
    K of 64."""
    n, k = codes.shape
    assert n % TILE_N == 0, f"{n} output features are no multiple of {TILE_N}"
    assert k % TILE_K == 0, f"{k} input features are no multiple of {TILE_K}"
    axes = codes.astype(np.uint16).reshape(
        n // TILE_N, 32, 16, k // TILE_K, 4, 2, 8
    )  # N3 N1 N0 K3 K2 K1 K0
    planes = axes.transpose(4, 0, 3, 5, 1, 6, 2)  # K2 | N3 K3 K1 N1 K0 N0
    words = planes[0] | planes[1] << 4 | planes[2] << 8 | planes[3] << 12
    return np.ascontiguousarray(words).reshape(n // TILE_N, k // TILE_K, -1)


def pack_scales(scale: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bits of e4m3 [N, K / 16] -> [N / 512, K / 64, 4, 512]."""
    n, groups = scale.shape
    return np.ascontiguousarray(
        scale.reshape(n // TILE_N, TILE_N, groups // 4, 4).transpose(0, 2, 3, 1)
    )


def gemv(
    x: NDArray[np.float32],
    weight: NDArray[np.uint16],
    scale: NDArray[np.uint8],
    global_scale: NDArray[np.float32],
    group_list: NDArray[np.int64],
    *,
    splits: int = 1,
) -> NDArray[np.float32]:
    """y float32 [R, N], values before they are rounded to bf16.

    x float32 [R, K], values those of bf16, sorted by expert; weight [E, ...] of `pack`; scale [E,
    ...] of `pack_scales`; global_scale [E, N], times RESCALE; group_list [E]: where each expert's
    rows end; splits divides K / 64.
    """
    _, column_tiles, tiles = weight.shape[:3]
    y = np.zeros((len(x), column_tiles * TILE_N), np.float32)
    for expert, (first, last) in enumerate(zip([0, *group_list[:-1]], group_list)):
        for row in range(first, last):
            for n3 in range(column_tiles):
                columns = slice(n3 * TILE_N, (n3 + 1) * TILE_N)
                for split in np.split(np.arange(tiles), splits):
                    acc = np.zeros((32, 8, 16), np.float32)  # N1 K0 N0
                    for k3 in split:
                        _accumulate(
                            acc,
                            weight[expert, n3, k3],
                            scale[expert, n3, k3],
                            x[row, k3 * TILE_K : (k3 + 1) * TILE_K],
                        )
                    y[row, columns] += _tree(acc).reshape(-1)
                y[row, columns] *= global_scale[expert, columns]
    return y


def _accumulate(
    acc: NDArray[np.float32],
    words: NDArray[np.uint16],
    scale: NDArray[np.uint8],
    x: NDArray[np.float32],
) -> None:
    """acc += value * scale * x. words [8192]; scale [K2, n]; x [k]."""
    scales = (scale.astype(np.int16) << 7).view(np.float16) * np.float16(2.0**15)
    for plane in range(4):
        moved = (words << (12 - 4 * plane)).view(np.int16) >> 3
        values = (moved.view(np.uint16) & np.uint16(0x8E00)).view(np.float16).reshape(2, 32, 8, 16)
        scaled = (values * scales[plane].reshape(32, 1, 16)).astype(np.float32)
        for k1 in range(2):
            acc += scaled[k1] * x[plane * GROUP + k1 * 8 : plane * GROUP + k1 * 8 + 8].reshape(8, 1)


def _tree(acc: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sum over K0 in the kernel's order: halves, quarters, eighths."""
    fours = acc[:, :4] + acc[:, 4:]
    twos = fours[:, :2] + fours[:, 2:]
    return twos[:, 0] + twos[:, 1]
