"""A whole decode step with Triton's kernels over the CUDA kernels', in turns in one process.

    python benchmarks/triton_steps.py [--models r1,qwen3-8b] [--grids int4-asym-128,int8] [--users
    1,8,32] [--context 640] [--layers 9]
        [--seconds 120] [--out FILE.json]

r1: so many layers of DeepSeek-R1 as one tensor-parallel rank of four holds them; qwen3-8b: all 36.
Made-up weights; the executor's own model, cache and captured step, the same weights and tokens for
all. device: milliseconds of a replay by the device's clock, the median of 31; wall: from one step's
tokens on the host to the next's, the median of 21. After --seconds no further step is begun.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from command import measured, numbers, parser
from published_sizes import QWEN3_8B
from quantkit_kernels import Weight, prefer
from quantkit_kernels.samples import random_weight
from r1_synthetic import R1, CountedExperts, SyntheticWeights, fill_cache

from quantkit.executor.cache.cache import BLOCK_SIZE, PagedCache
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graphs import DecodeSteps, DeviceCapture, compute
from quantkit.models import deepseek_v3, qwen3

BACKENDS = ("cuda", "triton")
REPLAYS, WALLS = 31, 21


class GridWeights(SyntheticWeights):
    """Made-up weights on any grid."""

    grid = "int4-asym-128"

    def _weight(self, n: int, k: int) -> Weight:
        if self.grid == "int4-asym-128":
            return self._int4(n, k)
        return random_weight(
            self.grid,
            n,
            k,
            torch.Generator(self.device).manual_seed(int(torch.randint(1 << 30, (1,)))),
        )


class Step:
    """A model of one backend and its captured step."""

    def __init__(
        self, model: str, grid: str, layers: int, backend: str, device: torch.device, tokens: int
    ) -> None:
        self.backend, self.device = backend, device
        prefer(backend, device)
        torch.manual_seed(0)  # the same weights of every backend
        if model == "r1":
            self.config: Any = deepseek_v3.Config.from_dict(R1 | {"num_hidden_layers": layers})
            self.weights = self._weights(grid, 4, device, deepseek_v3.parameters(self.config))
            self.model: Any = deepseek_v3.Model(self.config, self.weights)
            parts: tuple[int, ...] = ()
        else:
            self.config = qwen3.Config.from_dict(QWEN3_8B)
            self.weights = self._weights(grid, 1, device, qwen3.parameters(self.config))
            self.model = qwen3.Model(self.config, self.weights)
            parts = (self.config.cache_width // 2,) * 2
        width, blocks = self.config.cache_width, -(-tokens // BLOCK_SIZE) + 1
        count, dtype = self.config.num_hidden_layers + 1, torch.bfloat16
        self.cache = PagedCache(
            count, blocks, width, block_size=BLOCK_SIZE, dtype=dtype, device=device, parts=parts
        )
        fill_cache(self.cache)
        capture = DeviceCapture(device) if device.type == "cuda" else lambda step, lengths: step
        self.steps = DecodeSteps(self.model, self.cache, capture)
        self.backends = {part: ops[0].backend for part, ops in self.weights.linears.items()}
        if self.weights.moe:
            self.backends["experts"] = self.weights.moe[0].backend

    def _weights(self, grid: str, ranks: int, device: torch.device, rows: Any) -> GridWeights:
        weights = GridWeights(self.config, ranks, device, rows)
        weights.grid = grid
        return weights

    def rows(self, token_ids: list[int], position: int, room: int) -> DecodeRows:
        count, per_row = len(token_ids), -(-room // BLOCK_SIZE)
        tables = (1 + np.arange(count * per_row, dtype=np.int32)).reshape(count, per_row)
        positions = np.full(count, position)
        slots = (
            tables[np.arange(count), positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + positions % BLOCK_SIZE
        )
        return DecodeRows(np.array(token_ids), positions, slots, tables)

    def replay(self, users: int, context: int) -> Callable[[], object]:
        prefer(self.backend, self.device)  # norms, attention and routing are found at the call
        _, step = self.steps.prepare(
            self.rows(self.first_tokens(users), context, context + WALLS + 2)
        )
        return step

    def distinct_experts(self, users: int, context: int) -> float:
        """Of an average layer, in a step of random tokens."""
        buffers, _ = self.steps.prepare(
            self.rows(self.first_tokens(users), context, context + WALLS + 2)
        )
        CountedExperts.distinct = []
        compute(self.model, buffers.inputs, buffers.context(self.cache))
        counts, CountedExperts.distinct = CountedExperts.distinct, None
        return statistics.mean(counts or [0])

    def first_tokens(self, users: int) -> list[int]:
        """The same of every backend, so that the same experts are asked for."""
        return torch.randint(
            0, self.config.vocab_size, (users,), generator=torch.Generator().manual_seed(users)
        ).tolist()

    def wall_ms(self, users: int, context: int) -> float:
        prefer(self.backend, self.device)
        tokens, times = self.first_tokens(users), []
        for step in range(WALLS + 1):
            began = time.perf_counter()
            tokens = self.steps.run(
                self.rows(tokens, context + step, context + WALLS + 2)
            ).greedy.tolist()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:]) * 1e3


def replay_ms(step: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def row(sides: dict[str, Step], users: int, context: int, device: torch.device) -> dict[str, Any]:
    """The first step captures, and compiles what is to be compiled."""
    walls = {name: side.wall_ms(users, context) for name, side in sides.items()}
    distinct = {name: side.distinct_experts(users, context) for name, side in sides.items()}
    steps = {name: side.replay(users, context) for name, side in sides.items()}
    turns: list[dict[str, float]] = []
    for turn in range(REPLAYS + 2):
        order = list(steps) if turn % 2 else list(steps)[::-1]
        turns.append({name: replay_ms(steps[name], device) for name in order})
    found = {name: statistics.median(one[name] for one in turns[2:]) for name in steps}
    why = [side.steps.failure for side in sides.values()]
    return {
        "users": users,
        "context": context,
        "device_ms": found,
        "wall_ms": walls,
        "distinct_experts": distinct,
        "why_eager": why,
    }


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    began, device = time.monotonic(), torch.device(options.device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    report["rows"] = []
    tokens = max(options.users) * (options.context + WALLS + 2 + BLOCK_SIZE)
    for model in options.models:
        for grid in options.grids:
            if time.monotonic() - began > options.seconds:
                break
            sides = {
                name: Step(model, grid, options.layers, name, device, tokens)
                for name in options.backends
            }
            print(
                f"{time.monotonic() - began:.0f} s: {model} {grid}",
                {name: side.backends for name, side in sides.items()},
                flush=True,
            )
            for users in options.users:
                found = {"model": model, "grid": grid, **row(sides, users, options.context, device)}
                times = found["device_ms"]
                found["ratio"] = times[options.backends[-1]] / times[options.backends[0]]
                report["rows"].append(found)
                walls = {name: round(ms, 3) for name, ms in found["wall_ms"].items()}
                shown = {name: round(ms, 3) for name, ms in times.items()}
                told = (
                    f"{model} {grid}, {users} users: {shown} ratio {found['ratio']:.3f}, wall "
                    f"{walls}"
                )
                print(told, found["distinct_experts"], found["why_eager"], flush=True)
            del sides
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return report


def main() -> None:
    options = parser(__doc__)

    def names(text: str) -> list[str]:
        return text.split(",")

    options.add_argument("--models", type=names, default=["r1", "qwen3-8b"])
    options.add_argument("--grids", type=names, default=["int4-asym-128", "int8"])
    options.add_argument("--backends", type=names, default=list(BACKENDS))
    options.add_argument("--users", type=numbers, default=[1, 8, 32])
    options.add_argument("--context", type=int, default=640)
    options.add_argument("--layers", type=int, default=9)
    options.add_argument("--seconds", type=float, default=120.0)
    options.add_argument("--device", default="cuda")
    measured(run, options)


if __name__ == "__main__":
    main()
