"""Measures plans of routed experts on this card, of both products one after the other. `tune.py`
measures linears and writes the table."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from quantkit_kernels.samples import random_weight
from quantkit_kernels.sizes import ExpertsSize
from quantkit_kernels.timing import seconds_in_turns
from quantkit_kernels.triton.cards import (
    ExpertsPlan,
    LinearPlan,
    architecture,
    experts_plan,
    experts_split,
    least_tokens,
    shared_bytes,
    stage_bytes,
)
from quantkit_kernels.triton.experts import TritonExperts, TritonExpertsLayout

TOKENS = (1, 8, 64, 256, 512, 1024)
_CHOICES = 3
"""Choices of experts that take turns."""


class ExpertsCase(NamedTuple):
    """Experts and tokens."""

    size: ExpertsSize
    tokens: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.size.top_k

    @property
    def pairs_per_expert(self) -> float:
        return self.pairs / self.size.experts


def grid_of(kind: str, k: int) -> str:
    """A grid of this kind for input features in k, its groups as long as they can be."""
    return (
        kind
        if kind != "int4"
        else f"int4-asym-{next(group for group in (128, 64, 32) if k % group == 0)}"
    )


def candidates(name: str, case: ExpertsCase) -> list[ExpertsPlan]:
    """The rule's plan, and of every width of a tile all launches of the first product."""
    kind, hidden, intermediate, *_ = case.size
    found = [experts_plan(name, kind, intermediate, hidden, case.pairs_per_expert)]
    for width in _widths(least_tokens(name, kind), case.pairs_per_expert):
        firsts, seconds = (_launches(name, kind, width, doubled) for doubled in (True, False))
        found += [ExpertsPlan(first, seconds[0]) for first in firsts]
    return list(dict.fromkeys(found))


def followers(name: str, case: ExpertsCase, best: ExpertsPlan) -> list[ExpertsPlan]:
    """The best first product with every launch of the second."""
    return [
        best,
        *(
            ExpertsPlan(best.gate_up, down)
            for down in _launches(name, case.size.kind, best.down.tokens, False)
            if down != best.down
        ),
    ]


def _widths(least: int, pairs_per_expert: float) -> tuple[int, ...]:
    if pairs_per_expert <= 4:
        return (least,) if pairs_per_expert <= 0.5 else tuple(dict.fromkeys((least, 16)))
    return (16, 32) if pairs_per_expert <= 16 else (32, 64) if pairs_per_expert <= 48 else (64, 128)


def _launches(name: str, kind: str, width: int, doubled: bool) -> list[LinearPlan]:
    if width <= 32:
        shapes = [
            (64, 4, 4),
            (64, 4, 3),
            (64, 2, 4),
            (64, 2, 3),
            (64, 2, 5),
            (64, 2, 6),
            (32, 1, 4),
            (32, 1, 6),
            (32, 2, 4),
            (128, 4, 3),
            (128, 4, 4),
        ]
    else:
        shapes = [(64, 4, 4), (64, 4, 3), (128, 8, 3), (128, 4, 3), (128, 8, 2), (128, 8, 4)]
    plans = [LinearPlan(rows, width, 1, warps, stages) for rows, warps, stages in shapes]
    return [
        plan
        for plan in plans
        if stage_bytes(plan, kind, doubled) * plan.stages <= shared_bytes(name)
    ]


def tune_experts(
    experts: TritonExperts, case: ExpertsCase, rng: torch.Generator
) -> list[tuple[float, ExpertsPlan]]:
    """The seconds of each plan that was tried, the fastest first."""
    name, device = architecture(experts.device), experts.device
    count, top_k = case.size.experts, case.size.top_k
    x = torch.randn(case.tokens, case.size.hidden, generator=rng, device=device).bfloat16()
    choices = [
        torch.rand(case.tokens, count, generator=rng, device=device).topk(top_k, dim=-1).indices
        for _ in range(_CHOICES)
    ]
    weights = torch.rand(case.tokens, top_k, generator=rng, device=device)

    def measured(plans: Sequence[ExpertsPlan]) -> list[tuple[float, ExpertsPlan]]:
        sides: list[list[Callable[[], object]]] = [
            [partial(experts.by_plan, x, ids, weights, plan) for ids in choices] for plan in plans
        ]
        return sorted(
            zip(seconds_in_turns(sides, device), plans, strict=True), key=lambda one: one[0]
        )

    first = measured(candidates(name, case))
    return measured(followers(name, case, first[0][1]))


Kernels = tuple[ExpertsSize, ExpertsPlan, int, int]
"""Sizes, a plan, how many programs share K of gate and up, and tokens: one, whose pairs are not
sorted, or two for any number."""


def kernels_of_experts(name: str, processors: int, cases: Sequence[ExpertsCase]) -> list[Kernels]:
    """What the candidates of all cases are compiled to."""
    found: dict[Kernels, None] = {}
    for case in cases:
        size, pairs = case.size, case.pairs
        for plan in candidates(name, case):
            for one in (plan, *followers(name, case, plan)):
                tiles = min(pairs, size.experts) + pairs // one.down.tokens
                split = experts_split(
                    one.gate_up, processors, size.intermediate, size.hidden, tiles
                )
                found[size, one, split, min(case.tokens, 2)] = None
    # Each product once is enough.
    firsts: dict[tuple[ExpertsSize, LinearPlan, int, int], Kernels] = {}
    seconds: dict[tuple[ExpertsSize, LinearPlan, int], Kernels] = {}
    for size, plan, split, tokens in found:
        firsts.setdefault((size, plan.gate_up, split, tokens), (size, plan, split, tokens))
        seconds.setdefault((size, plan.down, tokens), (size, plan, split, tokens))
    return list(dict.fromkeys([*firsts.values(), *seconds.values()]))


def compile_experts(kernels: Kernels) -> None:
    """By running them once, on two experts of few tiles and steps, whole or not as those of these
    sizes are."""
    size, plan, split, tokens = kernels
    least = size._replace(
        hidden=128 * 8 + size.hidden % 128, intermediate=128 + size.intermediate % 128, experts=2
    )
    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(0)
    layer = experts_of(least, rng)
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    x = torch.zeros(tokens, layer.hidden, dtype=torch.bfloat16, device=device)
    layer.by_plan(x, ids, torch.ones(tokens, 1, device=device), plan, split)
    torch.cuda.synchronize()


def experts_of(size: ExpertsSize, rng: torch.Generator) -> TritonExperts:
    """A layer of experts that are all the same."""
    kind, hidden, intermediate, count, _ = size
    grid = grid_of(kind, math.gcd(hidden, intermediate))
    weights = [
        random_weight(grid, n, k, rng)
        for n, k in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    ]
    layout = TritonExpertsLayout(count, weights[0], torch.bfloat16, rng.device)
    for index in range(count):
        layout.place(index, weights[0], weights[1], weights[2])
    return layout.finish()
