"""Mathematical equality by math-verify, in a process that can be killed (math_worker.py). It serves
many comparisons: its imports take half a second."""

import json
from pathlib import Path

from quantkit.common.worker_process import WorkerEnded, WorkerProcess

DEADLINE_S = 5.0
_START_S = 120.0  # the first reply also waits for the import of sympy, long on a busy machine
_WORKER = WorkerProcess(Path(__file__).with_name("math_worker.py"))


def equal(gold: str, answer: str) -> bool | None:
    """Whether a LaTeX fragment equals the gold answer; None where the deadline passed or the process
    died on this input."""
    if not _WORKER.is_running:
        _WORKER.ask(_request("0", "0"), _START_S)
    try:
        return bool(_WORKER.ask(_request(gold, answer), DEADLINE_S))
    except WorkerEnded:
        return None


def _request(gold: str, answer: str) -> bytes:
    return json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"


def close() -> None:
    """End the process; the next comparison starts it again."""
    _WORKER.close()
