"""Measure which kernel and grid every product is fastest with, and print plans.json of the CUDA
backend.

    python kernels/tune.py > kernels/quantkit_kernels/cuda/plans.json        on an H200, about six minutes

Linears and experts of DeepSeek-R1 (hidden 7168) and openPangu-Ultra-MoE (7680), whole and as a
quarter of them. Times are as in
bench.py: graph replay over weights that rotate beyond the cache.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from quantkit_kernels import ExpertsBuilder
from quantkit_kernels.cuda.experts.experts import CudaExperts
from quantkit_kernels.cuda.linears.linear import CudaLinear
from quantkit_kernels.cuda.linears.tiles import SHARE_ROWS
from quantkit_kernels.cuda.plans import (
    AnyPlan,
    ExpandPlan,
    TileAndSharePlan,
    TilePerBlockPlan,
    TokensInRegistersPlan,
    TokensInSharedPlan,
    persistent_tiles_plans,
    tokens_in_shared_plans,
    written,
)
from quantkit_kernels.samples import random_weight
from quantkit_kernels.sizes import EXPERTS, TOP_K
from quantkit_kernels.timing import copies_beyond_cache, seconds_per_call
from quantkit_kernels.weights import kind

GRIDS = ("fp4", "int4-asym-128", "int8")
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
EXPERTS_TOKENS = (1, 4, 16, 64)  # of INT8
TILES = ((32, 2), (32, 4), (64, 2), (64, 4), (128, 2), (128, 3), (256, 2))
MULTIPROCESSORS = 132
BLOCKS = 2 * MULTIPROCESSORS  # more of a split K only wait for one another
WARM_UP_SECONDS = 0.3


def linear_shapes(hidden: int) -> list[tuple[int, int]]:
    """[N, K] of q_a + kv_a, q_b, o, the shared expert's and the dense layers' gate_up and down,
    then of a rank of four."""
    whole = [
        (2112, hidden),
        (24576, 1536),
        (hidden, 16384),
        (4096, hidden),
        (hidden, 2048),
        (36864, hidden),
        (hidden, 18432),
    ]
    return [
        *whole,
        (6144, 1536),
        (hidden, 4096),
        (1024, hidden),
        (hidden, 512),
        (9216, hidden),
        (hidden, 4608),
    ]


def tokens_in_registers_plans(rows: int, k: int, tokens: int) -> Iterator[TokensInRegistersPlan]:
    token_tiles = 1 if tokens <= 8 else 2
    for row_tiles in (2, 4):
        for wn in (1, 2, 4):
            for split in (1, 2, 4):
                for bulk in (True,) if token_tiles > 1 else (False, True):
                    blocks = rows // (16 * row_tiles * wn)
                    if (
                        rows % (16 * row_tiles * wn) == 0
                        and split <= k // 128
                        and (split == 1 or blocks * split <= BLOCKS)
                    ):
                        yield TokensInRegistersPlan(token_tiles, row_tiles, wn, split, bulk)


def tile_and_share_plans(rows: int, k: int, tokens: int) -> Iterator[TileAndSharePlan]:
    """Where there are more tiles than multiprocessors, but not twice as many."""
    if (
        tokens in (32, 64)
        and MULTIPROCESSORS < -(-rows // SHARE_ROWS) < 2 * MULTIPROCESSORS
        and k >= 1024
    ):
        yield TileAndSharePlan(tokens, MULTIPROCESSORS)


def tile_per_block_plans(rows: int, k: int, tokens: int) -> Iterator[TilePerBlockPlan]:
    for tile, warpgroups in TILES:
        if not tokens / 8 <= tile < 2 * max(tokens, TILES[0][0]):
            continue
        for split in range(1, min(8, k // 128) + 1):
            blocks = -(-rows // (64 * warpgroups)) * -(-tokens // tile)
            if split == 1 or blocks * split <= BLOCKS:
                yield TilePerBlockPlan(tile, warpgroups, split)


def fastest(
    calls: dict[AnyPlan, list[Callable[[], object]]], device: torch.device
) -> tuple[AnyPlan, float]:
    times = {plan: seconds_per_call(variants, device) for plan, variants in calls.items()}
    best = min(times, key=lambda plan: times[plan])
    return best, times[best]


def warm_up(call: Callable[[], object]) -> None:
    """Clocks fall while weights are packed, and the first plans to be timed would suffer."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        for _ in range(100):
            call()
        torch.cuda.synchronize()


def linear_rows(
    grid: str,
    n: int,
    k: int,
    token_counts: Sequence[int],
    device: torch.device,
    rng: torch.Generator,
) -> Iterator[list[object]]:
    weight = random_weight(grid, n, k, rng)
    first = CudaLinear(weight, torch.bfloat16, device)
    copies = [first] + [
        CudaLinear(weight, torch.bfloat16, device)
        for _ in range(copies_beyond_cache(first.nbytes, device) - 1)
    ]
    warm_up(partial(first, torch.randn(16, k, generator=rng, device=device).bfloat16()))
    for tokens in token_counts:
        x = torch.randn(tokens, k, generator=rng, device=device).bfloat16()
        calls: dict[AnyPlan, list[Callable[[], object]]] = {}
        if tokens <= 16:
            streams: list[TokensInRegistersPlan | TokensInSharedPlan] = [
                *tokens_in_registers_plans(first.padded, k, tokens)
            ]
            if grid != "int8":
                streams += tokens_in_shared_plans(first.padded, k, tokens)
            for stream in streams:
                calls[stream] = [partial(one.few_tokens, x, stream) for one in copies]
        if tokens > 8:
            tiles: list[TilePerBlockPlan | TileAndSharePlan] = [
                *tile_per_block_plans(first.padded, k, tokens)
            ]
            if grid != "int8":
                tiles += tile_and_share_plans(first.padded, k, tokens)
            for tile in tiles:
                calls[tile] = [partial(one.tiles, x, tile) for one in copies]
            if grid == "int8":
                for persistent in persistent_tiles_plans(tokens):
                    calls[persistent] = [partial(one.tiles, x, persistent) for one in copies]
            elif tokens >= 256:
                calls[ExpandPlan()] = [partial(one.expand, x) for one in copies]
        plan, seconds = fastest(calls, device)
        print(
            f"{grid} {n} x {k} M={tokens} {seconds * 1e6:.1f} us {plan}",
            file=sys.stderr,
            flush=True,
        )
        yield [kind(weight), first.padded, k, tokens, [written(plan)]]


def experts_rows(
    hidden: int, intermediate: int, device: torch.device, rng: torch.Generator
) -> Iterator[list[object]]:
    """Of INT8: gate_up's plan is chosen first, next to a usual plan for down; then down's, next to
    the one that was chosen."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    few = [[random_weight("int8", n, k, rng) for n, k in shapes] for _ in range(2)]
    builder = ExpertsBuilder(EXPERTS, dtype=torch.bfloat16, device=device)
    for index in range(EXPERTS):
        builder.add(index, *few[index % 2])
    experts = builder.finish()
    assert isinstance(experts, CudaExperts)
    for tokens in EXPERTS_TOKENS:
        x = torch.randn(tokens, hidden, generator=rng, device=device).bfloat16()
        ids = [
            torch.rand(tokens, EXPERTS, generator=rng, device=device).topk(TOP_K, dim=-1).indices
            for _ in range(4)
        ]
        weights = torch.rand(tokens, TOP_K, generator=rng, device=device)
        chosen = [TokensInRegistersPlan(1, 4, 1, 1, True), TokensInRegistersPlan(1, 4, 1, 1, True)]
        for place, (rows, k) in enumerate(((2 * intermediate, hidden), (hidden, intermediate))):
            times = {}
            for plan in tokens_in_registers_plans(rows, k, 8):
                if plan.split == 1:
                    plans = (plan, chosen[1]) if place == 0 else (chosen[0], plan)
                    times[plan] = seconds_per_call(
                        [partial(experts.two_products, x, one, weights, plans) for one in ids],
                        device,
                    )
            chosen[place] = min(times, key=lambda plan: times[plan])
        print(
            f"int8 experts {hidden} x {intermediate} T={tokens} {min(times.values()) * 1e6:.1f} us",
            file=sys.stderr,
            flush=True,
        )
        yield ["int8", hidden, intermediate, tokens, [written(plan) for plan in chosen]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 7680])
    parser.add_argument(
        "--tables", nargs="+", choices=("linear", "experts"), default=["linear", "experts"]
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of the linears")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rng = torch.Generator(device)
    rng.seed()
    tables: dict[str, list[list[object]]] = {}
    for table in arguments.tables:
        rows = tables[table] = []
        if table == "experts":
            for hidden, intermediate in itertools.product(arguments.hidden, (512, 2048)):
                rows += experts_rows(hidden, intermediate, device, rng)
            continue
        for grid in GRIDS:
            for n, k in sorted(
                {shape for hidden in arguments.hidden for shape in linear_shapes(hidden)}
            ):
                rows += linear_rows(grid, n, k, arguments.tokens, device, rng)
            torch.cuda.empty_cache()
    lines = {
        name: ",\n".join(f"  {json.dumps(row)}" for row in rows) for name, rows in tables.items()
    }
    print("{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in lines.items()) + "\n}")


if __name__ == "__main__":
    main()
