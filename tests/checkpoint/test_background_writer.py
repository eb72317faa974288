"""Jobs behind their maker's back: in order, bounded, and no failure is lost."""

from threading import Event

import pytest

from quantkit.checkpoint.writer import BackgroundWriter


def test_jobs_run_in_order_while_their_maker_goes_on():
    writer, go, ran = BackgroundWriter(100), Event(), []
    writer.submit(lambda: go.wait() and ran.append(0), 40)
    for number in (1, 2):
        writer.submit(lambda number=number: ran.append(number), 30)
    assert ran == []
    go.set()
    writer.wait()
    assert ran == [0, 1, 2]
    writer.close()


def test_what_does_not_fit_waits_for_those_before():
    writer, go, ran = BackgroundWriter(100), Event(), []
    writer.submit(lambda: go.wait() and ran.append("first"), 60)
    go.set()
    writer.submit(lambda: ran.append("second"), 60)
    assert ran[0] == "first"
    writer.submit(lambda: ran.append("larger than all that may wait"), 1000)
    assert ran == ["first", "second", "larger than all that may wait"]
    writer.close()


def test_a_failure_reaches_the_maker_and_ends_it():
    """Or is raised at the end, if nobody saw it."""
    writer, go, ran = BackgroundWriter(100), Event(), []

    def fail():
        go.wait()
        raise OSError("no more room")

    writer.submit(fail, 1)
    writer.submit(lambda: ran.append("after"), 1)
    go.set()
    for call in (writer.wait, lambda: writer.submit(lambda: ran.append("later"), 1)):
        with pytest.raises(OSError, match="no more room"):
            call()
    writer.close()
    assert ran == []
    assert not any(thread.is_alive() for thread in writer._pool._threads)
    unseen = BackgroundWriter(100)
    unseen.submit(fail, 1)
    with pytest.raises(OSError, match="no more room"):
        unseen.close()
