"""Routed experts whose gate is clamped, shifted or biased: a loop over linears, as before November
27, beside Triton's kernels.

    python benchmarks/gated_experts.py [--users 1,8,32] [--grids fp4,int4-asym-32] [--out FILE.json]

One layer's experts of DeepSeek-V4-Flash's and gpt-oss-120b's shapes, random weights and choices,
bfloat16. Microseconds of one layer: graph replays, four choices of experts in turn, the median of
9; the loop 3 times. plain: the same by Triton's kernels with SiLU alone, no biases.
floor: reading the chosen experts at the measured bandwidth. Results are held against the loop's.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from command import measured, numbers, parser
from quantkit_kernels import ExpertBiases, Experts, ExpertsBuilder, Gating
from quantkit_kernels.backends import module, serving
from quantkit_kernels.gating import SILU
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.samples import distance, random_weight
from quantkit_kernels.timing import read_bandwidth
from quantkit_kernels.weights import kind

CHOICES, REPLAYS, SLOW_REPLAYS = 4, 9, 3


class Layer(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inner: int
    gating: Gating
    biased: bool


LAYERS = {
    "DeepSeek-V4-Flash": Layer(256, 6, 4096, 2048, Gating(limit=10.0), False),
    "gpt-oss-120b": Layer(128, 4, 2880, 2880, Gating(1.702, 7.0, 1.0), True),
}


class Made:
    """The experts of a layer, four in turns, by every side. plain: Triton's with SiLU alone."""

    def __init__(self, layer: Layer, grid: str, rng: torch.Generator) -> None:
        device, (count, _, hidden, inner, gating, biased) = rng.device, layer
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        few = [[random_weight(grid, n, k, rng) for n, k in sizes] for _ in range(4)]
        biases = [
            ExpertBiases(*(torch.randn(n, generator=rng, device=device) for n, _ in sizes))
            if biased
            else None
            for _ in range(4)
        ]
        of_kind = kind(few[0][0])
        served = serving(
            f"linear_{of_kind}",
            "auto",
            device,
            torch.bfloat16,
            ((2 * inner, hidden), (hidden, inner)),
        )
        loop = LoopLayout(count, module(served).linear, torch.bfloat16, device, served, gating)
        builder = ExpertsBuilder(count, device=device, gating=gating)
        plain = ExpertsBuilder(count, backend="triton", device=device)
        for index in range(count):
            one, bias = few[index % 4], biases[index % 4]
            loop.place(index, one[0], one[1], one[2], bias)
            builder.add(index, *one, biases=bias)
            plain.add(index, *one)
        self.sides: dict[str, Experts] = {
            "loop": loop.finish(),
            "now": builder.finish(),
            "plain": plain.finish(),
        }
        self.expert_bytes = self.sides["plain"].nbytes / count


def microseconds(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Of one of the calls, all captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[1:]) / len(calls) * 1e3


def row(
    made: Made, layer: Layer, users: int, bandwidth: float, rng: torch.Generator
) -> dict[str, Any]:
    x = torch.randn(users, layer.hidden, generator=rng, device=rng.device).bfloat16()
    scores = [
        torch.rand(users, layer.experts, generator=rng, device=rng.device) for _ in range(CHOICES)
    ]
    ids = [one.topk(layer.top_k, dim=-1).indices for one in scores]
    weights = torch.rand(users, layer.top_k, generator=rng, device=rng.device)
    loop, now = (made.sides[side](x, ids[0], weights) for side in ("loop", "now"))
    found: dict[str, Any] = {"users": users, "apart": distance(now, loop.double())}
    for side, experts in made.sides.items():
        calls = [partial(experts, x, one, weights) for one in ids]
        found[side] = (
            microseconds(calls[:1], SLOW_REPLAYS)
            if side == "loop"
            else microseconds(calls * 3, REPLAYS)
        )
    distinct = statistics.mean(one.unique().numel() for one in ids)
    return found | {"floor": distinct * made.expert_bytes / bandwidth * 1e6}


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    rng, bandwidth = torch.Generator(device).manual_seed(0), read_bandwidth(device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bandwidth": bandwidth,
        "rows": [],
    }
    for name, layer in LAYERS.items():
        assert layer.gating != SILU or layer.biased, name
        for grid in options.grids:
            made = Made(layer, grid, rng)
            print(
                name,
                grid,
                {side: f"{type(one).__name__} {one.backend}" for side, one in made.sides.items()},
                flush=True,
            )
            for users in options.users:
                found = {"layer": name, "grid": grid, **row(made, layer, users, bandwidth, rng)}
                report["rows"].append(found)
                times = ", ".join(f"{side} {found[side]:.1f}" for side in (*made.sides, "floor"))
                print(
                    f"{name} {grid}, {users} users, us: {times}; apart {found['apart']:.1e}",
                    flush=True,
                )
            del made
            torch.cuda.empty_cache()
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--users", type=numbers, default=[1, 8, 32])
    options.add_argument(
        "--grids", type=partial(str.split, sep=","), default=["fp4", "int4-asym-32"]
    )
    measured(run, options)


if __name__ == "__main__":
    main()
