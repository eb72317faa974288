"""What tests/judges/vllm_topologies.py starts and judges by: the commands on four cards, and models
whose routers are decided."""

import json
import sys
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "judges"))

import load_curves
import middle_models
import torch
from make_model import write_dense
from vllm_cuda import routing_ties
from vllm_server import Server
from vllm_topologies import CASES, TOPOLOGIES, attention, compare, deployments, main

from quantkit.evaluation.speed.measure import SpeedRow

SMALL: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 2, "moe_intermediate_size": 64}
MODELS = {
    "deepseek_v3-middle": SMALL
    | {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "q_lora_rank": 64,
        "num_nextn_predict_layers": 0,
    },
    "qwen3_moe-middle": SMALL | {"num_key_value_heads": 2, "head_dim": 64},
}


def ties(path: Path, name: str) -> int:
    """Tokens of 120 whose experts may differ in BF16."""
    config = middle_models.MIDDLE[name] | MODELS[name]
    write_dense(path, config, middle_models.weights(config))
    generator = torch.Generator().manual_seed(1)
    return sum(
        int(tied.sum())
        for tied in routing_ties(path, torch.randint(8, 320, (3, 40), generator=generator).tolist())
    )


@pytest.mark.parametrize("name", MODELS)
def test_routers_of_middle_models_are_decided(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ties(tmp_path / "decided", name) == 0
    monkeypatch.setattr(middle_models, "_ROUTER", 0.0)  # what is left of a router is random
    assert ties(tmp_path / "random", name) > 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = (
        middle_models.MIDDLE["deepseek_v3-middle"]
        | MODELS["deepseek_v3-middle"]
        | {"num_nextn_predict_layers": 1}
    )
    return write_dense(
        tmp_path_factory.mktemp("model") / "m", config, middle_models.weights(config)
    )


@pytest.mark.parametrize(
    ("topology", "tensor", "pipeline", "data", "boxes"),
    [
        ("tensor", 4, 1, 1, 1),
        ("pipeline", 2, 2, 1, 2),
        ("experts", 1, 1, 4, 1),
        ("experts-over-boxes", 1, 1, 4, 2),
        ("apart", 2, 1, 1, 2),
        ("apart-twice", 1, 1, 1, 4),
        ("mtp-alone", 1, 1, 1, 1),
    ],
)
def test_commands_take_four_cards(
    model: Path, topology: str, tensor: int, pipeline: int, data: int, boxes: int
) -> None:
    launches = [launch for made in deployments(model, topology, 4) for launch in made.launches]
    assert len({launch.box for launch in launches}) == len(launches) == boxes
    for launch in launches:
        ((_, command),) = launch.commands

        def option(name: str, words: tuple[str, ...] = command) -> int:
            return int(words[words.index(name) + 1]) if name in words else 1

        found = (
            option("--tensor-parallel-size"),
            option("--pipeline-parallel-size"),
            option("--data-parallel-size"),
        )
        assert found == (tensor, pipeline, data)
    alone = TOPOLOGIES[topology].devices
    assert (
        TOPOLOGIES[topology].ranks(4)
        == (alone or 4)
        == tensor * pipeline * data * (boxes if topology.startswith("apart") else 1)
    )


@pytest.mark.parametrize(
    ("topology", "given"), [("pipeline", False), ("experts", True), ("apart", True)]
)
def test_workers_of_boxes_in_a_pipeline_find_their_own_ports(
    model: Path, tmp_path: Path, topology: str, given: bool
) -> None:
    """Two workers of a box that both look for a port from VLLM_PORT on found the same one in two of
    six starts on four cards."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho from ${VLLM_PORT:-anywhere}\nexec sleep 60\n")
    program.chmod(0o755)
    server = Server(
        deployments(model, topology, 4), 39, range(4), "cuda", str(program), tmp_path / "log", []
    )
    try:
        until, said = time.monotonic() + 30, list[str]()
        while len(said) < (1 if topology == "experts" else 2) and time.monotonic() < until:
            time.sleep(0.05)
            said = [
                line
                for log in tmp_path.glob("log.[01].log")
                for line in log.read_text().splitlines()
                if line.startswith("from ")
            ]
    finally:
        server.end()
    assert said
    assert [line != "from anywhere" for line in said] == [given] * len(said)


def test_cases_are_of_topologies_and_formats() -> None:
    for model, format, topology in CASES["cuda"]:
        assert topology in TOPOLOGIES
        assert model == "tiny-r1" or format == "source" or format in middle_models.FORMATS


def test_a_result_says_that_its_server_was_compiled(tmp_path: Path) -> None:
    (tmp_path / "topologies.json").write_text(
        '{"m awq tensor": {"error": "gone"}, "m awq apart-twice": {"error": "gone"}}'
    )
    for more in ("", "compiled"):
        found = compare(tmp_path, 4, "H200", "vllm 0.22.1", 1, more)
        assert [(run.options, run.ranks, run.said) for run in found] == [
            (more, 4, "gone"),
            (f"2-of-each {more}".strip(), 4, "gone"),
        ]


def test_a_comparison_on_another_machine_gets_the_servers_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of compiled servers on cards, compared on a CPU without --device."""
    told = []
    monkeypatch.setattr("vllm_topologies.signal.signal", lambda *_: None)  # of this process
    monkeypatch.setattr("vllm_topologies.run", lambda *_: None)
    monkeypatch.setattr("vllm_topologies.compare", lambda *given: told.append(given[-1]) or [])
    for steps in (
        ["--steps", "run", "--device", "cuda", "--attention", "TRITON_ATTN"],
        ["--steps", "compare"],
    ):
        monkeypatch.setattr(
            "sys.argv", ["vllm_topologies.py", "--directory", str(tmp_path), *steps]
        )
        assert main() == 0
    assert told == ["compiled --attention-backend TRITON_ATTN"]


def test_a_given_attention_backend_reaches_the_mtp_layer() -> None:
    assert attention("", 1) == []
    assert attention("TRITON_ATTN", 0) == ["--attention-backend", "TRITON_ATTN"]
    *model, option, said = attention("TRITON_ATTN", 1)
    assert (model, option) == (["--attention-backend", "TRITON_ATTN"], "--speculative-config")
    assert json.loads(said) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "attention_backend": "TRITON_ATTN",
    }


def test_a_load_curve_ends_with_a_rate_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(
        pool: object,
        url: str,
        model: str,
        lengths: tuple[int, int],
        rate: float | None,
        requests: int,
    ) -> dict[str, Any]:
        if rate == 32:
            return {"failed": requests}  # without answers, no percentiles
        return {"failed": 0, "ttft_s_p95": 0.1, "tpot_ms_p95": 2.0}

    monkeypatch.setattr(load_curves, "measured", measured)
    asked = Namespace(
        input_len=8, output_len=8, rates=[16, 32, 64], per_rate=1, seconds=60, ttft=1, tpot=50
    )
    rows = list(load_curves.curve(None, "", "", asked))  # type: ignore[arg-type]
    assert [row["failed"] for row in rows] == [0, load_curves.FEWEST]
    told = {"topology"} | {
        f"{name}_p{percent}" for name in ("ttft_s", "tpot_ms") for percent in (50, 95)
    }
    assert set(load_curves.COLUMNS) - told <= {field.name for field in fields(SpeedRow)}
