"""torch_npu is installed and CANN's libraries are not there, as before set_env.sh: the CPU works, and
the NPU's line names what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_npu

ROOT = Path(__file__).parents[3]
STAND_INS = ("libascendcl.so", "libhccl.so", "libacl_op_compiler.so", "libge_runner.so")


@pytest.fixture(scope="module")
def without_cann(tmp_path_factory):
    """The environment of a process that finds torch_npu without its stand-ins of CANN."""
    folder = tmp_path_factory.mktemp("site")
    source = Path(torch_npu.__file__).parent
    shutil.copytree(
        source,
        folder / "torch_npu",
        copy_function=os.symlink,
        ignore=lambda _, names: [name for name in names if name in STAND_INS],
    )
    for library in (folder / "torch_npu" / "lib").glob("*.so"):  # $ORIGIN is where a file is
        target = library.resolve()
        library.unlink()
        os.link(target, library)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "kernels")))
    kept = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    return kept | {"PYTHONPATH": path}


@pytest.mark.parametrize(
    ("device", "code", "words"),
    [
        ("cpu", 0, "torch_npu"),
        ("npu", 1, "no Ascend NPU is usable here: torch_npu finds no lib"),
    ],
)
def test_a_command(device, code, words, without_cann):
    command = [sys.executable, "-m", "quantkit", "kernels", "--device", device]
    done = subprocess.run(command, env=without_cann, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    if code:
        assert "set_env.sh" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
