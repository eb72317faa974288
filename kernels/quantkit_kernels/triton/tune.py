"""Measures plans of products on this card: a table as cards.py reads it. It takes minutes, and
nothing of it happens while a model runs.

Weight after weight: kernels of its candidates are compiled by several processes, measured, and the
best are on disk before the next, so that a run that is stopped keeps what it has. Times are of
graph replays over weights that rotate beyond the cache.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit_kernels.compiled import can_be_written
from quantkit_kernels.samples import random_weight
from quantkit_kernels.sizes import MEASURED, ExpertsSize, LinearSize, Products
from quantkit_kernels.timing import copies_beyond_cache, seconds_in_turns
from quantkit_kernels.triton.cards import (
    AnyPlan,
    ExpertsPlan,
    LinearPlan,
    NoTable,
    architecture,
    dense_plan,
    fitting,
    least_tokens,
    linear_plan,
    multiprocessors,
    plans_in,
    shared_bytes,
    stage_bytes,
)
from quantkit_kernels.triton.dense_plans import DenseRowsPlan
from quantkit_kernels.triton.layout import PackedSteps
from quantkit_kernels.triton.linear import TritonLinear
from quantkit_kernels.triton.tune_dense import tune_dense
from quantkit_kernels.triton.tune_experts import TOKENS as TOKENS_OF_EXPERTS
from quantkit_kernels.triton.tune_experts import (
    ExpertsCase,
    compile_experts,
    experts_of,
    grid_of,
    kernels_of_experts,
    tune_experts,
)
from quantkit_kernels.triton.wgmma_plans import WgmmaPlan, has_wgmma, wgmma_candidates

TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)
MORE_TOKENS = {"int8": (4096,)}
"""Of kinds that are never decoded for the vendor's library."""
Case = tuple[str, int, int, int]
"""Kind, N, K, tokens."""
Compilers = Callable[[Callable[[Any], None], Sequence[Any]], object]
"""Compiles each of several kernels, so that they lie in Triton's cache for this process."""


def candidates(name: str, processors: int, case: Case) -> list[AnyPlan]:
    """What is tried: the rule's plan first."""
    kind, n, k, tokens = case
    steps, found = -(-k // 128), list[AnyPlan]()
    ruled = linear_plan(name, processors, kind, n, k, tokens)
    if ruled is not None:
        found.append(ruled)
    width = max(16, min(256, 1 << (tokens - 1).bit_length()))
    if tokens <= 64:
        shapes, waves = (
            [(64, width, 4, 3), (64, width, 4, 5), (128, width, 4, 3), (128, width, 8, 3)],
            [1, 2, 4, 6],
        )
        if tokens <= 32:
            shapes += [
                (64, width, 2, 3),
                (64, width, 2, 4),
                (64, width, 2, 5),
                (64, width, 2, 6),
                (128, width, 4, 4),
            ]
            waves.append(12)
    else:
        shapes, waves = (
            [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 4)]
            + [(128, 256, 8, 3)] * (width == 256),
            [1, 2],
        )
    if tokens < least_tokens(name, kind) < width:
        shapes += [(128, 8, 4, 3), (128, 8, 4, 5), (64, 8, 2, 5)]
    for rows, wide, warps, stages in shapes:
        tiles = -(-n // rows) * -(-tokens // wide)
        for wave in waves:
            split = max(1, min(wave * processors // tiles, steps // 4, 16))
            plan = fitting(LinearPlan(rows, wide, split, warps, stages), kind, name)
            if plan not in found and stage_bytes(plan, kind) * plan.stages <= shared_bytes(name):
                found.append(plan)
    if kind == "int8" and has_wgmma(name, k):
        found += [plan for plan in wgmma_candidates(processors, n, k, tokens) if plan not in found]
    return found


def tune(
    kind: str, n: int, k: int, device: torch.device, compile_all: Compilers
) -> Iterator[tuple[int, list[tuple[float, AnyPlan | None]]]]:
    """Of every number of tokens the seconds of each candidate, the fastest first; None is
    expansion."""
    name, processors = architecture(device), multiprocessors(device)
    work = [
        (tokens, candidates(name, processors, (kind, n, k, tokens)))
        for tokens in (*TOKENS, *MORE_TOKENS.get(kind, ()))
    ]
    size = LinearSize(kind, n % 128, k % 128)
    compile_all(
        _compile,
        list(
            dict.fromkeys(
                (size, min(tokens, plan.tokens), plan) for tokens, plans in work for plan in plans
            )
        ),
    )
    rng = torch.Generator(device)
    copies = linears(kind, n, k, rng)
    for tokens, plans in work:
        x = torch.randn(tokens, k, generator=rng, device=device).bfloat16()
        sides: list[list[Callable[[], object]]] = [
            [partial(one.tiles, x, plan) for one in copies] for plan in plans
        ]
        options: list[AnyPlan | None] = [*plans]
        if kind != "int8" and tokens >= 256:
            sides.append([partial(one.expand, x) for one in copies])
            options.append(None)
        times = seconds_in_turns(sides, device)
        yield tokens, sorted(zip(times, options, strict=True), key=lambda one: one[0])


def linears(kind: str, n: int, k: int, rng: torch.Generator) -> list[TritonLinear]:
    """Copies enough to leave the cache between two uses."""
    weight = random_weight(grid_of(kind, k), n, k, rng)
    first = TritonLinear(weight, torch.bfloat16, rng.device)
    found = [first]
    for _ in range(copies_beyond_cache(first.nbytes, rng.device) - 1):
        copy = object.__new__(TritonLinear)
        vars(copy).update(vars(first))
        steps = first.packed.steps
        copy.packed = first.packed._replace(steps=PackedSteps(*(part.clone() for part in steps)))
        found.append(copy)
    return found


@contextmanager
def compilers() -> Iterator[Compilers]:
    """By several processes, each of which runs a kernel once."""
    count = max(1, len(os.sched_getaffinity(0)) - 2)
    # Who stops the command stops its first process, which ends the others: they need not say so one
    # by one.
    with multiprocessing.get_context("spawn").Pool(
        count, signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        yield partial(pool.map, chunksize=1)


def _compile(what: tuple[LinearSize, int, AnyPlan]) -> None:
    """On a weight of one tile and as many steps as it takes, and what the size is beyond whole
    ones."""
    (kind, n, k), tokens, plan = what
    n, k = n + 128, k + 128 * max(4, plan.split)
    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(0)
    linear = TritonLinear(random_weight(grid_of(kind, k), n, k, rng), torch.bfloat16, device)
    linear.tiles(torch.zeros(tokens, linear.in_features, dtype=torch.bfloat16, device=device), plan)
    torch.cuda.synchronize()


class TableFile:
    """A table on disk. Plans of a weight take the place of those that an earlier run measured;
    others stay.

    NoTable where there is something else, or nothing can be written.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._machine = (
            path,
            {"card": torch.cuda.get_device_name(device), "torch": torch.__version__},
        )
        self._plans: dict[str, list[list[Any]]] = plans_in(path) if os.path.exists(path) else {}
        if not can_be_written(path.parent):
            raise NoTable(f"{path.parent} cannot be written")
        path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, section: str, weight: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
        """rows: what follows the weight's kind and sizes in each of its rows."""
        others = [row for row in self._plans.get(section, []) if row[: len(weight)] != list(weight)]
        self._plans |= (
            {"linear": [], "experts": []}
            | self._plans
            | {section: others + [[*weight, *row] for row in rows]}
        )
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            whole = Path(folder) / self._path.name
            whole.write_text(json.dumps({**self._machine, "plans": self._plans}))
            whole.rename(self._path)


def write_table(device: torch.device, path: Path, products: Products = MEASURED) -> Iterator[str]:
    """Measures, and writes a table that cards.py reads, anew after every weight. Yields a line for
    every case."""
    table, name, processors = TableFile(path, device), architecture(device), multiprocessors(device)
    with compilers() as compile_all:
        for _, n, k in (size for size in products.linears if size.kind == "dense"):
            of_rows: list[list[object]] = []
            for count, choices in tune_dense(n, k, device, compile_all):
                fastest = choices[0][1]
                of_rows.append([count, list(astuple(fastest)) if fastest else [0] * 5])
                yield (
                    f"16 bits {n} x {k}, {count} rows: "
                    f"{description(choices, dense_plan(name, n, k, count), 'the library')}"
                )
            table.put("dense", (n, k), of_rows)
        for kind, n, k in (size for size in products.linears if size.kind != "dense"):
            rows: dict[str, list[list[object]]] = {"linear": [], "wgmma": []}
            for tokens, found in tune(kind, n, k, device, compile_all):
                for section, plan in best_of(found).items():
                    rows[section].append([tokens, plan])
                yield (
                    f"{kind} {n} x {k}, {tokens} tokens: "
                    f"{description(found, linear_plan(name, processors, kind, n, k, tokens))}"
                )
            table.put("linear", (kind, n, k), rows["linear"])
            if rows["wgmma"]:
                table.put("wgmma", (n, k), rows["wgmma"])
        for size in products.experts:
            layers = []
            for case, seconds, plans in tune_layer(size, device, compile_all):
                layers.append(
                    [round(case.pairs_per_expert * 256), *(list(astuple(one)) for one in plans)]
                )
                yield (
                    f"{size.kind} experts {size.hidden} x {size.intermediate}, {case.tokens} "
                    f"tokens: {seconds * 1e6:.1f} us, {plans}"
                )
            table.put("experts", size[:3], layers)


def description(
    found: Sequence[tuple[float, AnyPlan | DenseRowsPlan | None]],
    before: AnyPlan | DenseRowsPlan | None,
    without: str = "expanded",
) -> str:
    """The fastest of candidates, and what the plan took that was taken until now, where that is
    another. without: what no plan is."""
    seconds, best = found[0]
    line = f"{seconds * 1e6:.1f} us, {best or without}"
    taken = next((one for one, plan in found if plan == before), None)
    return (
        line
        if best == before or taken is None
        else f"{line}; until now {taken * 1e6:.1f} us, {before or without}"
    )


def best_of(found: Sequence[tuple[float, AnyPlan | None]]) -> dict[str, list[int]]:
    """Of candidates, the fastest first, what a table's sections are given. Zeros: expansion, or no
    plan by wgmma."""
    plain = next(plan for _, plan in found if not isinstance(plan, WgmmaPlan))
    chosen = {"linear": [*map(int, astuple(plain))] if plain else [0] * 5}
    if any(isinstance(plan, WgmmaPlan) for _, plan in found):
        first = found[0][1]
        chosen["wgmma"] = [*map(int, astuple(first))] if isinstance(first, WgmmaPlan) else [0] * 7
    return chosen


def tune_layer(
    size: ExpertsSize,
    device: torch.device,
    compile_all: Compilers,
    token_counts: Sequence[int] = TOKENS_OF_EXPERTS,
) -> Iterator[tuple[ExpertsCase, float, ExpertsPlan]]:
    """Of every number of tokens the seconds of the fastest plan of routed experts, and it."""
    cases = [ExpertsCase(size, count) for count in token_counts]
    compile_all(
        compile_experts, kernels_of_experts(architecture(device), multiprocessors(device), cases)
    )
    rng = torch.Generator(device)
    layer = experts_of(size, rng)
    for case in cases:
        seconds, plan = tune_experts(layer, case, rng)[0]
        yield case, seconds, plan
