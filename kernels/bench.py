"""Time the operators beside their peers and print a table.

    python kernels/bench.py --device cpu                 4096 x 4096 linears against torch's float32 and bfloat16, one thread
    python kernels/bench.py --device cuda                R1 shapes under CUDA-graph replay, with fractions of the measured bandwidth

Weights are random and rotate beyond the cache; every result is checked against float64 before it is timed.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from quantkit_kernels import BACKENDS, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from quantkit_kernels.weights import kind

ROWS = (1, 4, 16, 64)
SIDE = 4096


def cpu_table(dtypes: tuple[torch.dtype, ...]) -> None:
    """Milliseconds of every CPU backend for a 4096 x 4096 linear, and the ratio to torch's bfloat16 linear."""
    device = torch.device("cpu")
    torch.set_num_threads(1)
    rng = torch.Generator()
    rng.seed()
    print(f"{torch.backends.cpu.get_cpu_capability()}, 1 thread, read bandwidth {read_bandwidth(device) / 1e9:.1f} GB/s")
    print(f"{'grid':<15}{'backend':<11}{'dtype':<10}{'MB':>7}" + "".join(f"{f'M={m} ms':>10}{'x bf16':>8}" for m in ROWS))
    inputs = {m: torch.randn(m, SIDE, generator=rng) for m in ROWS}
    dense = [torch.randn(SIDE, SIDE, generator=rng).bfloat16() for _ in range(3)]
    bf16 = {}
    for m, full in inputs.items():
        x = full.bfloat16()
        bf16[m] = seconds_per_call([partial(F.linear, x, one) for one in dense], device)
    cells = "".join(f"{bf16[m] * 1e3:>10.2f}{1:>8.2f}" for m in ROWS)
    print(f"{'torch':<15}{'F.linear':<11}{'bfloat16':<10}{SIDE * SIDE * 2 / 1e6:>7.1f}{cells}")
    for grid in ("int4-asym-128", "int4-sym-128", "int8", "fp4", "dense"):
        weight = random_weight(grid, SIDE, SIDE, rng)
        for backend in BACKENDS:
            for dtype in dtypes:
                if why_unusable(f"linear_{kind(weight)}", backend, device, dtype, ((SIDE, SIDE),)) is not None:
                    continue
                count = copies_beyond_cache(SIDE * SIDE, device)
                copies = [prepare(weight, backend=backend, dtype=dtype) for _ in range(count)]
                cells = ""
                for m, full in inputs.items():
                    x = full.to(dtype)
                    error = distance(copies[0](x), exact_linear(x, weight))
                    assert error < TOLERANCE[dtype], (grid, backend, dtype, m, error)
                    seconds = seconds_per_call([partial(one, x) for one in copies], device)
                    cells += f"{seconds * 1e3:>10.2f}{bf16[m] / seconds:>8.2f}"
                print(f"{grid:<15}{backend:<11}{str(dtype)[6:]:<10}{copies[0].nbytes / 1e6:>7.1f}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    parser.parse_args()
    cpu_table((torch.bfloat16, torch.float32))


if __name__ == "__main__":
    main()
