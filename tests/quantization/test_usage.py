"""Time and memory of a run over its restarts, and the rates of this machine."""

import time

import torch

from quantkit.common.progress import Note
from quantkit.quantization.cost import measure_rate
from quantkit.quantization.usage import RunUsage


def test_a_restart_counts_what_earlier_parts_used(tmp_path):
    path, run = tmp_path / "spent.json", {"source": "a"}
    first = RunUsage(path, time.perf_counter() - 100.0, run)
    first.listener(lambda event: None)(Note("a unit"))
    second = RunUsage(path, time.perf_counter(), run)
    assert 100 <= second.seconds < 200
    assert second.peak_memory >= first.peak_memory
    other = RunUsage(path, time.perf_counter(), {"source": "b"})
    assert other.seconds < 100, "another run's"
    whole, notes = path.read_bytes(), []
    for damaged in (
        b"",
        whole[:-9],
        bytes(len(whole)),
        b"[]",
        whole.replace(b":1", b":-1"),
        b"\xff",
    ):
        path.write_bytes(damaged)
        third = RunUsage(path, time.perf_counter(), run)
        third.listener(notes.append)
        assert third.seconds < 100
    assert [str(path) in note.text for note in notes if isinstance(note, Note)] == [True] * 6


def test_rates_are_measured_without_other_threads(tmp_path):
    threads = torch.get_num_threads()
    rate = measure_rate(tmp_path, torch.device("cpu"))
    assert min(rate.flops, rate.values, rate.disk) > 0
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())
