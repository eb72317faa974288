"""Measures plans of routed experts on this card, of both products one after the other. `tune.py` measures linears and writes the table."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from quantkit_kernels.samples import random_weight
from quantkit_kernels.timing import seconds_in_turns
from quantkit_kernels.triton.cards import (
    ExpertsPlan,
    LinearPlan,
    architecture,
    experts_plan,
    experts_split,
    shared_bytes,
    stage_bytes,
)
from quantkit_kernels.triton.experts import TritonExperts, TritonExpertsLayout

GRIDS = {"int4": "int4-asym-128", "fp4": "fp4", "int8": "int8"}
TOP_K, EXPERTS = 8, 256
TOKENS = (1, 8, 64, 256, 512, 1024)
"""Of which each gives a token 8 of 256 experts."""
_CHOICES = 3
"""Choices of experts that take turns."""


class ExpertsCase(NamedTuple):
    """Experts [hidden, intermediate] of a kind, and tokens."""

    kind: str
    hidden: int
    intermediate: int
    tokens: int

    @property
    def pairs_per_expert(self) -> float:
        return self.tokens * TOP_K / EXPERTS


def candidates(name: str, case: ExpertsCase) -> list[ExpertsPlan]:
    """The rule's plan, and of every width of a tile all launches of the first product."""
    found = [experts_plan(name, case.kind, case.intermediate, case.hidden, case.pairs_per_expert)]
    for width in _widths(case.pairs_per_expert):
        firsts, seconds = (_launches(name, case.kind, width, doubled) for doubled in (True, False))
        found += [ExpertsPlan(first, seconds[0]) for first in firsts]
    return list(dict.fromkeys(found))


def followers(name: str, case: ExpertsCase, best: ExpertsPlan) -> list[ExpertsPlan]:
    """The best first product with every launch of the second."""
    return [best, *(ExpertsPlan(best.gate_up, down) for down in _launches(name, case.kind, best.down.tokens, False) if down != best.down)]


def _widths(pairs_per_expert: float) -> tuple[int, ...]:
    if pairs_per_expert <= 4:
        return (16,)
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
    return [plan for plan in plans if stage_bytes(plan, kind, doubled) * plan.stages <= shared_bytes(name)]


def tune_experts(experts: TritonExperts, case: ExpertsCase, rng: torch.Generator) -> list[tuple[float, ExpertsPlan]]:
    """The seconds of each plan that was tried, the fastest first."""
    name, device = architecture(experts.device), experts.device
    x = torch.randn(case.tokens, case.hidden, generator=rng, device=device).bfloat16()
    choices = [torch.rand(case.tokens, EXPERTS, generator=rng, device=device).topk(TOP_K, dim=-1).indices for _ in range(_CHOICES)]
    weights = torch.rand(case.tokens, TOP_K, generator=rng, device=device)

    def measured(plans: Sequence[ExpertsPlan]) -> list[tuple[float, ExpertsPlan]]:
        sides: list[list[Callable[[], object]]] = [[partial(experts.by_plan, x, ids, weights, plan) for ids in choices] for plan in plans]
        return sorted(zip(seconds_in_turns(sides, device), plans, strict=True), key=lambda one: one[0])

    first = measured(candidates(name, case))
    return measured(followers(name, case, first[0][1]))


Kernels = tuple[str, ExpertsPlan, int, int]
"""A kind, a plan, how many programs share K of gate and up, and tokens: one, whose pairs are not sorted, or two for any number."""


def kernels_of_experts(name: str, processors: int, cases: Sequence[ExpertsCase]) -> list[Kernels]:
    """What the candidates of all cases are compiled to."""
    found: dict[Kernels, None] = {}
    for case in cases:
        pairs = case.tokens * TOP_K
        for plan in candidates(name, case):
            for one in (plan, *followers(name, case, plan)):
                tiles = min(pairs, EXPERTS) + pairs // one.down.tokens
                split = experts_split(one.gate_up, processors, case.intermediate, case.hidden, tiles)
                found[case.kind, one, split, min(case.tokens, 2)] = None
    # Each product once is enough.
    firsts: dict[tuple[str, LinearPlan, int, int], Kernels] = {}
    seconds: dict[tuple[str, LinearPlan, int], Kernels] = {}
    for kind, plan, split, tokens in found:
        firsts.setdefault((kind, plan.gate_up, split, tokens), (kind, plan, split, tokens))
        seconds.setdefault((kind, plan.down, tokens), (kind, plan, split, tokens))
    return list(dict.fromkeys([*firsts.values(), *seconds.values()]))


def compile_experts(kernels: Kernels) -> None:
    """By running them once, on two experts of one tile and as many steps as are shared."""
    kind, plan, split, tokens = kernels
    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(0)
    layer = experts_of(GRIDS[kind], 128 * 8, 128, rng, count=2)
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    x = torch.zeros(tokens, layer.hidden, dtype=torch.bfloat16, device=device)
    layer.by_plan(x, ids, torch.ones(tokens, 1, device=device), plan, split)
    torch.cuda.synchronize()


def experts_of(grid: str, hidden: int, intermediate: int, rng: torch.Generator, count: int = EXPERTS) -> TritonExperts:
    """A layer of experts that are all the same."""
    weights = [random_weight(grid, n, k, rng) for n, k in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))]
    layout = TritonExpertsLayout(count, weights[0], torch.bfloat16, rng.device)
    for index in range(count):
        layout.place(index, weights[0], weights[1], weights[2])
    return layout.finish()
