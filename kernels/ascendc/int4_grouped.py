"""The NumPy twin of int4_grouped.cpp: the same digits, tiles, order and number formats. Its packing
is what the kernel reads."""

import numpy as np
from numpy.typing import NDArray

GROUP, TILE_N = 128, 256
RADIX = np.float32(128)
_LEAST = np.float32(1e-30)
Floats = NDArray[np.float32]


def pack(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """int8 [N, K] codes -8..7 -> bytes [N / 256, K / 128, 2, 8192]. N a multiple of 256, K of
    128."""
    n, k = codes.shape
    assert n % TILE_N == 0, f"{n} output features are no multiple of {TILE_N}"
    assert k % GROUP == 0, f"{k} input features are no multiple of {GROUP}"
    axes = codes.reshape(
        n // TILE_N, 2, 8, 16, k // GROUP, 2, 2, 32
    )  # N3 half N1 N0 group nibble K1 K0
    nibbles = (axes.transpose(0, 4, 1, 5, 6, 2, 3, 7) & 15).astype(
        np.uint8
    )  # N3 group half nibble K1 N1 N0 K0
    return np.ascontiguousarray(nibbles[:, :, :, 0] << 4 | nibbles[:, :, :, 1]).reshape(
        n // TILE_N, k // GROUP, 2, -1
    )


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The inverse of `pack`."""
    tiles, groups = packed.shape[:2]
    bytes_ = packed.reshape(tiles, groups, 2, 2, 8, 16, 32).view(
        np.int8
    )  # N3 group half K1 N1 N0 K0
    nibbles = np.stack(
        [bytes_ >> 4, (bytes_ << 4) >> 4], axis=3
    )  # N3 group half nibble K1 N1 N0 K0
    return nibbles.transpose(0, 2, 5, 6, 1, 3, 4, 7).reshape(tiles * TILE_N, groups * GROUP)


def pack_parameters(scale: Floats, zero: Floats) -> NDArray[np.float16]:
    """[N, K / 128] each -> fp16 [N / 256, K / 128, 2, 2, 128]: 16 times the zero points, in codes,
    and the scales."""
    n, groups = scale.shape
    both = np.stack([16 * zero, scale]).astype(np.float16).reshape(2, n // TILE_N, 2, 128, groups)
    return np.ascontiguousarray(both.transpose(1, 4, 2, 0, 3))


def digits(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.int8], Floats, Floats]:
    """x [R, K] -> d1, d0 [R, K], s / 16 and the digits' sums [R, K / 128]."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=-1), _LEAST)
    scaled = groups * (np.float32(127) / largest)[..., None]
    first = np.rint(scaled)
    second = np.rint((scaled - first) * RADIX)
    sums = (first + second / RADIX).sum(axis=-1)
    factors = largest * (np.float32(1) / np.float32(127 * 16))
    return (
        first.astype(np.int8).reshape(x.shape),
        second.astype(np.int8).reshape(x.shape),
        factors,
        sums,
    )


def multiply(
    x: Floats,
    weight: NDArray[np.uint8],
    parameters: NDArray[np.float16],
    group_list: NDArray[np.int64],
) -> Floats:
    """y float32 [R, N], values before they are rounded to bf16.

    x [R, K], values those of bf16, sorted by expert; weight [E, ...] of `pack`; parameters [E, ...]
    of `pack_parameters`; group_list [E]: where each expert's rows end.
    """
    tiles, groups = weight.shape[1:3]
    d1, d0, factors, sums = digits(x)
    y = np.zeros((len(x), tiles * TILE_N), np.float32)
    for expert, (first, last) in enumerate(zip([0, *group_list[:-1]], group_list)):
        if first == last:
            continue
        codes = unpack(weight[expert]).astype(np.int32) * 16
        values = (
            parameters[expert].astype(np.float32).transpose(1, 3, 0, 2, 4).reshape(groups, 2, -1)
        )  # zero and scale [N]
        for group in range(groups):
            k = slice(group * GROUP, (group + 1) * GROUP)
            exact = [
                (one[first:last, k].astype(np.int32) @ codes[:, k].T).astype(np.float32)
                for one in (d1, d0)
            ]
            total = exact[0] + exact[1] * (1 / RADIX)
            zero, scale = values[group]
            total = (total - zero * sums[first:last, group, None]) * factors[
                first:last, group, None
            ]
            y[first:last] += total * scale
    return y
