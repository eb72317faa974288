"""`make acceptance-npu`, rehearsed on the double: one folder, whatever becomes of a step."""

import json
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest
from imported import module_at

ROOT = Path(__file__).parents[2]
ON_THE_DOUBLE = (sys.executable, str(Path(__file__).with_name("on_the_double.py")))


@pytest.fixture(scope="module")
def acceptance():
    return module_at(ROOT / "tools" / "acceptance_npu.py")


def is_alive(pid):
    """Whether a process runs; one that is dead and that nothing asked for does not."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return False
        time.sleep(0.1)
    return True


def test_the_whole_day(acceptance, tmp_path, monkeypatch):
    """Every step but npu-smi, which is not here, compiling and speeds; one that cannot be started,
    and one that runs on, end no other."""
    folders = (ROOT / name for name in ("tests", "tests/support", "", "kernels"))
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    chosen = acceptance.steps("cpu", None, 1, (*ON_THE_DOUBLE, "-m", "quantkit"), ON_THE_DOUBLE)
    assert sum(step.seconds for step in acceptance.steps("npu", "MODEL", 8)) <= 30 * 60
    pid = tmp_path / "pid"
    slow = acceptance.AcceptanceStep("slow", ("sh", "-c", f"sleep 600 & echo $! > {pid}; wait"), 1)
    says = "import sys; print('no object'); sys.stderr.write('one line | more\\nthe last\\n\\n')"
    silent = acceptance.AcceptanceStep("silent", (sys.executable, "-c", says), 20)
    names = ("machine", "npu-smi", "packages", "operators", "tokens", "tokens-on-cpu")
    short = [step for step in chosen if step.name in names]
    told = acceptance.accept(tmp_path / "day", [slow, silent, *short])
    ended = {one["name"]: one["how"] for one in told["steps"]}
    assert ended["slow"] == "not done after 1 s"
    assert not is_alive(int(pid.read_text())), "what it started ended with it"
    with tarfile.open(acceptance.archive_of(tmp_path / "day")) as archive:
        kept = json.loads(archive.extractfile("day/summary.json").read())
    assert kept == told
    assert kept["schema"] == acceptance.SCHEMA
    assert "no JSON" in ended["silent"]
    assert "could not be started" in ended["npu-smi"]
    logs = {
        step.name: (tmp_path / "day" / f"{step.name}.log").read_text()[-800:]
        for step in short
        if step.name != "npu-smi"
    }
    assert {name: how for name, how in ended.items() if name in logs} == dict.fromkeys(
        logs, "ok"
    ), logs
    assert told == json.loads((tmp_path / "day" / "summary.json").read_text())
    assert told["operators"] == 3
    assert told["operators_out_of_tolerance"] == []
    assert told["same_text_as_on_cpu"] is True
    machine = json.loads((tmp_path / "day" / "machine.json").read_text())
    assert len(machine["tokens"][0]) == 8
    assert "not on cpu" in machine["why_decode_steps_are_not_captured"]
    page = (tmp_path / "day" / "summary.md").read_text()
    assert "| one line / more the last |" in page
    assert f"Versions: torch {machine['versions']['torch']}." in page


def test_what_is_wrong_is_in_the_summary(acceptance, tmp_path):
    row = {"operator": "linear_int4", "backend": "torch_npu", "case": "q_b"}
    row |= {"error": 0.5, "tolerance": 0.01}
    (tmp_path / "operators.json").write_text(json.dumps({"rows": [row]}))
    (tmp_path / "tokens.json").write_text(json.dumps({"text": "19"}))
    (tmp_path / "tokens-on-cpu.json").write_text(json.dumps({"text": "91"}))
    (tmp_path / "ascendc.log").write_text(
        "CMake Error:\n  ascendc.cmake not found; source\n  set_env.sh\n\nmake: *** [ascendc] "
        "Error 1\n"
    )
    told = acceptance.summary(
        tmp_path,
        [acceptance.Ended("tokens", "ok", 1.0), acceptance.Ended("ascendc", "ended with 2", 1.0)],
    )
    assert told["operators_out_of_tolerance"] == ["linear_int4 of torch_npu, q_b"]
    assert told["same_text_as_on_cpu"] is False
    assert "| CMake Error: ascendc.cmake not found; source set_env.sh |" in acceptance._page(told)
