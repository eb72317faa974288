"""What bounds the Ascend C kernels, predicted: their instructions and bytes, counted while the
sources run, times a table of rates.

    PYTHONPATH=.:kernels:tests:tests/support python tests/ascend/cycles.py

prints a table for DeepSeek-R1's experts on one of 8 ranks. An item of a kernel is run at two
lengths of K, for what a group of it takes and what the rest. All parts of a core are taken to
overlap, so an item takes as long as its slowest part, and a launch as many items as the busiest
core has; what a part of a split K sends is counted once. Nothing here was measured on a chip.

Rates, a cycle at 1.85 GHz (24 AI cores, each a cube core and two vector cores):
  HBM 36.0 bytes an AI core           1600 GB/s of the data sheet; CANN's chip description (Ascend910B1.ini, ddr_rate) says 32
  L2 110 read, 86 written, an AI core the same file, l2_read_rate and l2_write_rate
  MTE3 64 bytes a vector core         ub_to_l2_rate
  L1 to L0 256 bytes                  l1_to_l0_a_rate is 512; L0B is assumed to be half
  cube, one step of 16 x 16 x 32      8192 int8 products, 727 TOPS a chip; the 910B2's data sheet has 706
  vector, one repeat of 256 bytes     and OVERHEAD cycles an instruction until the next may depend on it, assumed: the table has both
"""

import ctypes
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from ascend import ascendc
from quantkit_kernels.ascend.streamed import enough_splits

CORES, GHZ = 24, 1.85
HBM, L2_READ, L2_WRITE, MTE3, L0 = 36.0, 110.0, 86.0, 64.0, 256.0
OVERHEAD = 20
EXPERTS, CHOSEN = 256, 8


class Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "instructions",
            "repeats",
            "hbm_read",
            "l2_read",
            "l2_written",
            "l1_to_l0",
            "cube_steps",
            "copies",
        )
    ]


@dataclass(frozen=True)
class Cost:
    """Cycles that an AI core's parts take."""

    hbm: float
    l2: float
    vector: float
    waits: float
    cube: float

    def __add__(self, other):
        return Cost(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Cost)))

    def __mul__(self, factor):
        return Cost(*(getattr(self, one.name) * factor for one in fields(Cost)))

    def __sub__(self, other):
        return self + other * -1

    def longest(self, waits):
        """Cycles of the slowest part, and which it is. waits: instructions of a vector core one
        after the other."""
        parts = {
            "HBM": self.hbm,
            "L2": self.l2,
            "vector": self.vector + (self.waits if waits else 0),
            "cube": self.cube,
        }
        name = max(parts, key=lambda one: parts[one])
        return parts[name], name


def counted(kernel, operands, sizes, mixed):
    """Of one launch on one AI core, which for a kernel of vector cores alone is two."""
    number = 1 if mixed else 2
    addresses = (ctypes.c_void_p * len(operands))(*(one.data_ptr() for one in operands))
    kernel.launch(
        ctypes.c_uint32(number),
        ctypes.c_uint32(0),
        addresses,
        (ctypes.c_uint32 * len(sizes))(*sizes),
    )
    every = [Counts() for _ in range(3 if mixed else 2)]
    for index, one in enumerate(every):
        assert kernel.counts_of(index, ctypes.byref(one))
    busiest = max(every, key=lambda one: one.repeats)
    written = max(
        sum(one.l2_written for one in every) / L2_WRITE,
        max(one.l2_written for one in every[mixed:]) / MTE3,
    )
    return Cost(
        hbm=sum(one.hbm_read for one in every) / HBM,
        l2=max(sum(one.l2_read for one in every) / L2_READ, written),
        vector=busiest.repeats,
        waits=busiest.instructions * OVERHEAD,
        cube=max(every[0].cube_steps, every[0].l1_to_l0 / L0),
    )


def int4_launch(kernel, rows, tiles, groups):
    k, n = groups * 128, tiles * 256
    scratch = [
        torch.zeros(size, dtype=torch.uint8)
        for size in (
            rows * 2 * k,
            rows * 2 * groups * 32,
            4 * 32768,
            2 * 16 * 256 * 4,
            rows * n * 2,
        )
    ]
    weight, parameters = (
        torch.zeros(tiles * groups * size, dtype=torch.uint8) for size in (16384, 1024)
    )
    x, ends = torch.ones(rows, k, dtype=torch.bfloat16), torch.tensor([rows])
    return counted(kernel, [x, weight, parameters, ends, *scratch], [rows, 1, k, n], mixed=True)


def int4_item(kernel, rows, groups):
    """A tile of 256 n over so many groups of K, and the digits of its rows, of which every vector
    core makes a share."""
    few, many = (
        int4_launch(kernel, rows, 2, size) - int4_launch(kernel, rows, 1, size) for size in (16, 32)
    )
    each = (many - few) * (1 / 16)
    item = few + each * (groups - 16)
    return item, (int4_launch(kernel, rows, 1, 16) - few) * (groups / 16)


def fp4_item(kernel, rows, tiles):
    """512 n over so many tiles of 64 k, on a vector core; half an AI core's bytes."""

    def launch(size):
        k, n = size * 64, 1024
        weight, scale = (torch.zeros(2 * size * one, dtype=torch.uint8) for one in (16384, 2048))
        others = [
            torch.zeros(n),
            torch.tensor([rows]),
            torch.zeros(2 * 4 * 512),
            torch.zeros(rows, n, dtype=torch.bfloat16),
        ]
        return counted(
            kernel,
            [torch.ones(rows, k, dtype=torch.bfloat16), weight, scale, *others],
            [1, k, n, 1],
            mixed=False,
        )

    few, many = launch(2), launch(6)
    return few + (many - few) * (1 / 4) * (tiles - 2)


def experts_asked(tokens):
    """Routed experts that a step asks, on average and evenly, and the rows of each."""
    asked = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)
    return asked, tokens * CHOSEN / asked


def busiest(items, cores):
    """Items of the core that has most."""
    return float(-(-items // cores))


def predict(kernels, name, n, k, tokens, waits):
    """Microseconds of a launch over the routed experts and the shared one, what bounds it, and the
    share of the HBM's rate."""
    asked, rows = experts_asked(tokens)
    low = int(rows)
    kinds = [(asked * (1 - rows + low), low), (asked * (rows - low), low + 1)]
    limit = 8 if name == "int4_grouped" else 4
    kinds += [(tokens // limit, limit), (1 if tokens % limit else 0, tokens % limit)]
    total, items, digits = Cost(0, 0, 0, 0, 0), 0.0, Cost(0, 0, 0, 0, 0)
    for blocks, each in kinds:
        if not blocks:
            continue
        if name == "int4_grouped":
            item, made = int4_item(kernels[name], each, k // 128)
            count, digits = blocks * n / 256, digits + made * (blocks / CORES)
        else:
            item, count = fp4_item(kernels[name], each, k // 64), blocks * n / 512 / 2
        total, items = total + item * count, items + count
    splits = 1 if name == "int4_grouped" else enough_splits(items, k // 64, CORES)
    uneven = busiest(items * splits, CORES) / (items * splits / CORES)
    cycles, bound = (total * (uneven / CORES) + digits).longest(waits)
    return cycles / GHZ / 1e3, bound, total.hbm / CORES / cycles


def compile_kernels(folder):
    return {
        name: ascendc.compiled(ascendc.CPU / f"launch_{name}.cpp", folder)
        for name in ("int4_grouped", "fp4_gemv")
    }


def main():
    lines = [
        "| kernel | product | tokens | us | bound | of the HBM | us with waits | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        kernels = compile_kernels(Path(folder))
        for name in kernels:
            for product, n, k in (
                ("gate and up, 512 x 7168", 512, 7168),
                ("down, 7168 x 256", 7168, 256),
            ):
                for tokens in (1, 4, 8, 32):
                    us, bound, share = predict(kernels, name, n, k, tokens, waits=False)
                    slower, other, _ = predict(kernels, name, n, k, tokens, waits=True)
                    lines.append(
                        f"| {name} | {product} | {tokens} | {us:.1f} | {bound} | {share:.2f} | "
                        f"{slower:.1f} | {other} |"
                    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
