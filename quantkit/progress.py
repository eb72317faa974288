"""What a run tells while it works: small values that a progress bar, a log and a report are made from."""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """Work done so far, in bytes of source weights; time left is estimated from these.

    phase: what is being done, in a word or two. unit: the part in work, such as layers.3.experts.17.
    error: mean relative output error of the linears quantized so far. memory: resident bytes of this process.
    """

    phase: str
    unit: str
    done_bytes: int
    total_bytes: int
    error: float
    memory: int


@dataclass(frozen=True)
class Note:
    """Something worth a line in the log: a fallback, a starved expert, a unit found finished."""

    text: str


Event = Progress | Note
OnEvent = Callable[[Event], None]


def silent(event: Event) -> None:
    """For callers who do not listen."""


def peak_memory() -> int:
    """The most resident bytes that this process had."""
    if sys.platform == "linux":  # getrusage counts what the parent held, too, when it started this process
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
