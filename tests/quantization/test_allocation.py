"""Grids are given out so that no other allocation of that cost predicts less KL."""

import itertools
import random

import pytest

from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.quantization.allocation import Allocator, Option

GRIDS = (IntGrid(4, 128, symmetric=False), Nvfp4Grid(), IntGrid(8, None, symmetric=True), None)


def instance(seed, count=5):
    """Choices of several sizes, some of which are read in part, with KL that mostly falls with
    size."""
    draw = random.Random(seed)
    found = {}
    for number in range(count):
        weights, asked, kl = (
            draw.randint(50, 400),
            draw.choice([1.0, 1.0, 0.1]),
            10 ** draw.uniform(-6, -3),
        )
        sizes = [weights * share // 16 for share in (4, 5, 8, 16)]
        factors = [1.0, draw.uniform(0.2, 1.3), draw.uniform(0.001, 0.05), 0.0]
        found[f"c{number}"] = [
            Option(grid, s, s * asked, kl * f) for grid, s, f in zip(GRIDS, sizes, factors)
        ]
    return found


def best(options, budget):
    """Of all allocations that fit."""
    return min(
        sum(one.kl for one in chosen)
        for chosen in itertools.product(*options.values())
        if sum(one.stored for one in chosen) <= budget
    )


@pytest.mark.parametrize("seed", range(12))
def test_nothing_beats_the_curve_and_between_its_points_the_budget_is_used(seed):
    options = instance(seed)
    budgeting = Allocator(options, 1000, 0.0)
    curve = budgeting.curve()
    assert list(curve) == sorted(curve, key=lambda point: (point.stored, -point.kl))
    for point in curve:
        assert point.kl == pytest.approx(best(options, point.stored), rel=1e-9)
        assert budgeting.allocate(point.stored).kl == pytest.approx(point.kl, rel=1e-9)
    least, most = budgeting.smallest, curve[-1].stored
    for budget in range(least, most, max(1, (most - least) // 15)):
        found = budgeting.allocate(budget)
        assert found.stored <= budget
        below = min(point.kl for point in curve if point.stored <= budget)
        assert best(options, budget) <= found.kl <= below
        assert not any(
            one.kl < found.chosen[name].kl
            and one.stored - found.chosen[name].stored <= budget - found.stored
            for name, own in options.items()
            for one in own
        ), "no single change that fits is left"


def test_bytes_read_decide_where_they_are_what_counts():
    """Two choices of one size and about one KL; one is read for a tenth of the tokens."""
    options = {
        name: [
            Option(GRIDS[0], 100, 100 * asked, 1e-3 * size),
            Option(GRIDS[2], 200, 200 * asked, 1e-5 * size),
        ]
        for name, asked, size in (("always", 1.0, 1.1), ("seldom", 0.1, 1.01))
    }
    for weight, name in ((0.0, "always"), (1.0, "seldom")):
        chosen = Allocator(options, 1000, weight).allocate(300).chosen
        assert [other for other, one in chosen.items() if one.stored == 200] == [name]
