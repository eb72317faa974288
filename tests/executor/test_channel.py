"""Messages from rank 0 arrive, whether the others look for them or sleep."""

import threading
import time

import pytest

from quantkit.executor.ranks import parallel
from quantkit.executor.ranks.parallel import Channel


class Meeting:
    """The exchange of two ranks in threads: rank 0's value on both."""

    def __init__(self):
        self._given, self._told = threading.Event(), None

    def leader(self, value):
        self._told = value
        self._given.set()
        return [value, None]

    def follower(self, value):
        assert self._given.wait(10)
        return [self._told, value]


@pytest.fixture(params=[False, True], ids=["sleeps", "spins"])
def ends(request, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    meeting, found = Meeting(), []
    thread = threading.Thread(
        target=lambda: found.append(Channel(1, 2, meeting.follower, spins=request.param))
    )
    thread.start()
    first = Channel(0, 2, meeting.leader)
    thread.join(10)
    return first, found[0]


def test_messages_arrive_in_order(ends):
    first, second = ends
    for message in ([], [1, 2, 3], {"add": "x" * 100_000}):
        first.send(message)
    assert [second.receive() for _ in range(3)] == [[], [1, 2, 3], {"add": "x" * 100_000}]


def test_a_late_message_arrives(ends, monkeypatch):
    monkeypatch.setattr(parallel, "SPIN_SECONDS", 0.01)
    first, second = ends
    timer = threading.Timer(0.1, lambda: first.send("late"))
    timer.start()
    began = time.process_time()
    assert second.receive() == "late"
    assert time.process_time() - began < 0.08, "it looked all the time instead of sleeping"


def test_a_rank_that_is_gone_is_noticed(ends):
    first, second = ends
    first.close()
    with pytest.raises(OSError, match="closed the connection"):
        second.receive()
