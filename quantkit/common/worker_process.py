"""A process that answers JSON lines, and can be killed where an answer takes too long."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class WorkerEnded(Exception):
    """The process was killed, or ended by itself; `code` is its exit code, -n after signal n."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with exit code {code}")
        self.code = code


class WorkerProcess:
    """A script that imports nothing of quantkit, run by `python -I`: for every line of its stdin it
    writes one to its stdout. It starts with the first request and again after it ended. Usable from
    several threads, one request at a time."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a fork must not share its parent's

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, request: bytes, deadline_s: float) -> Any:
        """The answer to one line of JSON. Raises WorkerEnded where there is none in `deadline_s`."""
        with self._lock:
            self._process = process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                answer = _read_line(process.stdout.fileno(), time.monotonic() + deadline_s)
            except BrokenPipeError:
                answer = b""
            if not answer.endswith(b"\n"):
                raise WorkerEnded(self._end())
            return json.loads(answer)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> int:
        """The exit code of the process, which is killed if it does not end."""
        process, self._process = self._process, None
        assert process is not None
        for stream in (process.stdin, process.stdout):
            if stream:
                with suppress(BrokenPipeError):  # unread input
                    stream.close()
        with suppress(subprocess.TimeoutExpired):  # keep the exit code of a process that ended
            process.wait(1.0)
        process.kill()
        return process.wait()

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            if self._process is not None:
                self._end()


def _read_line(descriptor: int, until: float) -> bytes:
    """Bytes up to the end of a line; fewer where the other side closed or time is up."""
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"\n")):
        ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
        part = os.read(descriptor, 1 << 16) if ready else b""
        if not part:
            break
        parts.append(part)
    return b"".join(parts)
