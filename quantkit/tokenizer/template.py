"""A model's chat template, run in a process of its own under limits of time and memory (template_worker.py).

The process starts with the first rendering (0.1 s) and stays; a rendering in it takes some 0.1 ms more than one in this process.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

_WORKER = Path(__file__).with_name("template_worker.py")
_DEADLINE_S = 30.0
"""By the clock, where something hangs. The worker limits processor time, which does not depend on how busy the machine is."""


class ChatTemplate:
    """One template. `name` says where it stands. Usable from several threads, one rendering at a time."""

    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def render(self, variables: dict[str, Any]) -> str:
        """The text that the template makes of JSON values. Raises QuantkitError where it refuses them, fails, or takes too long."""
        try:
            line = json.dumps(variables).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise QuantkitError(f"the messages cannot be written as JSON: {error}", "give texts, numbers, lists and objects") from error
        with self._lock:
            reply = self._exchange(line)
        if "fault" in reply:
            raise QuantkitError(f"the chat template in {self.name} refuses these messages: {reply['fault']}", "check roles and contents")
        return reply["text"]

    def _exchange(self, line: bytes) -> dict[str, str]:
        """The worker's answer. Raises QuantkitError where it ended, or had to be."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = _read_line(process.stdout.fileno(), time.monotonic() + _DEADLINE_S)
        except BrokenPipeError:
            reply = b""
        if not reply.endswith(b"\n"):
            reason = self._stop()
            raise QuantkitError(f"the chat template in {self.name} {reason}", "use the model's own template, or a shorter conversation")
        found: dict[str, str] = json.loads(reply)
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # a fork must not share its parent's
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self.source).encode() + b"\n")
        return self._process

    def _stop(self) -> str:
        """End the process; says how it had ended."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return ""
        for stream in (process.stdin, process.stdout):
            if stream:
                with suppress(BrokenPipeError):  # what it did not read any more
                    stream.close()
        with suppress(subprocess.TimeoutExpired):  # one that ended by itself has a code of its own
            process.wait(1.0)
        process.kill()
        code = process.wait()
        timed_out = code in (-signal.SIGPROF, -signal.SIGKILL)
        return "takes too long" if timed_out else f"ended the process that renders it (exit code {code})"

    def __del__(self) -> None:
        self._stop()


def _read_line(descriptor: int, until: float) -> bytes:
    """Bytes up to a line's end; fewer where the other side closed or the time is up."""
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"\n")):
        ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
        part = os.read(descriptor, 1 << 16) if ready else b""
        if not part:
            break
        parts.append(part)
    return b"".join(parts)
