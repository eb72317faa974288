"""Jobs behind their maker's back: in order, bounded, and no failure is lost."""

from threading import Event

import pytest

from quantkit.checkpoint.behind import Behind


def test_jobs_run_in_order_while_their_maker_goes_on() -> None:
    behind, go, ran = Behind(100), Event(), []
    behind.hand_over(lambda: go.wait() and ran.append(0), 40)
    for number in (1, 2):
        behind.hand_over(lambda number=number: ran.append(number), 30)
    assert ran == []
    go.set()
    behind.settle()
    assert ran == [0, 1, 2]
    behind.close()


def test_what_does_not_fit_waits_for_those_before() -> None:
    behind, go, ran = Behind(100), Event(), []
    behind.hand_over(lambda: go.wait() and ran.append("first"), 60)
    go.set()
    behind.hand_over(lambda: ran.append("second"), 60)
    assert ran[0] == "first"
    behind.hand_over(lambda: ran.append("larger than all that may wait"), 1000)
    assert ran == ["first", "second", "larger than all that may wait"]
    behind.close()


def test_a_failure_reaches_the_maker_and_ends_it() -> None:
    behind, go, ran = Behind(100), Event(), []

    def fail() -> None:
        go.wait()
        raise OSError("no more room")

    behind.hand_over(fail, 1)
    behind.hand_over(lambda: ran.append("after"), 1)
    go.set()
    for call in (behind.settle, lambda: behind.hand_over(lambda: ran.append("later"), 1)):
        with pytest.raises(OSError, match="no more room"):
            call()
    behind.close()
    assert ran == []
    assert not behind._thread.is_alive()


def test_a_failure_that_nobody_saw_is_raised_at_the_end() -> None:
    behind = Behind(100)

    def fail() -> None:
        raise OSError("no more room")

    behind.hand_over(fail, 1)
    with pytest.raises(OSError, match="no more room"):
        behind.close()
