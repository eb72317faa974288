"""Time and memory of a run over its restarts, and the rates of this machine."""

import time

import pytest
import torch

from quantkit.checkpoint.reader import open_headers
from quantkit.common.progress import Note, RunUsage
from quantkit.quantization.cost import (
    CALIBRATED_SHARE,
    H200,
    comparison_work,
    expected_seconds,
    job_work,
    measure_rate,
    unit_shares,
    writing_work,
)
from quantkit.quantization.job import open_job
from quantkit.quantization.options import QuantizeOptions
from quantkit.quantization.request import read_request, read_scheme


def test_a_restart_counts_what_earlier_parts_used(tmp_path):
    path, run = tmp_path / "spent.json", {"source": "a"}
    first = RunUsage(path, time.perf_counter() - 100.0, run)
    first.listener(lambda event: None)(Note("a unit"))
    second = RunUsage(path, time.perf_counter(), run)
    assert 100 <= second.seconds < 200
    assert first.peak_memory <= second.peak_memory, "in this order: it grows"
    other = RunUsage(path, time.perf_counter(), {"source": "b"})
    assert other.seconds < 100, "another run's"
    whole, notes = path.read_bytes(), []
    for damaged in (b"", whole[:-9], b"[]", whole.replace(b":1", b":-1"), b"\xff"):
        path.write_bytes(damaged)
        third = RunUsage(path, time.perf_counter(), run)
        third.listener(notes.append)
        assert third.seconds < 100
    assert [str(path) in note.text for note in notes if isinstance(note, Note)] == [True] * 5


def test_rates_are_measured_without_other_threads(tmp_path):
    threads = torch.get_num_threads()
    rate = measure_rate(tmp_path, torch.device("cpu"))
    assert min(rate.flops, rate.values, rate.disk) > 0
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())


def test_work_is_counted_beyond_matrix_products():
    """Each part grows with what it is of; a run's units share all of its time."""

    def job(scheme, **options):
        chosen, recipe, mixture = read_scheme(scheme, QuantizeOptions(**options))
        request = read_request(chosen, "auto", None, recipe, mixture)
        return open_job(request, open_headers("tiny-r1"))

    own, other = job("awq-w4a16"), job("awq-w4a16", samples=64, seq_len=1024)
    plain, longer = (job_work(one, one.linears, 0) for one in (own, other))
    assert longer.operations < 1.2 * plain.operations, "the same calibration tokens"
    assert longer.exact > 1.9 * plain.exact, "attention"
    compared = [comparison_work(own, tokens, 512) for tokens in (0, 512, 1024)]
    seconds = [expected_seconds(one, H200) for one in compared]
    assert seconds == pytest.approx([0, seconds[1], 2 * seconds[1]])
    assert writing_work(own, 1024, 512) == compared[1], "by one model of the two"
    assert sum(unit_shares(own).values()) == pytest.approx(CALIBRATED_SHARE)
