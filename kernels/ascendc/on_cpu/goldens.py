"""Operands and results of both Ascend C kernels as files, by their NumPy twins, for main.asc:

python goldens.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
import fp4_gemv
import int4_grouped

ENDS = np.array([1, 1, 4, 4, 10])
"""Of the rows of each expert: none, one, three and six."""


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def unwritten(*shape: int, dtype: type) -> NDArray[np.uint8]:
    return np.full((*shape, np.dtype(dtype).itemsize), 0xFF, np.uint8)


def fp4(rng: np.random.Generator) -> tuple[list[int], list[NDArray[Any]], NDArray[np.uint16]]:
    cores, experts, n, k, splits, most = 4, len(ENDS), 1024, 192, 3, 4
    codes = rng.integers(0, 16, (experts, n, k)).astype(np.uint8)
    weight = np.stack([fp4_gemv.pack(one) for one in codes])
    scale = np.stack(
        [fp4_gemv.pack_scales(one) for one in rng.integers(8, 120, (experts, n, k // 16), np.uint8)]
    )
    of_columns = (rng.uniform(0.5, 2, (experts, n)) * fp4_gemv.RESCALE).astype(np.float32)
    x = bfloat16(rng.normal(size=(ENDS[-1], k)))
    counts = np.diff(ENDS, prepend=0)
    partial = unwritten(
        int((-(-counts // most)).sum()), n // 512, splits, most, 512, dtype=np.float32
    )
    y = fp4_gemv.gemv(widened(x), weight, scale, of_columns, ENDS, splits=splits)
    operands = [x, weight, scale, of_columns, ENDS, partial, unwritten(*y.shape, dtype=np.uint16)]
    return [cores, experts, k, n, splits], operands, bfloat16(y)


def int4(rng: np.random.Generator) -> tuple[list[int], list[NDArray[Any]], NDArray[np.uint16]]:
    cores, experts, rows, n, k = 2, len(ENDS), int(ENDS[-1]), 512, 384
    codes = rng.integers(-8, 8, (experts, n, k)).astype(np.int8)
    weight = np.stack([int4_grouped.pack(one) for one in codes])
    scale, zero = (
        rng.uniform(0.005, 0.02, (experts, n, k // 128)),
        rng.integers(-8, 8, (experts, n, k // 128)),
    )
    parameters = np.stack([int4_grouped.pack_parameters(*one) for one in zip(scale, zero)])
    x = bfloat16(rng.normal(size=(rows, k)))
    scratch = [
        unwritten(rows, 2, k, dtype=np.int8),
        unwritten(rows, 2, k // 128, 8, dtype=np.float32),
        unwritten(cores, 4, 32768, dtype=np.int8),
        unwritten(cores, 2, 16, 256, dtype=np.int32),
    ]
    y = int4_grouped.multiply(widened(x), weight, parameters, ENDS)
    operands = [x, weight, parameters, ENDS, *scratch, unwritten(*y.shape, dtype=np.uint16)]
    return [cores, rows, experts, k, n], operands, bfloat16(y)


def main() -> None:
    for name, made in (("fp4_gemv", fp4), ("int4_grouped", int4)):
        sizes, operands, golden = made(np.random.default_rng(0))
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sizes").write_text(" ".join(map(str, sizes)) + "\n")
        for index, one in enumerate(operands):
            (folder / str(index)).write_bytes(one.tobytes())
        (folder / "golden").write_bytes(golden.tobytes())


if __name__ == "__main__":
    main()
