"""16-bit linears of a decode step: a Triton kernel that begins while the launch before it ends, beside the vendor's library.

    python benchmarks/dense_rows.py [--rows 8,32,64] [--seconds 60] [--out FILE.json]

The four linears of a layer of Qwen3-8B. Each kernel's result is held against float64 first. Times are graph replays of chains, a norm and
a product over weights that rotate beyond the cache, the median of five; every plan of PLANS. Then whole layers without attention, both
sides in turns, by the fastest plans. Nothing of the executor takes this kernel yet; its figures of an H200 stand in
docs/lab/2026-11-28-beside-vllm-at-once.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from command import measured, numbers, parser
from quantkit_kernels import add_rms_norm, rms_norm, silu_and_mul
from quantkit_kernels.samples import TOLERANCE, distance
from quantkit_kernels.timing import copies_beyond_cache
from quantkit_kernels.triton.cards import multiprocessors, overlapped
from quantkit_kernels.workspace import workspace
from torch import Tensor

SIZES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FEWEST_STEPS, PROGRAMS = 4, (0.9, 3.2)
"""Steps along K of a program at least; programs a multiprocessor."""
LAYERS = 12


class RowsPlan(NamedTuple):
    """rows: of a tile. features: of a step along K. split: programs that share K. stages: steps of weights under way at once."""

    rows: int
    features: int
    split: int
    warps: int
    stages: int


PLANS = [
    RowsPlan(rows, features, split, warps, stages)
    for rows, features, warps, stages in ((64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 8, 3), (64, 256, 4, 3))
    for split in (1, 2, 3, 4, 6, 8)
]


def plans_of(processors: int, n: int, k: int) -> list[RowsPlan]:
    """Those that fill the card and leave each program some of K."""
    least, most = (processors * times for times in PROGRAMS)
    return [plan for plan in PLANS if least <= n // plan.rows * plan.split <= most and k // plan.features // plan.split >= FEWEST_STEPS]


def multiply(x: Tensor, weight: Tensor, plan: RowsPlan) -> Tensor:
    """x[M, K] @ weight[N, K].T -> [M, N], all in one 16-bit type; N a multiple of plan.rows, K of plan.features, M up to 64."""
    from dense_rows_kernel import multiply_dense

    (tokens, k), n = x.shape, weight.shape[0]
    tiles, width = n // plan.rows, max(16, 1 << (tokens - 1).bit_length())
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    partial, arrived = workspace(x.device, tiles * plan.split * plan.rows * width if plan.split > 1 else 0)
    multiply_dense[(tiles * plan.split,)](
        x, weight, y, partial, arrived, tokens, n, k,
        SPLIT=plan.split, BN=plan.rows, BK=plan.features, BM=width, STAGES=plan.stages, num_warps=plan.warps, **overlapped(x.device),
    )  # fmt: skip
    return y


def error(x: Tensor, weight: Tensor, plan: RowsPlan) -> float:
    """Distance from float64. Raises AssertionError beyond the tolerance of every other linear."""
    found = distance(multiply(x, weight, plan).cpu(), (x.double() @ weight.double().T).cpu())
    assert found < TOLERANCE[x.dtype], (plan, found)
    return found


def replayed_us(work: Callable[[], object]) -> float:
    """Of a replay of the captured work, the median of five, after one."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


class DenseLayers:
    """Weights of every size, as many as lie beyond the cache, and inputs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights = {name: [self._weight(n, k) for _ in range(copies_beyond_cache(2 * n * k, device))] for name, (n, k) in SIZES.items()}
        self.ones = torch.ones(max(k for _, k in SIZES.values()), dtype=torch.bfloat16, device=device)

    def _weight(self, n: int, k: int) -> Tensor:
        return (torch.randn(n, k, device=self.device) / k**0.5).bfloat16()

    def product_us(self, name: str, rows: int, plan: RowsPlan | None) -> float:
        """A norm and a product. plan: None for the vendor's library."""
        weights, k = self.weights[name], SIZES[name][1]
        x = torch.randn(rows, k, device=self.device).bfloat16()

        def chain() -> None:
            for weight in weights:
                self._product(rms_norm(x, self.ones[:k], 1e-6), weight, plan)

        return replayed_us(chain) / len(weights)

    def layer_us(self, rows: int, plans: dict[str, RowsPlan] | None) -> float:
        """Norms, four linears and SiLU, without attention."""
        first, ones = torch.randn(rows, 4096, device=self.device).bfloat16(), self.ones[:4096]

        def linear(name: str, layer: int, x: Tensor) -> Tensor:
            return self._product(x, self.weights[name][layer % len(self.weights[name])], plans and plans[name])

        def chain() -> None:
            x = first
            for layer in range(LAYERS):
                normed = rms_norm(x, ones, 1e-6)
                linear("qkv", layer, normed)
                normed, x = add_rms_norm(linear("o", layer, rms_norm(normed, ones, 1e-6)), x, ones, 1e-6)
                x = linear("down", layer, silu_and_mul(linear("gate_up", layer, normed)))

        return replayed_us(chain) / LAYERS

    def _product(self, x: Tensor, weight: Tensor, plan: RowsPlan | None) -> Tensor:
        return F.linear(x, weight) if plan is None else multiply(x, weight, plan)


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, until = torch.device("cuda"), time.monotonic() + options.seconds
    layers, found = DenseLayers(device), []
    for rows in options.rows:
        best: dict[str, RowsPlan] = {}
        for name, (n, k) in SIZES.items():
            if time.monotonic() > until:
                break
            x, times = torch.randn(rows, k, device=device).bfloat16(), {}
            for plan in plans_of(multiprocessors(device), n, k):
                error(x, layers.weights[name][0], plan)
                times[plan] = layers.product_us(name, rows, plan)
            best[name] = min(times, key=lambda plan: times[plan])
            row = {"rows": rows, "linear": name, "library_us": layers.product_us(name, rows, None), "us": times[best[name]]}
            found.append(row | {"plan": best[name]._asdict()})
            print(f"{rows} rows, {name} {n} x {k}: library {row['library_us']:.1f} us, ours {row['us']:.1f}, {best[name]}", flush=True)
        for _ in range(2 if len(best) == len(SIZES) else 0):
            sides = {"library_us": layers.layer_us(rows, None), "us": layers.layer_us(rows, best)}
            found.append({"rows": rows, "linear": "layer", **sides})
            print(f"{rows} rows, a layer: library {sides['library_us']:.1f} us, ours {sides['us']:.1f}", flush=True)
    return {"device": torch.cuda.get_device_name(), "rows": found}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--rows", type=numbers, default="8,32,64")
    options.add_argument("--seconds", type=float, default=60, help="after which no further linear is begun")
    measured(run, options)
