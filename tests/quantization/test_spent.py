"""Time and memory of a run over its restarts, and the rates of this machine."""

import time
from pathlib import Path

import torch

from quantkit.common.progress import Note
from quantkit.quantization import spent
from quantkit.quantization.machine import measure_rate


def test_a_restart_counts_what_was_spent_before(tmp_path: Path) -> None:
    path, run = tmp_path / "spent.json", {"source": "a"}
    before = time.perf_counter() - 100.0
    first = spent.Spent(path, before, run)
    first.listening(lambda event: None)(Note("a unit"))
    second = spent.Spent(path, time.perf_counter(), run)
    assert 100 <= second.seconds < 200
    assert second.peak_memory >= first.peak_memory
    other = spent.Spent(path, time.perf_counter(), {"source": "b"})
    assert other.seconds < 100, "another run's"


def test_rates_are_measured_without_other_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    rate = measure_rate(tmp_path, torch.device("cpu"))
    assert min(rate.flops, rate.values, rate.disk) > 0
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())
