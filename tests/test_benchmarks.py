"""Benchmarks of ranks run on a CPU with shapes that take seconds: what they time is for cards, but
the scripts must run."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "last"),
    [("r1_data_parallel.py", "dp prompts 4 "), ("r1_grid.py", "failed: nothing")],
)
def test_two_ranks_on_a_processor(script, last):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ran = subprocess.run(
        [*torchrun, str(BENCHMARKS / script), "--tiny"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert last in ran.stdout


def test_one_device():
    command = [sys.executable, str(BENCHMARKS / "decode_step.py"), "--tiny"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "TTFT of 32 tokens: " in ran.stdout


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_every_script_has_help(script):
    """Where nothing is installed that a card or another program needs."""
    if "def main()" not in script.read_text():
        pytest.skip("a module of the others")
    ran = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_the_published_grid_begins_with_what_is_wanted_most(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import r1_grid

    sizes, published = r1_grid.sizes_of_r1(), r1_grid.published_cells()
    places = [(cell.input_len, cell.users) for cell in sizes.cells]
    assert [(cell.input_len, cell.users) for cell in sizes.alone] == [
        (128, 1),
        *((1024 * at, 1) for at in (4, 8, 16, 20, 30, 60)),
    ]
    assert [(cell.input_len, cell.users) for cell in sizes.many] == [
        (1024 * at, users) for at, users in ((30, 2), (20, 2), (8, 8), (4, 16), (1, 32))
    ]
    assert len(published) == 30
    assert sorted(places) == sorted(
        [*((row["input_len"], row["concurrency"]) for row in published), (16384, 1)]
    )
    assert {cell.output_len for cell in sizes.cells if cell.users > 1} == {512}


def test_cells_that_the_grid_does_not_have_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import r1_grid

    assert r1_grid.cells_of("4096x16,8192x8") == [(4096, 16), (8192, 8)]
    with pytest.raises(argparse.ArgumentTypeError, match=r"^4096x15 not in the grid: 128x1, "):
        r1_grid.cells_of("4096x16,4096x15")
