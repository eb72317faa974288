"""Seconds and peak memory of a run over all its restarts, in a file next to the journal.

A run that is killed loses what it used since the file was last written, some seconds.
"""

import time
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_text
from quantkit.common.progress import Event, Note, OnEvent, peak_memory

_WRITTEN_S = 5.0
"""Between two writes of the file."""


class _File(BaseModel):
    run: dict[str, str]
    seconds: float = Field(ge=0, allow_inf_nan=False)
    peak_memory: int = Field(ge=0)


class RunUsage:
    """start: of this process's part, by time.perf_counter. run: identifies the run; what the file
    says of another one does not count."""

    def __init__(self, path: Path, start: float, run: dict[str, str]) -> None:
        self._path, self._start, self._written, self._run = path, start, start, run
        self._seconds, self._peak, self._fault = 0.0, 0, ""
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = _File.model_validate_json(read_text(self._path))
        except (QuantkitError, ValidationError):
            self._fault = f"{self._path} cannot be read: time and memory count from here on"
        else:
            if found.run == self._run:
                self._seconds, self._peak = found.seconds, found.peak_memory

    @property
    def seconds(self) -> float:
        return self._seconds + time.perf_counter() - self._start

    @property
    def peak_memory(self) -> int:
        return max(self._peak, peak_memory())

    def listener(self, on_event: OnEvent) -> OnEvent:
        """`on_event`, and the file now and then. A file that cannot be read is a note."""
        if self._fault:
            on_event(Note(self._fault))

        def listen(event: Event) -> None:
            if time.perf_counter() - self._written > _WRITTEN_S:
                self._written = time.perf_counter()
                file = _File(run=self._run, seconds=self.seconds, peak_memory=self.peak_memory)
                write_atomic(self._path, file.model_dump_json())
            on_event(event)

        return listen
