"""Benchmarks of ranks run on a CPU with shapes that take seconds: what they time is for cards, but the scripts must run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("script", "last"), [("r1_box.py", "guesses: "), ("r1_data_parallel.py", "dp prompts 4 ")])
def test_two_ranks_on_a_processor(script: str, last: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, str(BENCHMARKS / script), "--tiny"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert last in ran.stdout
