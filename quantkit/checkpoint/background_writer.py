"""Work for a thread in the background: in order, with a bounded number of bytes waiting."""

from collections.abc import Callable
from threading import Condition, Thread


class BackgroundWriter:
    """Runs jobs on a thread of its own. `capacity`: bytes that may wait; a job of more waits until
    it is alone.

    What a job raises is raised by the next call, and no job is run after it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._jobs: list[tuple[Callable[[], None], int]] = []  # the first is being run
        self._changed = Condition()
        self._failure: BaseException | None = None
        self._told = False
        self._closed = False
        self._thread = Thread(target=self._run, name="background-writer", daemon=True)
        self._thread.start()

    def hand_over(self, job: Callable[[], None], nbytes: int) -> None:
        """Returns when there is room for the job; of more bytes than `capacity`, when it has been
        run."""
        with self._changed:
            self._wait(
                lambda: (
                    not self._jobs or sum(size for _, size in self._jobs) + nbytes <= self._capacity
                )
            )
            self._jobs.append((job, nbytes))
            self._changed.notify_all()
        if nbytes > self._capacity:
            self.settle()

    def settle(self) -> None:
        """Returns when all jobs have been run."""
        with self._changed:
            self._wait(lambda: not self._jobs)

    def close(self) -> None:
        """Settle, and end the thread. A failure that was raised before is not raised again."""
        try:
            if not self._told:
                self.settle()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            self._told = True
            raise self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs or self._failure is not None:
                    return
                job, _ = self._jobs[0]
            try:
                job()
            except BaseException as failure:
                self._failure = failure
            with self._changed:
                del self._jobs[0]
                self._changed.notify_all()
