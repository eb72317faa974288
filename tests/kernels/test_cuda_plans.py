"""Every grid that may be launched fits its weight: measured ones and those of the rule of thumb."""

import pytest
from quantkit_kernels.cuda.experts.fused import max_pairs
from quantkit_kernels.cuda.plans import (
    CLUSTERS_AT_ONCE,
    ExpandPlan,
    PersistentTilesPlan,
    TileAndSharePlan,
    TilePerBlockPlan,
    TokensInRegistersPlan,
    TokensInSharedPlan,
    _measured,
    experts_plans,
    linear_plan,
    persistent_tiles_plans,
    sorted_plan,
)


def check(plan, rows, k, pairs=1):
    if isinstance(plan, ExpandPlan):
        return
    if isinstance(plan, PersistentTilesPlan):
        assert plan in persistent_tiles_plans(2048), plan
        return
    if isinstance(plan, TokensInSharedPlan):
        assert plan.token_tiles in (1, 2), plan
        assert 1 <= plan.wn <= 18, plan
        assert 1 <= plan.split <= k // 128, (plan, k)
        assert -(-rows // (32 * plan.wn)) * pairs <= CLUSTERS_AT_ONCE[plan.split], (plan, rows)
        return
    if isinstance(plan, TileAndSharePlan):
        assert plan.tokens in (32, 64), plan
        assert plan.blocks <= -(-rows // 256) <= 2 * plan.blocks, (plan, rows)
        assert k >= 1024, (plan, k)
        return
    if isinstance(plan, TilePerBlockPlan):
        assert plan.warpgroups in {32: (2, 4), 64: (2, 4), 128: (2, 3), 256: (2,)}[plan.tokens], (
            plan
        )
        assert 1 <= plan.split <= min(8, k // 128), (plan, k)
        return
    assert (plan.token_tiles, plan.row_tiles) in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 4)), plan
    assert plan.wn in (1, 2, 4), plan
    assert rows % (16 * plan.row_tiles * plan.wn) == 0, (plan, rows)
    assert 1 <= plan.split <= k // 128, (plan, k)
    assert plan.bulk or plan.token_tiles == 1, plan


def test_measured_plans_fit():
    tables = _measured()
    assert len(tables["linear"]) >= 30
    for (kind, rows, k), plans in tables["linear"].items():
        assert [tokens for tokens, _ in plans if tokens > 1] == [2**power for power in range(3, 12)]
        for tokens, (plan,) in plans:
            check(plan, rows, k)
            few = isinstance(plan, TokensInRegistersPlan | TokensInSharedPlan)
            assert few if tokens <= 8 else tokens <= 16 or not few, plan
            assert not isinstance(plan, TileAndSharePlan) or tokens <= plan.tokens, plan
            assert not isinstance(plan, TokensInSharedPlan) or tokens <= 8 * plan.token_tiles, plan
            assert kind != "int8" or not isinstance(
                plan, TokensInSharedPlan | TileAndSharePlan | ExpandPlan
            ), plan
            assert kind == "int8" or not isinstance(plan, PersistentTilesPlan), plan
    for (_, hidden, intermediate), plans in tables["experts"].items():
        for _, (gate_up, down) in plans:
            check(gate_up, 2 * intermediate, hidden)
            check(down, hidden, intermediate)


@pytest.mark.parametrize("rows", [64, 128, 192, 2112, 8192, 129280])
@pytest.mark.parametrize("k", [128, 256, 1536, 2048, 14336])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 127, 1000, 5000])
def test_plans_of_other_shapes_fit(rows, k, tokens):
    for kind in ("int4", "int8", "fp4"):
        plan = linear_plan(kind, rows, k, tokens)
        check(plan, rows, k)
        assert isinstance(plan, TokensInRegistersPlan | TokensInSharedPlan) == (tokens <= 16), plan
        assert not (isinstance(plan, ExpandPlan) and kind == "int8"), "int8 is not expanded"
        if isinstance(plan, TokensInRegistersPlan | TokensInSharedPlan):
            assert plan.token_tiles * 8 >= tokens


@pytest.mark.parametrize("top_k", [1, 8, 9])
@pytest.mark.parametrize("tokens", [1, 8, 512, 2048])
def test_plans_of_experts_fit(tokens, top_k):
    for hidden, intermediate, experts in (
        (7168, 2048, 256),
        (7168, 512, 256),
        (7680, 256, 257),
        (256, 128, 9),
        (128, 384, 9),
    ):
        for kind, count in (("int4", experts), ("fp4", experts), ("int8", experts), ("int4", 2000)):
            plans = experts_plans(kind, hidden, intermediate, count, tokens * top_k, top_k)
            if plans is None:
                assert kind != "int8", "one launch for both products is for 4 bits"
                assert tokens > 1 or intermediate < 512, (
                    "one token's larger experts take two launches"
                )
                assert count <= 1024, "more experts than a block lists"
                continue
            of_one_token = any(isinstance(plan, TokensInSharedPlan) for plan in plans)
            assert not of_one_token or (tokens == 1 and kind != "int8"), plans
            check(plans[0], 2 * intermediate, hidden, top_k)
            check(plans[1], hidden, intermediate, top_k)


@pytest.mark.parametrize("experts", [1, 8, 128, 257, 1024])
def test_lists_of_the_most_pairs_fit(experts):
    """However pairs are spread: an entry holds up to 8 of an expert; there is at most one a pair,
    or one an expert besides full ones."""
    pairs = max_pairs(experts)
    assert pairs >= 1024
    assert 2 * pairs + 4 + 4 * min(pairs, experts + pairs // 8) <= 7 << 10


def test_tiles_of_sorted_experts_have_room_for_those_of_most():
    for kind, expected in (("int4", [24, 32, 48, 96, 160]), ("int8", [96, 96, 96, 96, 160])):
        found = [sorted_plan(kind, pairs).tokens for pairs in (9.0, 24.0, 33.0, 64.0, 500.0)]
        assert found == expected
