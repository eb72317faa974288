"""Seconds and peak memory of a run over all its restarts, in a file next to the journal.

A run that is killed loses what it spent since the file was last written, some seconds.
"""

import json
import time
from pathlib import Path

from quantkit.common.atomic_write import new_file
from quantkit.common.progress import Event, OnEvent, peak_memory

_WRITTEN_S = 5.0
"""Between two writes of the file."""


class Spent:
    """start: of this process's part, by time.perf_counter. run: identifies the run; what the file
    says of another one does not count."""

    def __init__(self, path: Path, start: float, run: dict[str, str]) -> None:
        self._path, self._start, self._written, self._run = path, start, start, run
        self._seconds, self._peak = 0.0, 0
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["run"] == run:
                self._seconds, self._peak = float(found["seconds"]), int(found["peak_memory"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the first part

    @property
    def seconds(self) -> float:
        return self._seconds + time.perf_counter() - self._start

    @property
    def peak_memory(self) -> int:
        return max(self._peak, peak_memory())

    def listening(self, on_event: OnEvent) -> OnEvent:
        """`on_event`, and the file now and then."""

        def listen(event: Event) -> None:
            if time.perf_counter() - self._written > _WRITTEN_S:
                self._written = time.perf_counter()
                found = {
                    "run": self._run,
                    "seconds": self.seconds,
                    "peak_memory": self.peak_memory,
                }
                with new_file(self._path) as file:
                    file.write(json.dumps(found).encode())
            on_event(event)

        return listen
