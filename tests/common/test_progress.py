"""How far long work is and how long it will take: from the share that is done and a clock, in a
terminal, a log and a notebook."""

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest

from quantkit.common.progress import ProgressLine, TimeLeft


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_rest_follows_from_the_pace():
    clock = Clock()
    left = TimeLeft(clock=clock)
    assert left.seconds is None
    for share in (0.1, 0.2, 0.3):
        clock.now += 10
        left.at(share)
    assert left.seconds == pytest.approx(70)
    clock.now += 20
    assert left.seconds == pytest.approx(50), "time passes between two steps"
    clock.now += 500
    assert left.seconds == pytest.approx(35), "and a step that takes long does not end the work"


def test_what_was_there_before_took_no_time_and_what_is_expected_counts_at_first():
    clock = Clock()
    left = TimeLeft(clock=clock)
    clock.now += 1
    left.at(0.5, found=True)
    clock.now += 10
    left.at(0.6)
    assert left.seconds == pytest.approx(0.4 / 0.1 * 11, rel=0.01)
    left = TimeLeft(1000, clock)
    assert left.seconds == pytest.approx(1000)
    clock.now += 5
    left.at(0.001)
    assert 900 < (left.seconds or 0) < 1100, "the first step was slow"
    clock.now += 2000
    left.at(0.5)
    assert left.seconds == pytest.approx(2000, rel=0.2), "the pace that was seen counts"


def shown(stream, seconds, steps):
    clock = Clock()
    with ProgressLine("working", stream=stream, clock=clock) as meter:
        for step in range(1, steps + 1):
            clock.now += seconds / steps
            meter.show(step / steps, f"part {step}\x1b[31m")
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then():
    assert shown(io.StringIO(), 5, 10) == [], "short work prints nothing"
    lines = shown(io.StringIO(), 200, 100)
    assert lines[0] == "working: 5%, 3 min 10 s left, part 5\\x1b[31m"
    assert 5 < len(lines) < 10
    assert lines[-1] == "working: 3 min 20 s"


def test_a_notebook_gets_one_output(monkeypatch):
    """IPython's display as it is called, without IPython."""
    outputs = []

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        outputs.append([data["text/plain"]])
        return SimpleNamespace(update=lambda data, raw: outputs[-1].append(data["text/plain"]))

    shell = type("ZMQInteractiveShell", (), {})()
    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    clock = Clock()
    with ProgressLine("working", clock=clock) as meter:
        for step in range(1, 5):
            clock.now += 10
            meter.show(step / 4)
    told = ["25%, 30 s left", "50%, 20 s left", "75%, 10 s left", "100%, 0.0 s left", "40 s"]
    assert outputs == [[f"working: {line}" for line in told]]
