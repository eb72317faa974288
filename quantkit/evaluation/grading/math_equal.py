"""Mathematical equality by math-verify, in a process that can be killed.

One worker process serves many comparisons (its imports take half a second); a comparison that
exceeds the deadline kills it.
"""

import json
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 5.0
_START_S = 120.0  # the first reply also waits for the import of sympy, long on a busy machine
_WORKER = Path(__file__).with_name("math_worker.py")


class MathJudge:
    """Compares a gold answer with a LaTeX fragment. Usable from several threads, one comparison at
    a time. ask: the model that judges what no rule compares, from prompt to reply."""

    def __init__(
        self, deadline_s: float = DEADLINE_S, ask: Callable[[str], str] | None = None
    ) -> None:
        self._deadline_s, self.ask = deadline_s, ask
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, gold: str, answer: str) -> bool | None:
        """True or false, or None where the deadline passed or the worker died on this input."""
        with self._lock:
            if self._process is None and self._exchange("0", "0", _START_S) is None:
                raise RuntimeError(f"{_WORKER.name} does not answer")
            return self._exchange(gold, answer, self._deadline_s)

    def _exchange(self, gold: str, answer: str, deadline_s: float) -> bool | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            ready, _, _ = select.select([process.stdout], [], [], deadline_s)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            self._stop()
            return None
        return bool(json.loads(line))

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()

    def close(self) -> None:
        with self._lock:
            self._stop()
