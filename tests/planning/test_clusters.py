"""Decoding on many boxes against bytes and products worked out by hand; the printed table is what
the code says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from r1_headers import R1, R1_TABLE

from quantkit.common.errors import QuantkitError
from quantkit.engines.layouts import find_topology
from quantkit.engines.memory import ParallelSizes, fit_rows
from quantkit.grids.schemes import find_scheme
from quantkit.planning.clusters import (
    DecodeStep,
    compare_published_rates,
    decode_step,
    largest_step,
)
from quantkit.planning.hardware import Hardware, load_hardware

INT8 = find_scheme("int8-a8w8c16")
WIDE = ParallelSizes(1, data=32, expert=True)


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("910b1")


def step(
    hardware: Hardware,
    parallel: ParallelSizes = WIDE,
    level: int = 0,
    batch: int = 1024,
    context: int = 640,
    **options: Any,
) -> DecodeStep:
    scheme = options.pop("scheme", INT8)
    return decode_step(
        R1_TABLE,
        R1,
        scheme,
        hardware,
        hardware.levels[level],
        parallel,
        batch=batch,
        context=context,
        **options,
    )


def test_bytes_of_an_exchange_by_hand(hardware):
    found = step(hardware)
    rows = 58 * 32 * 8  # layers with experts, tokens of a card, experts of a token
    assert found.dispatch_bytes == rows * (7168 + 4)
    assert found.combine_bytes == rows * 7168 * 2
    assert step(hardware, scheme=find_scheme("awq-w4a16")).dispatch_bytes == rows * 7168 * 2
    # At the floor an exchange starts at once: 24 of 32 parts leave the box at 25 GB/s, 7 stay at
    # 392.
    assert found.parts["dispatch"] == pytest.approx(found.dispatch_bytes * 24 / 32 / 25e6)
    one_box = step(hardware, ParallelSizes(1, data=8, expert=True), batch=256)
    assert one_box.parts["combine"] == pytest.approx(one_box.combine_bytes * 7 / 8 / 392e6)


def test_weights_and_cache_of_a_card_by_hand(hardware):
    found = step(hardware)
    experts = (
        58 * 8 * 3 * 7168 * 2048
    )  # 8 of 256 experts of each layer; 8192 choices touch every one
    attention = sum(
        row.shape[0] * row.shape[1]
        for row in R1_TABLE
        if row.role == "linear" and row.expert is None and not row.mtp
    )
    head = 7168 * 129280 * 2
    kv_b = 61 * 512 * 128 * 256 * 2
    routers = 58 * 256 * 7168 * 4
    assert found.parts["hbm"] == pytest.approx(
        (experts + attention + head + kv_b + routers) / 1.6e9, rel=0.001
    )
    assert found.parts["cache"] == pytest.approx(32 * 640 * 576 * 2 * 61 / 1.6e9)
    # A group of four cards shares attention's weights and its tokens, and each card reads the
    # group's whole latents.
    grouped = step(hardware, ParallelSizes(4, data=8, expert=True))
    assert grouped.parts["cache"] == pytest.approx(4 * found.parts["cache"])
    assert grouped.dispatch_bytes == found.dispatch_bytes


def test_copies_of_experts_take_places(hardware):
    die = load_hardware("910c")
    wide = ParallelSizes(1, data=144, expert=True, redundant=32)
    assert step(die, wide, batch=144).experts_per_device == 2
    assert step(die, replace(wide, redundant=0), batch=144).experts_per_device == 2
    assert step(hardware, replace(WIDE, redundant=32)).experts_per_device == 9


def test_scores_count_where_they_are_slower_than_the_cache(hardware):
    fused = next(number for number, level in enumerate(hardware.levels) if level.name == "fused")
    fast = hardware.model_copy(update={"hbm_gb_s": 10 * hardware.hbm_gb_s})
    assert "cache" in step(hardware, level=fused).parts
    found = step(fast, level=fused)
    assert "cache" not in found.parts
    assert found.parts["scores"] == pytest.approx(2 * 32 * 640 * 128 * (576 + 512) * 61 / 353e9)


def test_the_largest_batch_within_a_limit(hardware):
    found = largest_step(50, 4000, WIDE, lambda batch: step(hardware, batch=batch))
    assert found is not None
    assert found.step_ms <= 50 < step(hardware, batch=found.batch + 32).step_ms
    assert largest_step(50, 7, WIDE, lambda batch: step(hardware, batch=batch)).batch == 7 * 32  # type: ignore[union-attr]
    assert largest_step(1, 4000, WIDE, lambda batch: step(hardware, batch=batch)) is None
    assert largest_step(50, 0, WIDE, lambda batch: step(hardware, batch=batch)) is None


def test_a_published_rate_is_of_models_with_experts():
    topology = find_topology("vllm-ascend", name="four-boxes")
    role = topology.roles[0]
    dense = [row for row in R1_TABLE if row.expert is None]
    for rows, rates in ((R1_TABLE, [303.67]), (dense, [])):
        held = fit_rows([(row, 1) for row in rows], R1, role.parallel, 4096, 64, 0.9, 4)
        assert [
            rate["tokens_per_second"]
            for rate in compare_published_rates(topology, rows, R1, INT8, {role.name: held})
        ] == rates


def test_what_cannot_be_predicted_is_refused(hardware):
    with pytest.raises(QuantkitError, match="has no interconnect between machines"):
        step(hardware.model_copy(update={"fabric": None}))
    with pytest.raises(
        QuantkitError, match="decoding is predicted only for experts spread over all devices"
    ):
        step(hardware, ParallelSizes(8, data=4))


def test_the_printed_table_is_what_the_code_says(monkeypatch):
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    import predictions

    kept = json.loads((benchmarks / "results" / "clusters.json").read_text())
    assert predictions.layout_rows() == kept["rows"]
    assert kept["columns"] == predictions.COLUMNS
