"""Benchmarks of ranks run on a CPU with shapes that take seconds: what they time is for cards, but
the scripts must run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def ran(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("script", "last"),
    [("r1_data_parallel.py", "dp prompts 4 "), ("r1_grid.py", "failed: nothing")],
)
def test_two_ranks_on_a_processor(script, last):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert last in ran(*torchrun, BENCHMARKS / script, "--tiny")


def test_one_device():
    assert "TTFT of 32 tokens: " in ran(BENCHMARKS / "decode_step.py", "--tiny")


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_every_script_has_help(script):
    """Where nothing is installed that a card or another program needs."""
    if "def main()" not in script.read_text():
        pytest.skip("a module of the others")
    ran(script, "--help")
