"""What tests/judges/vllm_beside.py measures with: models of repeated layers, and the figures of a
cell."""

import json
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "judges"))

import shape_models
import vllm_beside
from vllm_beside import Case, Server, ends_of_gaps, told

from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.speed.measure import RequestTimes
from quantkit.models import find_architecture

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(("model", "form"), [("qwen3-8b", "awq"), ("qwen3-30b-a3b", "bf16")])
def test_a_model_of_repeated_layers_has_all_its_tensors(
    model: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        if model == "qwen3-30b-a3b"
        else {}
    )
    monkeypatch.setitem(shape_models.SHAPES, model, shape_models.SHAPES[model] | SMALL | experts)
    path = shape_models.write_shape(tmp_path, model, form, 3, "cpu")
    checkpoint = Checkpoint.open(path)
    architecture = find_architecture(checkpoint.config)
    rows = [
        row.name.removesuffix(".weight")
        for row in architecture.parameters(architecture.Config.from_dict(checkpoint.config))
    ]
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    there = {name.rpartition(".")[0] for name in index}
    assert set(rows) == there
    assert sum(".2." in name for name in there) > 3


def test_a_line_of_a_cell_is_below_one_where_ours_is_better() -> None:
    theirs, ours = (
        {"ttft_s": 2.0, "tpot_ms": 10.0, "system_tps": 100.0},
        {"ttft_s": 1.0, "tpot_ms": 12.0, "system_tps": 125.0},
    )
    assert told("m", "1x1", {"vllm": [theirs], "quantkit": [ours], "quantkit-8": [theirs]}) == [
        "m | 1x1 | quantkit | ttft_s 2 1 (0.50) | tpot_ms 10 12 (1.20) | system_tps 100 125 (0.80)",
        "m | 1x1 | quantkit-8 | ttft_s 2 2 (1.00) | tpot_ms 10 10 (1.00) | system_tps 100 100 "
        "(1.00)",
    ]
    assert told("m", "1x1", {"vllm": [theirs]}) == ["m | 1x1 | vllm measured"]


def test_gaps_are_counted_while_the_long_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = RequestTimes(0.0, 1.0, 9.0, 8, 4, gaps=(5.0, 1.0, 2.0))
    assert list(ends_of_gaps(one)) == [(6.0, 5.0), (7.0, 1.0), (9.0, 2.0)]
    answers = {vllm_beside.ANSWERS: [one], 1: [RequestTimes(6.5, 7.5, 7.6, 8, 4)]}
    monkeypatch.setattr(vllm_beside, "requests", lambda url, tokens, users, output: answers[users])
    monkeypatch.setattr(vllm_beside.time, "sleep", lambda seconds: None)
    assert vllm_beside.gap_of("") == [{"gap_s": 2.0, "ttft_s": 1.0}]


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(vllm_beside, "warm", lambda url, rounds: [])
    monkeypatch.setattr(
        vllm_beside, "cell_of", lambda url, cell, asked: measured.append(f"{url} {cell}")
    )
    case = Case(
        "qwen3-8b", "awq", 1, {name: Server(name, None, 0.0) for name in ("vllm", "quantkit")}
    )  # type: ignore[arg-type]
    case.servers["quantkit"].failed, case.again = "it ended with 1", True
    found: dict[str, Any] = {case.name: {"128x1": {"vllm": [{}]}}}
    monkeypatch.setattr(vllm_beside, "start_again", lambda cases, engine, asked: None)
    for engine in ("quantkit", "vllm"):
        asked = Namespace(cells="128x1,128x8", directory=tmp_path, long=1.6)
        vllm_beside.measure([case], (engine,), asked, vllm_beside.time.monotonic() + 600, found)
    assert measured == ["vllm 128x8"]
    vllm_beside.measure(
        [case],
        ("vllm",),
        Namespace(cells="4096x8", directory=tmp_path, long=1.6),
        vllm_beside.time.monotonic() + 1,
        found,
    )
    assert measured == ["vllm 128x8"]


def test_servers_of_both_are_up_before_cells_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr(
        vllm_beside,
        "start_one",
        lambda case, engine, port, asked: (
            did.append(f"{engine} {port}") or Server(engine, None, 0.0)
        ),
    )  # type: ignore[arg-type, func-returns-value]
    monkeypatch.setattr(vllm_beside, "await_servers", lambda cases, engine, asked: None)
    monkeypatch.setattr(vllm_beside, "start_again", lambda cases, engine, asked: None)
    monkeypatch.setattr(vllm_beside, "warm", lambda url, rounds: did.append(f"{url} {len(rounds)}"))
    monkeypatch.setattr(
        vllm_beside,
        "cell_of",
        lambda url, cell, asked: (
            did.append(f"{url} {cell}") or [{"ttft_s": 1, "tpot_ms": 1, "system_tps": 1}]
        ),
    )
    monkeypatch.setattr(vllm_beside, "stop", lambda processes: None)
    asked = Namespace(
        directory=tmp_path,
        engines=["quantkit", "vllm"],
        chunk_tokens=0,
        seconds=60,
        first_port=9,
        cells="128x1,128x8",
    )
    asked.together, asked.head_start, asked.long = True, 0.0, 1.6
    assert vllm_beside.run([Case("qwen3-30b-a3b", "bf16", 1)], asked) == 0
    warmed = [
        f"quantkit {len(vllm_beside.WARM)}",
        f"vllm {len(vllm_beside.WARM) + len(vllm_beside.PEER_WARM)}",
    ]
    assert did == [
        "quantkit 9",
        "vllm 10",
        *warmed,
        "quantkit 128x1",
        "vllm 128x1",
        "quantkit 128x8",
        "vllm 128x8",
    ]


SLEEPS = "import time\nprint('loading', flush=True)\ntime.sleep(60)"


def test_a_server_of_ours_that_does_not_start_reports_its_state_and_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        vllm_beside, "command", lambda *of: [sys.executable, "-X", "faulthandler", "-c", SLEEPS]
    )
    asked = Namespace(
        directory=tmp_path,
        wait=3.0,
        engines=["quantkit"],
        chunk_tokens=0,
        seconds=60,
        first_port=9,
        cells="128x1",
        together=False,
        head_start=0,
        long=1.6,
    )
    assert vllm_beside.run([case := Case("m", "awq", 1)], asked) == 1
    assert case.servers["quantkit"].failed == "it did not come up in time"
    assert case.servers["quantkit"].process.wait(20) == -signal.SIGABRT
    log = tmp_path / "beside-m-awq-1-quantkit.log"
    until = time.monotonic() + 20
    while log.read_text().count('File "<string>", line 3') < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert log.read_text().count('File "<string>", line 3') == 2
    assert "m:awq:1 quantkit | loading" in capfd.readouterr().out


def test_a_cell_that_does_not_end_ends_its_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vllm_beside, "command", lambda *of: [sys.executable, "-X", "faulthandler", "-c", SLEEPS]
    )
    server = vllm_beside.start_one(
        Case("m", "awq", 1), "quantkit", 9, Namespace(directory=tmp_path)
    )
    assert vllm_beside.attempt("m quantkit 1x1", server, lambda url: time.sleep(30), 0.2) is None
    assert server.failed == "it did not end an answer in 0 s"
    assert server.process.wait(20) == -signal.SIGABRT
