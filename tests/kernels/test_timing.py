"""Timing on a device that works behind the host's back: what counts is the device's clock, not the
host's."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from quantkit_kernels import accelerator, timing

CPU = torch.device("cpu")


class Driver:
    """A device with a clock of its own, in milliseconds. Launching takes the host no time; `work`
    advances the device."""

    def __init__(self, capturable=True):
        self.clock, self.capturable = 0.0, capturable
        self.captured = None
        self.replays = self.synchronized = 0
        driver = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = driver.clock

            def synchronize(self):
                driver.synchronized += 1

            def elapsed_time(self, later):
                return later.at - self.at

        class NPUGraph:
            def __init__(self):
                self.work = []

            def replay(self):
                driver.replays += 1
                driver.clock += sum(self.work)

        self.Event, self.NPUGraph = Event, NPUGraph

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self): ...

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self):
        self.synchronized += 1

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.captured = []
        try:
            yield
            graph.work = self.captured
        finally:
            self.captured = None

    def work(self, milliseconds):
        def launch():
            if self.captured is None:
                self.clock += milliseconds
            elif self.capturable:
                self.captured.append(milliseconds)
            else:
                raise RuntimeError("this one waits for the host\nand says so at length")

        return launch


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(accelerator, "module", lambda device: made)
    return made


def test_an_npu_graph_is_replayed_and_the_devices_clock_counts(driver):
    seconds = timing.seconds_per_call([driver.work(3.0), driver.work(5.0)], CPU)
    assert seconds == pytest.approx(4e-3)
    assert driver.replays > 1
    assert driver.synchronized > driver.replays


def test_what_cannot_be_captured_is_timed_all_the_same_and_said(driver):
    driver.capturable = False
    with pytest.warns(
        RuntimeWarning, match="launch by launch, not captured: this one waits for the host$"
    ):
        assert timing.seconds_per_call([driver.work(3.0)], CPU) == pytest.approx(3e-3)
    assert driver.replays == 0


def test_sides_take_turns(driver, monkeypatch):
    log = []

    class Logged(driver.NPUGraph):
        def replay(self):
            log.append(self.work[0])
            super().replay()

    monkeypatch.setattr(driver, "NPUGraph", Logged)
    seconds = timing.seconds_in_turns(
        [[driver.work(1.0)], [driver.work(4.0), driver.work(6.0)]], CPU
    )
    assert seconds == [pytest.approx(1e-3), pytest.approx(5e-3)]
    assert log == [1.0, 4.0] * (driver.replays // 2)
