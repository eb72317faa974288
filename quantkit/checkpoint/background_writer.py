"""A background thread that runs jobs in order, with a bounded number of queued bytes."""

from collections.abc import Callable
from threading import Condition, Thread


class BackgroundWriter:
    """Runs jobs on its own thread.

    capacity: bytes that may be queued; a larger job waits until the queue is empty. An exception
    raised by a job is raised by the next call, and no further job runs.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._jobs: list[tuple[Callable[[], None], int]] = []  # the first one is running
        self._changed = Condition()
        self._failure: BaseException | None = None
        self._failure_raised = False
        self._closed = False
        self._thread = Thread(target=self._run, name="background-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], nbytes: int) -> None:
        """Queue a job; blocks while the queue is full, and until the job has run where `nbytes`
        exceeds the capacity."""
        with self._changed:
            self._wait(
                lambda: (
                    not self._jobs or sum(size for _, size in self._jobs) + nbytes <= self._capacity
                )
            )
            self._jobs.append((job, nbytes))
            self._changed.notify_all()
        if nbytes > self._capacity:
            self.wait()

    def wait(self) -> None:
        """Block until every queued job has run."""
        with self._changed:
            self._wait(lambda: not self._jobs)

    def close(self) -> None:
        """Wait for all jobs and end the thread. A failure is raised only once."""
        try:
            if not self._failure_raised:
                self.wait()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            self._failure_raised = True
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
