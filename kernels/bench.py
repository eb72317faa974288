"""Time the operators beside their peers and print a table.

    python kernels/bench.py --device cpu                 4096 x 4096 linears against torch's float32 and bfloat16, one thread
    python kernels/bench.py --device cuda                R1's linears and experts by graph replay, with fractions of the read bandwidth

Weights are random and rotate beyond the cache; every result is checked against float64 before it is timed.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from quantkit_kernels import BACKENDS, ExpertsBuilder, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.check import EXPERTS, HIDDEN, TOP_K, exact_experts
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from quantkit_kernels.weights import kind, rows

ROWS = (1, 4, 16, 64)
SIDE = 4096
CUDA_LINEARS = {
    "q_a+kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "shared_gu": (4096, 7168),
    "shared_dn": (7168, 2048),
    "dense_gu": (36864, 7168),
    "dense_dn": (7168, 18432),
}
CUDA_EXPERTS = {"R1": (2048, 0), "R1 of 4": (512, 1)}
"""The intermediate size, and the shared experts run with the routed: a whole layer's routed experts, and those of one rank of four."""
CUDA_GRIDS = ("int4-asym-128", "fp4", "int8")
CUDA_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048)
CUDA_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


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


def cuda_table() -> None:
    """Microseconds, fraction of the read bandwidth and error of R1's linears and of its routed experts, all on one card."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    rng = torch.Generator(device)
    rng.seed()
    bandwidth = read_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{'linear':<11}{'grid':<15}{'error':>9}" + "".join(f"{f'M={m}':>9}" for m in CUDA_ROWS) + "  us; fraction at M=1")
    for name, (n, k) in CUDA_LINEARS.items():
        for grid in CUDA_GRIDS:
            weight = random_weight(grid, n, k, rng)
            first = prepare(weight, dtype=dtype)
            copies = [first] + [prepare(weight, dtype=dtype) for _ in range(copies_beyond_cache(first.nbytes, device) - 1)]
            cells, worst, times = "", 0.0, []
            for m in CUDA_ROWS:
                x = torch.randn(m, k, generator=rng, device=device).to(dtype)
                worst = max(worst, distance(first(x)[:, :256], exact_linear(x, rows(weight, 0, 256))))
                times.append(seconds_per_call([partial(one, x) for one in copies], device))
                cells += f"{times[-1] * 1e6:>9.1f}"
            assert worst < TOLERANCE[dtype], (name, grid, worst)
            print(f"{name:<11}{grid:<15}{worst:>9.1e}{cells}  {first.nbytes / times[0] / bandwidth:.2f}", flush=True)
    print(f"{'experts':<11}{'grid':<15}{'error':>9}" + "".join(f"{f'T={t}':>15}" for t in CUDA_TOKENS) + "  us (fraction)")
    for name, (intermediate, shared) in CUDA_EXPERTS.items():
        for grid in CUDA_GRIDS:
            _experts_row(name, grid, intermediate, shared, bandwidth, rng)


def _experts_row(name: str, grid: str, intermediate: int, shared: int, bandwidth: float, rng: torch.Generator) -> None:
    """Random routing over 256 experts, and those every token asks for besides; layers in turn, so that no expert is still cached."""
    device, dtype = rng.device, torch.bfloat16
    shapes = ((intermediate, HIDDEN), (intermediate, HIDDEN), (HIDDEN, intermediate))
    few = [[random_weight(grid, n, k, rng) for n, k in shapes] for _ in range(4)]
    layers = []
    for _ in range(2 if shared else 1):
        builder = ExpertsBuilder(EXPERTS + shared, dtype=dtype, device=device)
        for index in range(EXPERTS + shared):
            builder.add(index, *few[index % 4])
        layers.append(builder.finish())
    cells, worst = "", 0.0
    for tokens in CUDA_TOKENS:
        x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
        always = torch.arange(EXPERTS, EXPERTS + shared, device=device).expand(tokens, shared)
        routed = [torch.rand(tokens, EXPERTS, generator=rng, device=device).topk(TOP_K, dim=-1).indices for _ in range(8)]
        ids = [torch.cat([one, always], dim=1) for one in routed]
        weights = torch.rand(tokens, TOP_K + shared, generator=rng, device=device)
        worst = max(worst, distance(layers[0](x, ids[0], weights), exact_experts(x, ids[0], weights, few)))
        calls = [partial(layers[turn % len(layers)], x, one, weights) for turn, one in enumerate(ids)]
        seconds = seconds_per_call(calls, device)
        distinct = sum(one.unique().numel() for one in ids) / len(ids)
        fraction = layers[0].nbytes * distinct / (EXPERTS + shared) / seconds / bandwidth
        cells += f"{f'{seconds * 1e6:.1f} ({fraction:.2f})':>15}"
    assert worst < 2e-2, (grid, worst)
    print(f"{name:<11}{grid:<15}{worst:>9.1e}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    if parser.parse_args().device == "cuda":
        cuda_table()
    else:
        cpu_table((torch.bfloat16, torch.float32))


if __name__ == "__main__":
    main()
