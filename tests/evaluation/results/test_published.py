import json

import pytest

from quantkit.cli import console
from quantkit.evaluation.results.published import (
    accuracy_tables,
    published_speeds,
    published_speeds_for,
    speed_tables,
)


def test_every_figure_has_its_source_and_hardware():
    for table in accuracy_tables():
        assert table.source
        assert table.hardware
        assert table.harness
    for speed in speed_tables():
        assert speed.source
        assert speed.hardware
        assert all(len(row) == len(speed.columns) for row in speed.rows)


def test_the_reports_speed_table_agrees_with_itself():
    """TPS is 1000 / TPOT and system throughput times latency is what the requests wrote: a typing
    error would show."""
    table = speed_tables()[0]
    rows = [dict(zip(table.columns, row)) for row in table.rows]
    assert len(rows) == 30
    for row in rows:
        tpot, tps, latency, ttft = row["tpot_ms"], row["tps"], row["latency_s"], row["ttft_s"]
        assert abs(1000 / tpot - tps) < 0.15 + 0.01 * tps, row
        assert abs(ttft + 511 * tpot / 1000 - latency) < 0.03 * latency, row
        assert (
            abs(row["concurrency"] * 512 / latency - row["system_tps"]) < 0.05 * row["system_tps"]
        ), row


def test_speeds_stand_under_what_they_are_of(capsys):
    tables = published_speeds()
    awq = next(table for table in tables if table["name"] == "r1-0528-w4a16-910b1")
    assert {"input_len": 128, "concurrency": 1, "tpot_ms": 22.8}.items() <= awq["rows"][0].items()
    assert all(
        value is not None for table in tables for row in table["rows"] for value in row.values()
    )
    json.dumps(tables)
    console.show_published([awq])
    shown = capsys.readouterr().out
    assert "22.8" in shown
    assert "910B1" in shown


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("DeepSeek-R1-0528", 2),
        ("deepseek-r1-0528-awq-w4a16", 2),
        ("deepseek-ai/DeepSeek-R1", 2),
        ("DeepSeek-R1-Distill-Qwen-7B", 0),
        ("DeepSeek-R1-Zero", 0),
        ("tiny-r1", 0),
        ("my-qwen", 0),
    ],
)
def test_speeds_are_shown_beside_the_model_that_they_are_of(model, count):
    assert len(published_speeds_for(model)) == count
