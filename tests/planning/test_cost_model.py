"""The cost model against rooflines worked out by hand, and against what was published for eight
910B1."""

import json
from pathlib import Path

import pytest
import yaml
from imported import module_at
from r1_headers import R1, R1_TABLE

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.results.published import published_speeds
from quantkit.grids.schemes import find_scheme
from quantkit.models import llama
from quantkit.planning.cost_model import device_loads, predict_levels
from quantkit.planning.hardware import load_hardware

W4A16, FP4 = (
    next(table for table in published_speeds() if table["name"] == name)
    for name in ("r1-0528-w4a16-910b1", "r1-fp4-a2")
)
BATCHES = (1, 2, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def hardware():
    return load_hardware("910B1")


def levels(hardware, scheme, batch, context=384, devices=8):
    predictions = predict_levels(
        R1_TABLE, R1, find_scheme(scheme), hardware, devices=devices, batch=batch, context=context
    )
    return {prediction.level: prediction for prediction in predictions}


def weights_of(rows):
    return sum(row.shape[0] * row.shape[1] for row in rows)


def shared(rows):
    """On one device of eight."""
    return sum(weights_of([row]) / (1 if row.split == "replicate" else 8) for row in rows)


def compare_published(published, scheme, hardware):
    """Every row of a published grid with each level's prediction and its error, predicted /
    published - 1. A step attends to the input and, on average, half the output."""
    found = []
    for row in published["rows"]:
        batch = int(row["concurrency"])
        context = int(row["input_len"]) + published["output_len"] // 2
        measured = row.get("tpot_ms") or 1000 * batch / row["system_tps"]
        predicted = levels(hardware, scheme, batch, context)
        found.append(
            {
                "input_len": int(row["input_len"]),
                "concurrency": batch,
                "published_ms": measured,
                "predicted": {
                    level: {"tpot_ms": one.tpot_ms, "error": one.tpot_ms / measured - 1}
                    for level, one in predicted.items()
                },
            }
        )
    return found


@pytest.fixture(scope="module")
def rows(hardware):
    return compare_published(W4A16, "awq-w4a16", hardware)


def test_every_published_row_has_a_prediction(rows):
    """Fused is below all 30 rows; captured lies from a quarter below (one and two sequences) to
    four fifths above (32)."""
    assert len(rows) == len(W4A16["rows"]) == 30
    for row, published in zip(rows, W4A16["rows"]):
        assert (row["input_len"], row["concurrency"], row["published_ms"]) == tuple(
            published[name] for name in ("input_len", "concurrency", "tpot_ms")
        )
        at = {level: one["tpot_ms"] for level, one in row["predicted"].items()}
        assert at["floor"] < at["fused"] < row["published_ms"] < at["eager"]
        assert row["predicted"]["captured"]["error"] == pytest.approx(
            at["captured"] / row["published_ms"] - 1
        )
        assert -0.27 < row["predicted"]["captured"]["error"] < 0.82


def test_the_page_has_every_row(rows):
    """docs/lab/ascend.md's table, figure by figure."""
    page = asset("docs", "lab", "ascend.md").read_text()
    for row in rows:
        cells = [f"{row['input_len']}", f"{row['concurrency']}", f"**{row['published_ms']:.1f}**"]
        for level in ("fused", "captured"):
            one = row["predicted"][level]
            cells.append(f"{one['tpot_ms']:.1f} ({100 * one['error']:+.0f} %)")
        assert f"| {' | '.join(cells)} |" in page, cells


def test_linears_of_few_rows_are_not_decoded(hardware):
    """CANN's limits of the split product: groups of 64 or 128, an eighth of a group in rows, 13952
    inputs, outputs in 64s on a device."""
    split = hardware.split_activations
    assert split.takes(2112, 7168, 128, 16)
    assert split.takes(64, 13952, 64, 8)
    for refused in (
        (2112, 7168, 128, 17),
        (2112, 7168, 64, 9),
        (2112, 7168, 32, 1),
        (2112, 14080, 128, 1),
        (2100, 7168, 128, 1),
    ):
        assert not split.takes(*refused), refused
    assert not split.takes(2112, 7104, 128, 1)  # half a group left
    few, many = (
        device_loads(R1_TABLE, R1, find_scheme("awq-w4a16").weight, 8, batch, split)
        for batch in (16, 17)
    )
    assert few[1].undecoded
    assert few[1].weights > 0
    assert many[1].weights == 0
    assert (
        few[0].weights + few[1].weights < many[0].weights < 1.05 * (few[0].weights + few[1].weights)
    )
    # Experts and the shared one, which runs as one of them, stay with the grouped product.
    main = [row for row in R1_TABLE if not row.mtp]
    expected = weights_of(row for row in main if row.block == "shared_expert") / 8
    expected += weights_of(row for row in main if row.expert is not None) / 8 / 32
    found = device_loads(R1_TABLE, R1, find_scheme("awq-w4a16").weight, 8, 1, split)[0]
    assert found.weights == pytest.approx(expected)


def test_decoded_weights_go_to_the_l2_and_back(hardware):
    """By hand: two bytes a weight at 3818 GB/s and again at 4884 GB/s."""
    at = levels(hardware, "fp4-w4a16", 32)["captured"]
    load = device_loads(R1_TABLE, R1, find_scheme("fp4-w4a16").weight, 8, 32)[0]
    assert at.parts["l2"] == pytest.approx(load.weights * 2 / 3818e6 + load.weights * 2 / 4884e6)


@pytest.mark.parametrize(("batch", "weights_gb"), [(1, 22.07), (8, 87.7), (32, 228.2)])
def test_weights_read_are_those_counted_by_hand(batch, weights_gb):
    """Every rank's weights, summed over the ranks, against a table made from the published config
    at 4.156 bits and a bf16 router."""
    loads = device_loads(R1_TABLE, R1, find_scheme("awq-w4a16").weight, 1, batch)
    assert find_scheme("awq-w4a16").weight.bytes_per_weight == 4.25 / 8
    total = loads[0].weights * 4.156 / 8 + loads[2].bytes + loads[3].bytes / 2
    assert total / 1e9 == pytest.approx(weights_gb, rel=3e-3)


def test_floor_is_bytes_over_bandwidth(hardware):
    """2.13 ms by hand; the Ascend form of the zero points (4.25 bits) and a float32 router add 7
    %."""
    floor = levels(hardware, "awq-w4a16", 1)["floor"]
    assert floor.tpot_ms == pytest.approx(2.13, rel=0.1)
    assert floor.parts["cache"] == pytest.approx(384 * 70_272 / 1.6e9, rel=1e-6)
    assert floor.num_launches == floor.num_collectives == 0


@pytest.mark.parametrize("scheme", ["awq-w4a16", "fp4-w4a16", "int8-a8w8c16"])
def test_levels_and_batches_rise(hardware, scheme):
    before = None
    for batch in BATCHES:
        times = [prediction.tpot_ms for prediction in levels(hardware, scheme, batch).values()]
        assert times == sorted(times)
        assert len(times) == len(hardware.levels) == 5
        if before is not None:
            assert all(later > earlier for later, earlier in zip(times, before))
        before = times


def test_context_costs_cache_and_one_device_no_collectives(hardware):
    short, long = (
        levels(hardware, "awq-w4a16", 1, context=640),
        levels(hardware, "awq-w4a16", 1, context=61_440),
    )
    assert long["fused"].parts["cache"] == pytest.approx(96 * short["fused"].parts["cache"])
    assert levels(hardware, "awq-w4a16", 1, devices=1)["eager"].num_collectives == 0


PREDICTIONS = module_at(Path(__file__).parents[2] / "benchmarks" / "predictions.py")


def ways(hardware, scheme, batch):
    return PREDICTIONS.ways(
        R1_TABLE, R1, find_scheme(scheme), hardware, devices=8, batch=batch, context=384
    )


def test_what_fewer_launches_buy_is_what_the_page_says():
    page = asset("docs", "lab", "ascend.md").read_text()
    assert [row for row in PREDICTIONS.step_rows() if row not in page] == []


def test_experts_on_the_vector_cores_go_not_through_the_l2(hardware):
    """By hand: nine operations a weight and row, of the routed and shared experts and of
    linears."""
    plain, mixed, few, both, *_ = ways(hardware, "awq-w4a16", 1)
    assert few.parts["l2"] == both.parts["l2"] == 0 < plain.parts["l2"]
    moe = weights_of(row for row in R1_TABLE if row.expert is not None and not row.mtp) / 8 / 32
    rest = [row for row in R1_TABLE if row.role == "linear" and row.expert is None and not row.mtp]
    others = shared(rest)
    assert few.parts["vector"] == pytest.approx(9 * (moe + others) / 11e9)
    # What comes before attention costs a byte a weight, not four bits and a quarter.
    before = [row for row in rest if row.projection in ("q_a", "q_b", "kv_a")]
    count = shared(before)
    assert mixed.parts["hbm"] - plain.parts["hbm"] == pytest.approx(
        count * (1 - 4.25 / 8) / (1600 * 0.6 * 1e6)
    )


def test_a_dense_model_has_no_experts(hardware):
    config = llama.Config.from_dict(
        json.loads("""{
        "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "rope_theta": 10000.0}""")
    )
    table, grid = llama.parameters(config), find_scheme("awq-w4a16").weight
    one, two = (device_loads(table, config, grid, devices, 1)[0] for devices in (1, 2))
    linears = 2 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512)
    assert one.weights == linears
    assert two.weights == linears / 2


def test_faults_are_reported(tmp_path):
    with pytest.raises(QuantkitError, match="910b9"):
        load_hardware("910b9")
    values = yaml.safe_load(asset("recipes", "hardware", "910b1.yaml").read_text())
    values["levels"][0]["launches"] = "none such"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(QuantkitError, match="none such"):
        load_hardware(str(tmp_path / "mine.yaml"))
    del values["hbm_gb_s"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(QuantkitError, match="hbm_gb_s"):
        load_hardware(str(tmp_path / "mine.yaml"))
