"""Benchmarks of ranks run on a CPU with shapes that take seconds: what they time is for cards, but
the scripts must run."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.checkpoint.hub import find_model
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.tokenizer.chat import ChatTokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("r1_box.py", "guesses: "),
        ("r1_data_parallel.py", "dp prompts 4 "),
        ("r1_grid.py", "failed: nothing"),
        ("gathers.py", "rows 128 "),
    ],
)
def test_two_ranks_on_a_processor(script: str, last: str) -> None:
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


@pytest.mark.parametrize(
    ("script", "options", "last"),
    [
        (
            "head_cost.py",
            ("--users", "1", "--output-len", "12", "--input-len", "24"),
            "chosen / none",
        ),
        ("r1_constrained.py", ("--guesses", "0,2"), "guesses 2  users 2 "),
    ],
)
def test_one_device(script: str, options: tuple[str, ...], last: str) -> None:
    command = [sys.executable, str(BENCHMARKS / script), "--tiny", *options]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert last in ran.stdout


def test_the_published_grid_begins_with_what_is_wanted_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_cells_that_the_grid_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import r1_grid

    assert r1_grid.cells_of("4096x16,8192x8") == [(4096, 16), (8192, 8)]
    with pytest.raises(argparse.ArgumentTypeError, match=r"^4096x15 not in the grid: 128x1, "):
        r1_grid.cells_of("4096x16,4096x15")


@pytest.mark.parametrize(
    ("chunk", "doubles_at", "seconds", "gap"), [(2560, 23000, 3.0, 0.205), (1024, 0, 4.6, 0.16)]
)
def test_cells_by_the_scheduler_alone(
    chunk: int, doubles_at: int, seconds: float, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 prompts of 4096: with chunks that are as long as answers may wait they come sooner, and
    answers wait no longer than that."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scheduled_prompts

    tokenizer, times = ChatTokenizer(find_model("tiny-r1")), scheduled_prompts.Times(0.155)
    budget = StepBudget(8192, chunk, mixed=True, doubles_at=doubles_at)
    found = scheduled_prompts.cell(budget, times, tokenizer, 4096, 16)
    assert seconds - 0.5 < found["ttft_s"] < seconds
    assert found["largest_gap_s"] < gap
    assert scheduled_prompts.cell(budget, times, tokenizer, 128, 1)["ttft_s"] == pytest.approx(
        0.0355, abs=1e-4
    )
