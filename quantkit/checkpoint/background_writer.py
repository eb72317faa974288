"""A background thread that runs jobs in order, with a bounded number of queued bytes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs jobs on its own thread.

    capacity: bytes that may be queued; a larger job waits until the queue is empty. An exception
    raised by a job is raised by the next call, and no further job runs.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._jobs = capacity, deque[tuple[Future[None], int]]()
        self._pool = ThreadPoolExecutor(1, "background-writer")
        self._failure: BaseException | None = None
        self._failure_raised = False

    def submit(self, job: Callable[[], None], nbytes: int) -> None:
        """Queue a job; blocks while the queue is full, and until the job has run where `nbytes`
        exceeds the capacity."""
        while self._jobs and sum(size for _, size in self._jobs) + nbytes > self._capacity:
            self._jobs.popleft()[0].result()
        self._check()
        self._jobs.append((self._pool.submit(self._run, job), nbytes))
        if nbytes > self._capacity:
            self.wait()

    def wait(self) -> None:
        """Block until every queued job has run."""
        while self._jobs:
            self._jobs.popleft()[0].result()
        self._check()

    def close(self) -> None:
        """Wait for all jobs and end the thread. A failure is raised only once."""
        try:
            if not self._failure_raised:
                self.wait()
        finally:
            self._pool.shutdown()

    def _check(self) -> None:
        if self._failure is not None:
            self._failure_raised = True
            raise self._failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                job()
        except BaseException as failure:
            self._failure = failure
