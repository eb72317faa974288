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

from quantkit import QuantkitError
from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.deploy.launch import deploy
from quantkit.grids.schemes import SCHEMES
from quantkit.guide import job as job_module
from quantkit.guide import propose as propose_module
from quantkit.guide.proposal import (
    ENGINES,
    QUANTKIT,
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


DEVICES = (
    "8x64GiB 8 64 cuda, 8x910C 8 64 npu, 8xh100 8 79 cuda, 16x910B4 16 32 npu, 1x24GiB 1 24 cuda"
)
NO_DEVICES = (
    "|8|8x|x64GiB|0x64GiB|8x64|8*64GiB|8x-1GiB|12x64GiB|8xGiB|8xV9000|-1x64GiB|2xcpu|8x0GiB"
)


def test_devices_are_read():
    for case in DEVICES.split(", "):
        text, count, gib, device = case.split()
        found = find_devices(text)
        size = (found.count, found.memory_bytes, found.device)
        assert size == (int(count), int(gib) * GIB, device)


def test_what_this_machine_has():
    assert find_devices("cpu").device == "cpu"
    assert find_devices(None).count >= 1


@pytest.mark.parametrize("text", NO_DEVICES.split("|"))
def test_bad_devices_are_one_line_with_a_remedy(text):
    with pytest.raises(QuantkitError) as caught:
        find_devices(text)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


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
    losses = expected_losses()
    assert "SmolLM2" in losses.describe("awq-w4a16", 200_000_000)
    assert (
        losses.describe("awq-w4a16", 8_000_000_000)
        == losses.describe("rtn-w4a16", 135_000_000)
        == ""
    )


def test_a_model_that_fits_nowhere_says_what_it_needs(r1):
    with refused(r"no scheme fits 1 x 8 GiB.*needs \d+\.\d GB of each of 1 devices"):
        proposed(r1, "1x8GiB")


def test_devices_that_cannot_share_a_model_are_left_out(tiny_checkpoint):
    """256 input channels in groups of 128 are cut in two at most."""
    assert proposed(tiny_checkpoint, "8xH100", scheme="awq-w4a16") == ("awq-w4a16", "vllm", 1)


def test_an_architecture_that_nothing_serves_is_refused(tmp_path):
    config = make_model.tiny_config(model_type="mamba")
    source = make_model.write_dense(tmp_path / "source", config, make_model.random_tensors(config))
    for devices in ("8xH100", "cpu"):
        with refused("mamba"):
            proposed(source, devices)


def test_a_fault_of_the_source_keeps_its_remedy(tmp_path):
    config = make_model.tiny_config()
    tensors = make_model.random_tensors(config)
    del tensors["model.norm.weight"]
    source = make_model.write_dense(tmp_path / "source", config, tensors)
    with refused(r"lacks model\.norm\.weight; download the missing shard"):
        proposed(source, "cpu")


def test_engines_have_launches_and_schemes_have_expected_losses(tiny_checkpoint):
    for device, engines in ENGINES.items():
        for engine in engines:
            if engine != QUANTKIT:
                with refused(r"no layout|has no"):
                    deploy(tiny_checkpoint, engine, layout="none", device=device)
    assert set(expected_losses().order) == SCHEMES.keys()


# --- the job
# -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["the", "one", "who", "asks", "is", "told", "what", "many", "have", "found"]
    lines = (
        json.dumps({"text": " ".join(words[(i * 7 + j) % len(words)] for j in range(30))})
        for i in range(60)
    )
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
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
        found = [[0] * 100] * count, ""
        monkeypatch.setattr(propose_module, "measured_documents", lambda *given: found)
        request = job_module.GoRequest("tiny-r1", tmp_path, find_devices("cpu"))
        return propose_module.propose(request).measuring.operations

    assert operations(6) == pytest.approx(2 * operations(3))


def test_the_whole_job(tiny_checkpoint, here):
    said = go(tiny_checkpoint, "--score --limit 1 --json")
    assert said.code == 0, said
    made = said.json
    assert made["quality"]["kl"] > 0
    assert made["quality"]["baseline_ppl"] > 1
    assert "that calibration did not take" in made["quality"]["on"]
    assert "tiny-math" in made["scores"]
    assert made["verdict"].split(":")[0] in ("Good", "Fair", "Poor")
    assert Checkpoint.open(Path(made["model"])).scheme is SCHEMES[made["scheme"]]
    assert f"vllm serve {made['model']} " in made["launch"][0]
    assert made["launch"][0] == (here / "out" / "launch.sh").read_text()
    before = {path: path.stat().st_mtime_ns for path in (here / "out").rglob("*.safetensors")}
    again = go(tiny_checkpoint, "--score --limit 1 --json")
    assert again.json == made
    assert all(
        f"{step}: done" in again.err
        for step in ("quantizing", "measuring against the source", "scoring", "launch")
    ), again.err
    assert {
        path: path.stat().st_mtime_ns for path in (here / "out").rglob("*.safetensors")
    } == before
    other = go(tiny_checkpoint, "--scheme awq-w4a16")
    assert (other.code, other.errors) == (1, 1)
    assert (
        "was begun with scheme not given; give the same to go on, or another --out" in other.error
    )


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
    entered = list(json.loads((here / "out" / "go.json").read_text())["steps"])
    begun = []
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "measure", counted(job_module.measure, begun, "measure"))
        said = go(tiny_checkpoint)
    assert said.code == 0, said
    assert "resuming in out" in said.err
    assert ("measure" in begun) == ("measure" not in entered)
    if step == "a unit":
        assert "5 of" in said.err
    elif step != "quantize":
        assert "quantizing: done" in said.err
    assert list(json.loads((here / "out" / "go.json").read_text())["steps"]) == [
        "quantize",
        "measure",
        "launch",
    ]


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


def counted(function, begun, name):
    def call(*given, **options):
        begun.append(name)
        return function(*given, **options)

    return call


def test_refused_before_work(tiny_checkpoint, here, monkeypatch):
    """One line each, and nothing is left behind."""
    faults = {
        "--devices 8*64 --yes": "devices '8*64' make no sense",
        "--devices 1x4GiB --yes": "no scheme fits",
        "--devices cpu": "no terminal to ask on; give --yes",
        "--scheme w3 --yes": "scheme 'w3' is not known",
        "--engine tgi --yes": "engine 'tgi' is not known",
        "--devices cpu --engine vllm-ascend --yes": "vllm-ascend is not launched on",
        "--score --tasks chess --yes": "chess",
        "--score --tasks humaneval --yes": "humaneval",
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


def test_a_damaged_record_is_named(tiny_checkpoint, here):
    (here / "out").mkdir()
    whole = {"quantkit": "0", "asked": {}, "choice": None, "steps": {}}
    damaged = ({"choice": {"x": 1}}, {"steps": {"plan": {"at": 1}}}, {"steps": []}, {"asked": 5})
    broken = (json.dumps(whole | change) for change in damaged)
    for text in ("{", "[]", '{"asked": {}}', *broken):
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
    asked = (
        f"go {tiny_checkpoint} --out out --devices cpu --calibration text.jsonl --dry-run --json"
    )
    before = typed(asked).json
    assert (before["scheme"], before["engine"]) == ("awq-w4a16", "quantkit")
    assert {"int8-a8w8c16", "rtn-w4a16"} <= before["others"].keys()
    mixed = typed(f"{asked} --keep attention --group-size 64 --format compressed-tensors").json
    assert mixed["scheme"] == "awq-w4a16"
    assert mixed["plan"]["format"] == "compressed-tensors"
    assert mixed["others"] == {}
    assert not (here / "out").exists()
