"""Time the operators next to their peers and print a table.

    python kernels/bench.py --device cpu [--threads N]   4096 x 4096 linears next to torch's bfloat16
    python kernels/bench.py --device cuda [--vllm PATH]  R1's linears and experts by graph replay,
    next to cuBLAS and, with the folder of an
                                                         installed vllm package, next to vLLM's
                                                         kernels on the same card in the same run

Weights are random and rotate beyond the cache; every result is checked against float64 before it is
timed. Ours and vLLM's take turns, a replay of one and then of the other, 15 times, and the median
of each counts: a warm card is slower, and neither side always finds it so.
"""

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from quantkit_kernels import BACKENDS, ExpertsBuilder, prefer, prepare
from quantkit_kernels.backends import choose, why_unusable
from quantkit_kernels.linear import Linear
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight
from quantkit_kernels.self_check import exact_experts, functions
from quantkit_kernels.sizes import EXPERTS, HIDDEN, R1_LINEARS, TOP_K
from quantkit_kernels.timing import (
    copies_beyond_cache,
    read_bandwidth,
    seconds_in_turns,
    seconds_per_call,
)
from quantkit_kernels.weights import kind, rows
from vllm_kernels import VllmKernels

ROWS = (1, 4, 16, 64)
SIDE = 4096
CUDA_EXPERTS = {"R1": (2048, 0), "R1 of 4": (512, 1)}
"""The intermediate size, and the shared experts run with the routed: a whole layer's routed
experts, and those of one rank of four."""
CUDA_GRIDS = {"W4A16": "int4-asym-128", "FP4": "fp4", "INT8": "int8"}
CUDA_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048, 4096)
BF16_ROWS = (1, 16, 64, 128, 512, 2048, 4096)
CUDA_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)
WARM_UP_SECONDS = 0.05


def cpu_table(dtypes: tuple[torch.dtype, ...], threads: int) -> None:
    """Milliseconds of every CPU backend for a 4096 x 4096 linear, and the ratio to torch's bfloat16
    linear."""
    device = torch.device("cpu")
    torch.set_num_threads(threads)
    rng = torch.Generator()
    rng.seed()
    machine = (
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, threads: {threads}"
    )
    print(f"{machine}, read bandwidth {read_bandwidth(device) / 1e9:.1f} GB/s")
    print(
        f"{'grid':<15}{'backend':<11}{'dtype':<10}{'MB':>7}"
        + "".join(f"{f'M={m} ms':>10}{'x bf16':>8}" for m in ROWS)
    )
    inputs = {m: torch.randn(m, SIDE, generator=rng) for m in ROWS}
    dense = [
        torch.randn(SIDE, SIDE, generator=rng).bfloat16()
        for _ in range(copies_beyond_cache(2 * SIDE * SIDE, device))
    ]
    bf16 = {}
    for m, full in inputs.items():
        x = full.bfloat16()
        bf16[m] = seconds_per_call([partial(F.linear, x, one) for one in dense], device)
    cells = "".join(f"{bf16[m] * 1e3:>10.3f}{1:>8.2f}" for m in ROWS)
    print(f"{'torch':<15}{'F.linear':<11}{'bfloat16':<10}{SIDE * SIDE * 2 / 1e6:>7.1f}{cells}")
    for grid in ("int4-asym-128", "int4-sym-128", "int8", "fp4", "dense"):
        weight = random_weight(grid, SIDE, SIDE, rng)
        for backend in BACKENDS:
            for dtype in dtypes:
                if (
                    why_unusable(f"linear_{kind(weight)}", backend, device, dtype, ((SIDE, SIDE),))
                    is not None
                ):
                    continue
                copies = twins(prepare(weight, backend=backend, dtype=dtype))
                cells = ""
                for m, full in inputs.items():
                    x = full.to(dtype)
                    error = distance(copies[0](x), exact_linear(x, weight))
                    assert error < TOLERANCE[dtype], (grid, backend, dtype, m, error)
                    seconds = seconds_per_call([partial(one, x) for one in copies], device)
                    cells += f"{seconds * 1e3:>10.3f}{bf16[m] / seconds:>8.2f}"
                print(
                    f"{grid:<15}{backend:<11}{str(dtype)[6:]:<10}{copies[0].nbytes / 1e6:>7.1f}{cells}",
                    flush=True,
                )


def twins(linear: Linear) -> list[Linear]:
    """With others whose tensors are copies of its own, enough to leave the cache between two uses.
    To pack each would take minutes."""
    found = [linear]
    for _ in range(copies_beyond_cache(linear.nbytes, linear.device) - 1):
        found.append(copy.copy(linear))
        vars(found[-1]).update(
            {
                name: value.clone()
                for name, value in vars(linear).items()
                if isinstance(value, torch.Tensor)
            }
        )
    return found


def cuda_tables(peer: VllmKernels | None) -> None:
    """R1's linears and routed experts on one card as Markdown: ours, the peer's next to them, and
    fractions of the read bandwidth."""
    device = torch.device("cuda")
    rng = torch.Generator(device)
    rng.seed()
    bandwidth = read_bandwidth(device)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read bandwidth "
        f"{bandwidth / 1e12:.2f} TB/s\n"
    )
    print("### Linears, us: ours / peer = ratio\n" if peer else "### Linears, us\n")
    print(
        header(
            "linear K -> N",
            "kind",
            *(f"M={m}" for m in CUDA_ROWS),
            "of read bandwidth, M=1",
            "error",
        )
    )
    for name, (n, k) in R1_LINEARS.items():
        for label, grid in CUDA_GRIDS.items():
            print(
                row(f"{name} {k} -> {n}", label, *linear_cells(grid, n, k, rng, bandwidth, peer)),
                flush=True,
            )
            torch.cuda.empty_cache()
    print("\n### cuBLAS in bfloat16, us\n")
    print(header("linear", *(f"M={m}" for m in BF16_ROWS)))
    for name, (n, k) in R1_LINEARS.items():
        weights = [
            torch.randn(n, k, generator=rng, device=device).bfloat16()
            for _ in range(copies_beyond_cache(2 * n * k, device))
        ]
        inputs = (torch.randn(m, k, generator=rng, device=device).bfloat16() for m in BF16_ROWS)
        print(
            row(
                name,
                *(
                    f"{seconds_per_call([partial(F.linear, x, one) for one in weights], device) * 1e6:.1f}"
                    for x in inputs
                ),
            )
        )
    print(f"\n### Routed experts: {EXPERTS}, top-{TOP_K}, hidden {HIDDEN}\n")
    print(header("layer", "kind", "", *(f"T={tokens}" for tokens in CUDA_TOKENS)))
    for name, (intermediate, shared) in CUDA_EXPERTS.items():
        for label, grid in CUDA_GRIDS.items():
            for line in experts_lines(
                grid, intermediate, shared, rng, bandwidth, None if shared else peer
            ):
                print(row(name, label, *line), flush=True)
            torch.cuda.empty_cache()
    print("\n### Operators without packed weights, as `check` times them\n")
    print(header("operator", "case", "us", "of read bandwidth", "error"))
    for one in functions(device, torch.bfloat16, rng, bandwidth):
        if one.backend != choose(one.operator, "auto", device):
            continue
        assert one.ok, one
        print(
            row(
                one.operator,
                one.case,
                f"{one.microseconds:.1f}",
                f"{one.fraction:.2f}" if one.fraction else "",
                f"{one.error:.1e}",
            )
        )


def linear_cells(
    grid: str, n: int, k: int, rng: torch.Generator, bandwidth: float, peer: VllmKernels | None
) -> list[str]:
    """A linear's times over CUDA_ROWS, the fraction of the read bandwidth with one token, and the
    largest error."""
    device, dtype = rng.device, torch.bfloat16
    weight = random_weight(grid, n, k, rng)
    first = prepare(weight, dtype=dtype)
    copies = [first] + [
        prepare(weight, dtype=dtype) for _ in range(copies_beyond_cache(first.nbytes, device) - 1)
    ]
    theirs = peer.linears(kind(weight), n, k) if peer else None
    cells, worst, times = [], 0.0, []
    for m in CUDA_ROWS:
        x = torch.randn(m, k, generator=rng, device=device).to(dtype)
        worst = max(worst, distance(first(x)[:, :256], exact_linear(x, rows(weight, 0, 256))))
        calls = [partial(one, x) for one in copies]
        warm_up(calls[0])
        both = seconds_in_turns([calls, theirs(x)] if theirs else [calls], device)
        times.append(both[0])
        cells.append(compared(*both))
    assert worst < TOLERANCE[dtype], (grid, n, k, worst)
    return [*cells, f"{first.nbytes / times[0] / bandwidth:.2f}", f"{worst:.1e}"]


def experts_lines(
    grid: str,
    intermediate: int,
    shared: int,
    rng: torch.Generator,
    bandwidth: float,
    peer: VllmKernels | None,
) -> list[list[str]]:
    """Experts over CUDA_TOKENS: times, fractions of the read bandwidth, the peer's times and the
    ratios.

    Random routing over 256 experts, and those every token asks for besides; layers in turn, so that
    no expert is still cached.
    """
    device, dtype = rng.device, torch.bfloat16
    shapes = ((intermediate, HIDDEN), (intermediate, HIDDEN), (HIDDEN, intermediate))
    few = [[random_weight(grid, n, k, rng) for n, k in shapes] for _ in range(4)]
    layers = []
    for _ in range(2 if shared else 1):
        builder = ExpertsBuilder(EXPERTS + shared, dtype=dtype, device=device)
        for index in range(EXPERTS + shared):
            builder.add(index, *few[index % 4])
        layers.append(builder.finish())
    theirs = (
        peer.experts(kind(few[0][0]), EXPERTS, HIDDEN, intermediate)
        if peer and grid != "int8"
        else None
    )
    times, fractions, peers, worst = [], [], [], 0.0
    for tokens in CUDA_TOKENS:
        x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
        always = torch.arange(EXPERTS, EXPERTS + shared, device=device).expand(tokens, shared)
        routed = [
            torch.rand(tokens, EXPERTS, generator=rng, device=device).topk(TOP_K, dim=-1).indices
            for _ in range(8)
        ]
        ids = [torch.cat([one, always], dim=1).int() for one in routed]
        weights = torch.rand(tokens, TOP_K + shared, generator=rng, device=device)
        worst = max(
            worst, distance(layers[0](x, ids[0], weights), exact_experts(x, ids[0], weights, few))
        )
        calls = [
            partial(layers[turn % len(layers)], x, one, weights) for turn, one in enumerate(ids)
        ]
        warm_up(calls[0])
        both = seconds_in_turns(
            [calls, [partial(theirs, x, one, weights) for one in ids]] if theirs else [calls],
            device,
        )
        times.append(both[0])
        peers += both[1:]
        distinct = sum(one.unique().numel() for one in ids) / len(ids)
        fractions.append(layers[0].nbytes * distinct / (EXPERTS + shared) / times[-1] / bandwidth)
    assert worst < 2e-2, (grid, worst)
    lines = [
        ["us", *(f"{one * 1e6:.0f}" for one in times)],
        ["of read bandwidth", *(f"{one:.2f}" for one in fractions)],
    ]
    if peers:
        lines += [["Marlin MoE, us", *(f"{one * 1e6:.0f}" for one in peers)]]
        lines += [
            ["ratio", *(f"{one / other:.2f}" for one, other in zip(times, peers, strict=True))]
        ]
    return lines


def warm_up(call: Callable[[], object]) -> None:
    """Clocks fall while weights are packed and results checked, and the first times after that
    would suffer."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        for _ in range(20):
            call()
        torch.cuda.synchronize()


def compared(ours: float, theirs: float | None = None) -> str:
    return f"{ours * 1e6:.1f}" + (f" / {theirs * 1e6:.1f} = {ours / theirs:.2f}" if theirs else "")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> str:
    return f"{row(*cells)}\n|{'---|' * len(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument(
        "--backend", default="auto", help="whose kernels are timed, where it has them"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PATH",
        help="folder of an installed vllm package, for its kernels next to ours",
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        prefer(arguments.backend, torch.device("cuda"))
        cuda_tables(VllmKernels(arguments.vllm) if arguments.vllm else None)
    else:
        cpu_table((torch.bfloat16, torch.float32), arguments.threads)


if __name__ == "__main__":
    main()
