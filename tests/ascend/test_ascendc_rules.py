"""The CPU's version of Ascend C ends a program that counts on what the chip does not promise, and
no other."""

import ctypes
import subprocess
import sys

import pytest
import torch
from ascend import ascendc
from ascend.guard import OutsideOperands

RULES = (
    "data is there from DeQue on",
    "a freed buffer is not read",
    "what another instruction wrote is read behind a barrier",
    "the atomic mode is off at the end",
    "every buffer is given back",
    "nothing is written past a buffer",
    "192 KiB of buffers",
    "who waits is told",
    "a flag that is set is waited for",
    "both vector cores tell the cube core",
    "flags 11 to 14 are SyncAll's",
    "all cores meet at SyncAll",
    "eight event ids of a pair of pipes",
    "SyncAll of vector cores wants a type that is scheduled",
    "a cube core has two vector cores",
    "SyncAll wants batch mode",
)


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    return ascendc.compiled(ascendc.CPU / "rules.cpp", tmp_path_factory.mktemp("ascendc"))


@pytest.mark.parametrize("rule", range(len(RULES)), ids=RULES)
def test_a_rule(rules, rule, capfd):
    values = torch.arange(128.0)
    ascendc.launch(rules, rule, True, [values], [])
    with pytest.raises(OutsideOperands):
        ascendc.launch(rules, rule, False, [torch.arange(128.0)], [])
    assert ".h:" in capfd.readouterr().err, "it says which rule"


def test_what_is_sent_arrives_late(rules):
    values = torch.arange(192.0)
    values[64:] = float("nan")
    rules.late(ctypes.c_void_p(values.data_ptr()))
    assert torch.equal(values[64:128], 2 * values[:64])
    assert values[128:].isnan().all()


@pytest.mark.parametrize("kernel", ["fp4_gemv", "int4_grouped"])
def test_goldens_as_files(kernel, tmp_path):
    """What `make ascendc RUN_MODE=cpu` builds with CANN's toolkit and runs, here over the tests' own
    headers: the golden's bits, and another golden is refused."""
    source, program = ascendc.SOURCES / "on_cpu", tmp_path / "program"
    subprocess.run([sys.executable, source / "goldens.py", tmp_path], check=True)
    options = ["-std=c++17", "-O1", "-Wall", "-Werror", f"-DKERNEL_{kernel}", "-x", "c++"]
    folders = ["-I", ascendc.CPU, "-I", ascendc.SOURCES]
    subprocess.run(["g++", *options, *folders, source / "main.asc", "-o", program], check=True)
    folder = tmp_path / kernel

    def run():
        return subprocess.run([program, folder], capture_output=True, text=True, check=False)

    done = run()
    assert (done.returncode, done.stdout[:5]) == (0, "0 of "), done.stdout + done.stderr
    golden = bytearray((folder / "golden").read_bytes())
    golden[-1] ^= 0x80  # a sign
    (folder / "golden").write_bytes(golden)
    done = run()
    assert (done.returncode, done.stdout[:5]) == (1, "1 of "), done.stdout
