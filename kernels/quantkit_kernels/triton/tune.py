"""Measures plans of products on this card: a table as cards.py reads it. It takes minutes, and nothing of it happens while a model runs.

Kernels of the candidates are compiled by several processes first. Times are of graph replays over weights that rotate beyond the cache.
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from quantkit_kernels.samples import random_weight
from quantkit_kernels.timing import copies_beyond_cache, seconds_in_turns
from quantkit_kernels.triton.cards import (
    ExpertsPlan,
    LinearPlan,
    architecture,
    fitting,
    linear_plan,
    multiprocessors,
    shared_bytes,
    stage_bytes,
)
from quantkit_kernels.triton.layout import PackedSteps
from quantkit_kernels.triton.linear import TritonLinear
from quantkit_kernels.triton.tune_experts import GRIDS, ExpertsCase, compile_experts, experts_of, kernels_of_experts, tune_experts
from quantkit_kernels.triton.tune_experts import TOKENS as TOKENS_OF_EXPERTS

TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)
Case = tuple[str, int, int, int]
"""Kind, N, K, tokens."""


def candidates(name: str, processors: int, case: Case) -> list[LinearPlan]:
    """What is tried: the rule's plan first."""
    kind, n, k, tokens = case
    steps, found = -(-k // 128), []
    ruled = linear_plan(name, processors, kind, n, k, tokens)
    if ruled is not None:
        found.append(ruled)
    width = max(16, min(256, 1 << (tokens - 1).bit_length()))
    if tokens <= 64:
        shapes, waves = [(64, width, 4, 3), (128, width, 4, 3), (128, width, 8, 3)], [1, 2, 4, 6]
        shapes += [(64, width, 2, 3), (64, width, 2, 4)] * (tokens <= 32)
    else:
        shapes, waves = [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 4)] + [(128, 256, 8, 3)] * (width == 256), [1, 2]
    for rows, wide, warps, stages in shapes:
        tiles = -(-n // rows) * -(-tokens // wide)
        for wave in waves:
            split = max(1, min(wave * processors // tiles, steps // 4, 16))
            plan = fitting(LinearPlan(rows, wide, split, warps, stages), kind, name)
            if plan not in found and stage_bytes(plan, kind) * plan.stages <= shared_bytes(name):
                found.append(plan)
    return found


def tune(
    cases: Sequence[Case], device: torch.device, processes: int | None = None
) -> Iterator[tuple[Case, list[tuple[float, LinearPlan | None]]]]:
    """Of every case the seconds of each candidate, the fastest first; None is expansion."""
    name, processors = architecture(device), multiprocessors(device)
    work = [(case, candidates(name, processors, case)) for case in cases]
    compile_ahead([(case[0], case[3], plan) for case, plans in work for plan in plans], processes)
    rng = torch.Generator(device)
    copies: list[TritonLinear] = []
    of: tuple[str, int, int] | None = None
    for case, plans in work:
        kind, n, k, tokens = case
        if of != (kind, n, k):
            copies, of = linears(kind, n, k, rng), (kind, n, k)
        x = torch.randn(tokens, k, generator=rng, device=device).bfloat16()
        sides: list[list[Callable[[], object]]] = [[partial(one.tiles, x, plan) for one in copies] for plan in plans]
        options: list[LinearPlan | None] = [*plans]
        if kind != "int8" and tokens >= 256:
            sides.append([partial(one.expand, x) for one in copies])
            options.append(None)
        times = seconds_in_turns(sides, device)
        yield case, sorted(zip(times, options, strict=True), key=lambda one: one[0])


def linears(kind: str, n: int, k: int, rng: torch.Generator) -> list[TritonLinear]:
    """Copies enough to leave the cache between two uses."""
    weight = random_weight(GRIDS[kind], n, k, rng)
    first = TritonLinear(weight, torch.bfloat16, rng.device)
    found = [first]
    for _ in range(copies_beyond_cache(first.nbytes, rng.device) - 1):
        copy = object.__new__(TritonLinear)
        vars(copy).update(vars(first))
        steps = first.packed.steps
        copy.packed = first.packed._replace(steps=PackedSteps(*(part.clone() for part in steps)))
        found.append(copy)
    return found


def compile_ahead(kernels: Sequence[tuple[str, int, LinearPlan]], processes: int | None) -> None:
    """By running each once, on a weight of one tile and as many steps as it takes."""
    in_processes(_compile, list(dict.fromkeys((kind, min(tokens, plan.tokens), plan) for kind, tokens, plan in kernels)), processes)


def in_processes(compile_one: Callable[[Any], None], work: Sequence[object], processes: int | None = None) -> None:
    """Kernels that several processes compile lie in Triton's cache for this one."""
    count = min(processes or max(1, (os.cpu_count() or 2) - 2), len(work))
    if count <= 1:
        return
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(compile_one, work, chunksize=1)


def _compile(what: tuple[str, int, LinearPlan]) -> None:
    kind, tokens, plan = what
    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(0)
    linear = TritonLinear(random_weight(GRIDS[kind], 128, 128 * max(4, plan.split), rng), torch.bfloat16, device)
    linear.tiles(torch.zeros(tokens, linear.in_features, dtype=torch.bfloat16, device=device), plan)
    torch.cuda.synchronize()


LINEARS = (
    *((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168), (7168, 18432)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    *((6144, 1536), (7168, 4096), (9216, 7168), (7168, 4608)),
)
"""N and K of DeepSeek-R1's linears, of Qwen3-8B's, and of those of R1 that one rank of four has a part of."""


EXPERTS = ((7168, 2048), (7168, 512))
"""Hidden and intermediate size of DeepSeek-R1's experts, whole and of one rank of four."""


def write_table(
    device: torch.device,
    path: Path,
    kinds: Sequence[str] = tuple(GRIDS),
    linears: Sequence[tuple[int, int]] = LINEARS,
    experts: Sequence[tuple[int, int]] = EXPERTS,
) -> Iterator[str]:
    """Measures, and writes a table that cards.py reads. Yields a line for every case."""
    cases = [(kind, n, k, tokens) for kind in kinds for n, k in linears for tokens in TOKENS]
    rows: dict[str, list[list[object]]] = {"linear": [], "experts": []}
    for (kind, n, k, tokens), found in tune(cases, device):
        seconds, plan = found[0]
        rows["linear"].append([kind, n, k, tokens, list(astuple(plan)) if plan else [0] * 5])
        yield f"{kind} {n} x {k}, {tokens} tokens: {seconds * 1e6:.1f} us, {plan or 'expanded'}"
    for case, seconds, plans in tune_layers(kinds, experts, device):
        rows["experts"].append([*case[:3], round(case.pairs_per_expert * 256), *(list(astuple(one)) for one in plans)])
        yield f"{case.kind} experts {case.hidden} x {case.intermediate}, {case.tokens} tokens: {seconds * 1e6:.1f} us, {plans}"
    table = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__, "plans": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(table, file)
    Path(file.name).rename(path)


def tune_layers(
    kinds: Sequence[str], sizes: Sequence[tuple[int, int]], device: torch.device, tokens: Sequence[int] = TOKENS_OF_EXPERTS
) -> Iterator[tuple[ExpertsCase, float, ExpertsPlan]]:
    """Of every case of routed experts the seconds of the fastest plan, and it."""
    cases = [ExpertsCase(kind, *one, count) for kind in kinds for one in sizes for count in tokens]
    name, processors = architecture(device), multiprocessors(device)
    in_processes(compile_experts, kernels_of_experts(name, processors, cases))
    rng = torch.Generator(device)
    for (kind, hidden, intermediate), some in groupby(cases, key=lambda case: case[:3]):
        layer = experts_of(GRIDS[kind], hidden, intermediate, rng)
        for case in some:
            seconds, plan = tune_experts(layer, case, rng)[0]
            yield case, seconds, plan
        del layer
