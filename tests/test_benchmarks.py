"""Benchmarks of ranks run on a CPU with shapes that take seconds: what they time is for cards, but the scripts must run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "last"), [("r1_box.py", "guesses: "), ("r1_data_parallel.py", "dp prompts 4 "), ("r1_grid.py", "failed: nothing")]
)
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


def test_one_device() -> None:
    command = [sys.executable, str(BENCHMARKS / "head_cost.py"), "--tiny", "--users", "1", "--output-len", "12", "--input-len", "24"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "chosen / none" in ran.stdout


def test_the_published_grid_begins_with_what_is_wanted_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import r1_grid

    sizes, published = r1_grid.sizes_of_r1(), r1_grid.published_cells()
    places = [(cell.input_len, cell.users) for cell in sizes.cells]
    assert [(cell.input_len, cell.users) for cell in sizes.alone] == [(128, 1), *((1024 * at, 1) for at in (4, 8, 16, 20, 30, 60))]
    assert [(cell.input_len, cell.users) for cell in sizes.many] == [
        (1024 * at, users) for at, users in ((30, 2), (20, 2), (8, 8), (4, 16), (1, 32))
    ]
    assert len(published) == 30
    assert sorted(places) == sorted([*((row["input_len"], row["concurrency"]) for row in published), (16384, 1)])
    assert {cell.output_len for cell in sizes.cells if cell.users > 1} == {512}
