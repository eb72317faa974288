"""What a run tells while it works: small values that a progress bar, a log and a report are made from."""

from collections.abc import Callable
from dataclasses import dataclass


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
