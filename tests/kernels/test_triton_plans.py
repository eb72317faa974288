"""Plans of the Triton backend, without Triton or a device: rules fit the card, tables are read,
layouts decode to the weight."""

import json
from contextlib import nullcontext

import pytest
import torch
from quantkit_kernels import triton
from quantkit_kernels.sizes import LinearSize, Products
from quantkit_kernels.triton import cards, tune, wgmma, wgmma_plans
from quantkit_kernels.triton.decoded_experts import (
    DECODED_BYTES,
    decoded_bytes,
    is_faster_decoded,
)
from quantkit_kernels.triton.wgmma_plans import WgmmaPlan

MULTIPROCESSORS = 108


def write_own(name, text=None, **plans):
    """A table of this machine, with these plans or this text."""
    path = cards.own_table(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"plans": {"linear": [], "experts": [], **plans}}
    path.write_text(json.dumps(table) if text is None else text)
    cards._table.cache_clear()
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards._table.cache_clear()
    yield
    cards._table.cache_clear()


@pytest.mark.parametrize("name", [*cards.SHARED_BYTES, "sm_103", "gfx1100", "sm_300"])
def test_plans_by_the_rule_fit_the_card(name, monkeypatch):
    monkeypatch.setattr(wgmma_plans, "has_gluon", lambda: False)
    room = cards.shared_bytes(name)
    assert room <= 227 << 10
    for kind in ("int4", "fp4", "int8"):
        for n, k in ((64, 128), (2048, 7104), (151936, 4000)):  # in no table
            for tokens in (1, 16, 17, 64, 65, 300, 1024):
                plan = cards.linear_plan(name, MULTIPROCESSORS, kind, n, k, tokens)
                assert (plan is None) == (
                    tokens >= {"int4": 512, "fp4": 256, "int8": tokens + 1}[kind]
                )
                if plan is None:
                    continue
                assert isinstance(plan, cards.LinearPlan)
                assert cards.stage_bytes(plan, kind) * plan.stages <= room, (kind, n, k, tokens)
                assert 1 <= plan.split <= max(1, -(-k // 128)), plan
            few = cards.linear_plan(name, MULTIPROCESSORS, kind, n, k, 2000)
            assert (few is None) == (kind != "int8")
        for pairs in (0.1, 20, 50, 500):
            gate_up, down = cards.experts_plan(name, kind, 2048, 7000, pairs)
            assert cards.stage_bytes(gate_up, kind, doubled=True) * gate_up.stages <= room, (
                kind,
                pairs,
            )
            assert cards.stage_bytes(down, kind) * down.stages <= room, (kind, pairs)
            assert gate_up.tokens == down.tokens


def test_weights_of_experts_are_decoded_where_many_pairs_share_them():
    """What is decoded at a time fits, of gpt-oss-20b, Qwen3-30B-A3B and DeepSeek-R1."""

    def decoded(name="sm_90", kind="fp4", dtype=torch.bfloat16, sizes=(768, 2048), pairs=5000):
        return is_faster_decoded(name, kind, dtype, sizes, pairs)

    for kind in ("fp4", "int4", "w8a16"):
        assert decoded(kind=kind)
        assert decoded(kind=kind, pairs=1024)
        assert not decoded(kind=kind, pairs=128)
    for other in ({"kind": "int8"}, {"name": "sm_80"}, {"dtype": torch.float16}):
        assert not decoded(**other)
    assert not decoded(sizes=(772, 2048))
    for intermediate, hidden, count in ((2880, 2880, 32), (768, 2048, 128), (2048, 7168, 256)):
        held = decoded_bytes(count, intermediate, hidden)
        assert held <= DECODED_BYTES
        assert 2 * held > min(DECODED_BYTES, 2 * count * 2 * intermediate * hidden)


def test_plans_by_wgmma_fit_hopper(monkeypatch):
    """By the rule and of those that --tune tries; where K is shared, sums of all tiles have room. K
    that TMA cannot read goes without."""
    monkeypatch.setattr(wgmma_plans, "has_gluon", lambda: True)
    for n, k in ((64, 128), (2112, 7168), (7168, 16384), (24576, 1536), (151936, 4000)):
        for tokens in (1, 16, 17, 64, 65, 128, 300, 1024, 5000):
            rule, *others = wgmma_plans.wgmma_candidates(132, n, k, tokens)
            assert rule == wgmma_plans.wgmma_rule(132, n, k, tokens)
            assert (
                rule == cards.linear_plan("sm_90", 132, "int8", n, k, tokens)
                or (n, k) in cards._table("sm_90").wgmma
            )
            for plan in (rule, *others):
                assert wgmma_plans.shared_bytes(plan) * max(1, plan.programs) <= cards.shared_bytes(
                    "sm_90"
                ), plan
                tiles = -(-n // plan.rows) * -(-tokens // plan.tokens)
                assert plan.split <= -(-k // 128)
                assert plan.split == 1 or (
                    tiles <= wgmma.COUNTERS and tiles * plan.rows * plan.tokens <= wgmma.SUMS
                ), plan
    for name, k in (("sm_90", 4008), ("sm_80", 4000), ("sm_100", 4000)):
        assert isinstance(cards.linear_plan(name, 132, "int8", 512, k, 300), cards.LinearPlan)
    assert isinstance(cards.linear_plan("sm_90", 132, "int8", 512, 4000, 300), WgmmaPlan)


def test_a_table_of_this_machine_counts_for_more_than_the_one_that_ships(monkeypatch):
    """On the card it was measured on: an H100 and an H200 are of one class, and what --tune measured
    on one is not for the other. Of rows that were not measured the plan is the next larger's."""
    rows = json.loads((cards.TABLES / "sm_90.json").read_text())["plans"]["linear"]
    of_one, of_sixteen = (
        cards.LinearPlan(*row[4])
        for row in rows
        if row[:3] == ["int4", 2112, 7168] and row[3] <= 16
    )
    own, other = cards.LinearPlan(128, 16, 2, 8, 3), cards.LinearPlan(128, 128, 1, 8, 3)
    monkeypatch.setattr(cards, "card_name", lambda: "NVIDIA H200")

    def plans():
        cards._table.cache_clear()
        return [cards.linear_plan("sm_90", 132, "int4", 2112, 7168, rows) for rows in (1, 3, 16)]

    assert plans() == [of_one, of_sixteen, of_sixteen]
    monkeypatch.setattr(cards, "card_name", lambda: "NVIDIA H100 80GB HBM3")
    path = write_own("sm_90", linear=[["int4", 2112, 7168, 16, [128, 16, 2, 8, 3]]])
    assert plans() == [own] * 3
    assert cards.linear_plan("sm_90", 132, "int4", 7168, 16384, 512) == other
    assert cards.describe_plans("sm_90").startswith(f"of this card, in {path}")
    monkeypatch.setattr(cards, "card_name", lambda: "NVIDIA H200")
    assert plans() == [of_one, of_sixteen, of_sixteen]
    assert "for all cards of sm_90, measured on NVIDIA H200" in cards.describe_plans("sm_90")
    assert "a rule" in cards.describe_plans("sm_80")


def test_plans_of_experts_are_read_from_a_table():
    """One pair an expert was measured: of a little more, as with a shared expert, the same plan; of
    many more the next one."""
    rows = [
        ["fp4", 512, 256, most, [64, tokens, 1, 2, 4], [32, tokens, 1, 1, 3]]
        for most, tokens in ((256, 16), (2560, 32))
    ]
    write_own("sm_80", experts=rows)
    few, many = (
        cards.ExpertsPlan(
            cards.LinearPlan(64, tokens, 1, 2, 4), cards.LinearPlan(32, tokens, 1, 1, 3)
        )
        for tokens in (16, 32)
    )
    for pairs, expected in ((0.1, few), (1.1, few), (1.5, many), (100.0, many)):
        assert cards.experts_plan("sm_80", "fp4", 256, 512, pairs) == expected
    assert cards.experts_plan("sm_80", "fp4", 256, 1024, 1) not in (few, many)


def test_a_tune_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch):
    """Of a weight that an earlier run measured, the new plans; of others, the earlier ones; of the
    one it was stopped at, none."""
    plain, by_wgmma = cards.LinearPlan(64, 16, 4, 2, 3), WgmmaPlan(128, 64, 1, 4, 4, True, 2)

    def measured(kind, n, k, device, compile_all):
        yield 16, [(1e-6, plain), (2e-6, by_wgmma)]
        if n == 192:
            raise KeyboardInterrupt
        yield 64, [(1e-6, by_wgmma), (2e-6, plain)]

    monkeypatch.setattr(tune, "tune", measured)
    monkeypatch.setattr(tune, "compilers", nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tune, "multiprocessors", lambda device: 132)
    earlier = [[kind, 64, 128, 1, [32, 16, 1, 1, 2]] for kind in ("int8", "int4")]
    path = write_own("sm_90", linear=earlier)
    products = Products((LinearSize("int8", 64, 128), LinearSize("int8", 192, 128)), ())
    with pytest.raises(KeyboardInterrupt):
        list(tune.write_table(torch.device("cuda"), path, products))
    plans = json.loads(path.read_text())["plans"]
    fields = [64, 16, 4, 2, 3]
    assert plans["linear"] == [
        earlier[1],
        ["int8", 64, 128, 16, fields],
        ["int8", 64, 128, 64, fields],
    ]
    assert plans["wgmma"] == [[64, 128, 16, [0] * 7], [64, 128, 64, [128, 64, 1, 4, 4, 1, 2]]]
    cards._table.cache_clear()
    for here in (True, False):
        monkeypatch.setattr(wgmma_plans, "has_gluon", lambda here=here: here)
        assert cards.linear_plan("sm_90", 132, "int8", 64, 128, 16) == plain
        assert cards.linear_plan("sm_90", 132, "int8", 64, 128, 17) == (by_wgmma if here else plain)
    assert list(tmp_path.rglob("tmp*")) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"plans": {"linear": [["int4", 64',
        '{"plans": {"linear": [["int4", 64, 128, 1, [32]]], "experts": []}}',
    ],
)
def test_a_damaged_table_of_this_machine_is_named_and_does_not_count(text, caplog):
    before = cards.linear_plan("sm_90", 132, "int4", 7168, 2048, 1)
    path = write_own("sm_90", text)
    assert cards.linear_plan("sm_90", 132, "int4", 7168, 2048, 1) == before
    assert f"{path} is no table of plans" in caplog.text
    assert "delete it" in caplog.text


def test_what_cannot_be_kept_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tune, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(tune, "compilers", lambda: pytest.fail("nothing is to be measured"))
    path = cards.own_table("sm_90")
    path.parent.write_text("a file where the folder would be")
    with pytest.raises(cards.NoTable, match=f"{path.parent} cannot be written"):
        list(tune.write_table(torch.device("cuda"), path))
    path.parent.unlink()
    path.parent.mkdir()
    path.write_text("half a tab")
    with pytest.raises(cards.NoTable, match=f"{path} is no table of plans"):
        list(tune.write_table(torch.device("cuda"), path))
    assert path.read_text() == "half a tab"


def test_where_triton_cannot_keep_its_kernels_another_backend_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(triton, "_why_no_triton", lambda: None)
    monkeypatch.setattr(triton, "why_not_started", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    (tmp_path / "file").touch()
    for name, value in (
        ("TRITON_CACHE_DIR", tmp_path / "file"),
        ("TRITON_HOME", tmp_path / "file"),
    ):
        monkeypatch.setenv(name, str(value))
        reason = triton.unusable("linear_int4", torch.device("cuda"), None, ())
        assert str(reason).startswith(f"{tmp_path}/file")
        assert "set TRITON_CACHE_DIR" in str(reason)
        monkeypatch.setenv(name, str(tmp_path / "new" / "folder"))
        assert triton.unusable("linear_int4", torch.device("cuda"), None, ()) is None
        monkeypatch.delenv(name)
