"""quantkit go: what it proposes for which devices, what it refuses before work, and that every step
is done once whatever stops it."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import make_model
import pytest
import r1_headers
from commands import typed
from refused import refused

from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.grids.schemes import SCHEMES
from quantkit.guide import job as job_module
from quantkit.guide import proposal
from quantkit.guide.proposal import (
    candidates,
    choose_candidate,
    expected_losses,
)
from quantkit.guide.record import Record
from quantkit.planning.devices import Devices, find_devices
from quantkit.planning.options import PlanOptions

GIB = 2**30


# --- devices
# -----------------------------------------------------------------------------------------------------------------


def test_what_this_machine_has():
    assert find_devices("cpu").device == "cpu"
    assert find_devices(None).count >= 1


# --- proposals
# ---------------------------------------------------------------------------------------------------------------


def proposed(path, devices, scheme=None, **options):
    """scheme, engine, devices"""
    box = find_devices(devices)
    found = candidates(Checkpoint.open(path), box, PlanOptions(**options), scheme)
    chosen, _ = choose_candidate(found, box)
    return chosen.scheme, chosen.engine, chosen.devices


@pytest.fixture(scope="module")
def r1(tmp_path_factory):
    cut = r1_headers.r1_config(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=64,
        num_nextn_predict_layers=0,
    )
    return r1_headers.write_headers(tmp_path_factory.mktemp("r1") / "r1", cut, shards=4)


def test_a_box_of_each_kind(r1):
    """Three layers of R1 in FP8. Eight bits are no smaller, so an NVIDIA box gets four; an NPU
    reads no FP8."""
    assert proposed(r1, "8xH100") == ("fp4-w4a16", "vllm", 8)
    assert proposed(r1, "8x910B1") == ("int8-a8w8c16", "vllm-ascend", 8)
    assert proposed(r1, "8x16GiB", engine="sglang")[1] == "sglang"
    assert proposed(r1, "8xH100", scheme="awq-w4a16") == ("awq-w4a16", "vllm", 8)


def test_eight_bits_that_do_not_fit_are_passed_over(r1):
    """On devices between what int8 and what the next scheme needs."""
    checkpoint, wanted = Checkpoint.open(r1), PlanOptions(context=128)
    roomy = {
        one.scheme: one.plan
        for one in candidates(
            checkpoint, Devices(8, 64 * GIB, device="npu", name="8 x 64 GiB"), wanted
        )
    }
    eight, four = roomy["int8-a8w8c16"], roomy["awq-w4a16"]
    needed = (
        four.devices.reserve_bytes + (eight.devices.weight_bytes + four.devices.weight_bytes) / 2
    )
    box = Devices(8, round(needed / 0.9), device="npu", name="8 x little")
    chosen, why = choose_candidate(candidates(checkpoint, box, wanted), box)
    assert chosen.scheme == "awq-w4a16"
    assert "int8-a8w8c16 would not fit" in why


def test_a_processor_gets_int4_unless_the_model_is_small(r1, tiny_checkpoint):
    roomy = Devices(1, 512 * GIB, device="cpu", name="a processor")
    for path, claimed in ((r1, True), (tiny_checkpoint, False)):
        found = candidates(Checkpoint.open(path), roomy, PlanOptions())
        chosen, why = choose_candidate(found, roomy)
        assert chosen.scheme == "awq-w4a16"
        assert ("--scheme takes another" in why) == claimed
    small = [one for one in found if one.plan and one.scheme in ("awq-w4a16", "rtn-w4a16")][::-1]
    chosen, why = choose_candidate(small, roomy)
    assert chosen.scheme == "rtn-w4a16"
    assert "INT4 below 67 M parameters may lose more" in why
    tell = expected_losses().describe
    assert "SmolLM2" in tell("awq-w4a16", 200_000_000)
    assert tell("awq-w4a16", 8_000_000_000) == tell("rtn-w4a16", 135_000_000) == ""


def test_devices_that_cannot_share_a_model_are_left_out(tiny_checkpoint):
    """256 input channels in groups of 128 are cut in two at most."""
    assert proposed(tiny_checkpoint, "8xH100", scheme="awq-w4a16") == ("awq-w4a16", "vllm", 1)


@pytest.mark.parametrize("devices", ["8xH100", "cpu"])
def test_an_architecture_that_nothing_serves_is_refused(devices, tmp_path):
    source = make_model.random_dense(tmp_path / "source", model_type="mamba")
    with refused("mamba"):
        proposed(source, devices)


# --- the job
# -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "one who asks is told what many found"}\n' * 300)
    return tmp_path


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def go(model, more=""):
    asked = "--calibration text.jsonl --out out --yes --devices 2xH100 --samples 4 --seq-len 48"
    return typed(f"go {model} {asked} {more}")


def test_time_counts_the_documents_that_are_measured(tmp_path, monkeypatch):
    def operations(count):
        found = job_module.CalibrationText(100, [[0] * 100] * count, "")
        monkeypatch.setattr(proposal, "read_calibration_text", lambda *given: found)
        request = job_module.GoRequest("tiny-r1", tmp_path, find_devices("cpu"))
        return proposal.propose(request).measuring.operations

    assert operations(6) == pytest.approx(2 * operations(3))


def test_the_whole_job(tiny_checkpoint, here):
    said = go(tiny_checkpoint, "--score --limit 1 --json")
    assert said.code == 0, said
    made, model = said.json, Path(said.json["model"])
    assert made["quality"]["kl"] > 0
    assert made["quality"]["baseline_ppl"] > 1
    assert "that calibration did not take" in made["quality"]["on"]
    assert "tiny-math" in made["scores"]
    assert made["verdict"].split(":")[0] in ("Good", "Fair", "Poor")
    assert Checkpoint.open(model).scheme is SCHEMES[made["scheme"]]
    assert f"vllm serve {made['model']} " in made["launch"][0]
    assert made["launch"][0] == (here / "out" / "launch.sh").read_text()
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    again = go(tiny_checkpoint, "--score --limit 1 --json")
    assert again.json == made
    for step in ("quantizing", "measuring against the source", "scoring", "launch"):
        assert f"{step}: done" in again.err
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    other = go(tiny_checkpoint, "--scheme awq-w4a16")
    assert (other.code, other.errors) == (1, 1)
    told = "was begun with scheme not given; give the same to go on, or another --out"
    assert told in other.error


def test_the_model_writes_calibration_text_unless_some_is_named(tiny_checkpoint, here):
    asked = f"go {tiny_checkpoint} --yes --devices 2xH100 --samples 4 --seq-len 48 --json"
    for more, written in (("--out out", True), ("--out other --calibration builtin", False)):
        said = typed(f"{asked} {more}")
        assert said.code == 0, said
        assert (Path(said.json["model"]) / SHIPPED_TEXT).is_file() == written
        assert "quantkit's own text that calibration did not take" in said.json["quality"]["on"]
    assert typed(f"{asked} --out out").code == 0, "complete, and begun with that text"


@pytest.mark.parametrize("step", ["quantize", "measure", "launch", "a unit"])
def test_stopped_anywhere_it_goes_on(tiny_checkpoint, here, monkeypatch, step):
    """Just before a step is entered as done, and within quantizing. Nothing that was entered is
    done again."""
    with monkeypatch.context() as patch:
        if step == "a unit":
            stop_after_units(patch, 5)
        else:
            stop_before_entering(patch, step)
        said = go(tiny_checkpoint)
    assert said.code == 130, said
    assert "to resume: quantkit go " in said.err
    assert not list((here / "out").glob("go.json.*"))
    entered = json.loads((here / "out" / "go.json").read_text())["steps"]
    begun, measure = [], job_module.measure
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "measure", lambda *a, **o: (begun.append(1), measure(*a, **o))[1])
        said = go(tiny_checkpoint)
    assert said.code == 0, said
    assert "resuming in out" in said.err
    assert bool(begun) == ("measure" not in entered)
    told = {"a unit": "5 of", "quantize": ""}
    assert told.get(step, "quantizing: done") in said.err
    steps = json.loads((here / "out" / "go.json").read_text())["steps"]
    assert list(steps) == ["quantize", "measure", "launch"]


def stop_before_entering(patch, step):
    original = Record.finish

    def finish(self, name, found):
        if name == step:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, name, found)

    patch.setattr(Record, "finish", finish)


def stop_after_units(patch, count):
    original, seen = CheckpointWriter.write, 0

    def write(self, *rest):
        nonlocal seen
        original(self, *rest)
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(CheckpointWriter, "write", write)


def test_refused_before_work(tiny_checkpoint, here, monkeypatch):
    """One line each, and nothing is left behind."""
    faults = {
        "--devices 8*64 --yes": "devices '8*64' make no sense",
        "--devices 1x4GiB --yes": "no scheme fits 1 x 4 GiB",
        "--devices cpu": "no terminal to ask on; give --yes",
        "--scheme w3 --yes": "scheme 'w3' is not known",
        "--devices cpu --engine vllm-ascend --yes": "vllm-ascend is not launched on",
        "--devices 1xH100 --scheme fp8-w8a8 --yes": "saves less than 10% of the source's",
        "--score --tasks chess --yes": "chess",
    }
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    for arguments, told in faults.items():
        said = typed(f"go {tiny_checkpoint} --out out --calibration text.jsonl {arguments}")
        assert (said.code, said.errors) == (2 if "is not known" in said.error else 1, 1), said
        assert told in said.error
        assert not (here / "out").exists(), arguments


def test_a_disk_that_is_too_small(tiny_checkpoint, here, monkeypatch):
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    said = go(tiny_checkpoint)
    assert (said.code, said.errors) == (1, 1)
    assert "of disk and" in said.error
    assert "has 1.00 kB free; free some, or give an --out on another disk" in said.error
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    "damage", ["{", "[]", {"choice": {"x": 1}}, {"steps": {"plan": {"at": 1}}}, {"asked": 5}]
)
def test_a_damaged_record_is_named(damage, tiny_checkpoint, here):
    whole = {"quantkit": "0", "asked": {}, "choice": None, "steps": {}}
    (here / "out").mkdir()
    text = damage if isinstance(damage, str) else json.dumps(whole | damage)
    (here / "out" / "go.json").write_text(text)
    said = go(tiny_checkpoint)
    assert (said.code, said.errors) == (1, 1)
    assert "go.json" in said.error


def test_it_asks(tiny_checkpoint, here, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: "n\n"))
    monkeypatch.setattr("builtins.input", lambda: "n")
    asked = "--calibration text.jsonl --out out --devices cpu --samples 4 --seq-len 48"
    said = typed(f"go {tiny_checkpoint} {asked}")
    assert said.code == 0
    assert "within a factor of 1.5" in " ".join(said.err.replace("│", " ").split())
    assert "not begun" in said.err
    assert not (here / "out").exists()


def test_a_proposal_without_a_terminal_takes_the_options_of_quantize(
    tiny_checkpoint, here, monkeypatch
):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    asked = f"go {tiny_checkpoint} --out out --devices cpu --calibration text.jsonl --dry-run"
    before = typed(f"{asked} --json").json
    assert (before["scheme"], before["engine"]) == ("awq-w4a16", "quantkit")
    assert {"int8-a8w8c16", "rtn-w4a16"} <= before["others"].keys()
    more = "--keep attention --group-size 64 --format compressed-tensors --json"
    mixed = typed(f"{asked} {more}").json
    assert (mixed["scheme"], mixed["others"]) == ("awq-w4a16", {})
    assert mixed["plan"]["format"] == "compressed-tensors"
    assert not (here / "out").exists()
