"""What operators see of a server: counters, gauges and histograms in Prometheus' text format
(exposition format 0.0.4), written by hand as there are a dozen of them, and the log of faults."""

import logging
import traceback
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from quantkit.common.result import one_line

_LOG = logging.getLogger("uvicorn.error")  # the server's own
LONGEST_MESSAGE = 300
"""Characters of a fault's message, or of its path, in the log."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Counter:
    """Counts up, per value of one label."""

    kind = "counter"

    def __init__(self, name: str, text: str, label: str | None = None) -> None:
        self.name, self.text, self.label = name, text, label
        self.values: dict[str, int] = {} if label else {"": 0}

    def add(self, amount: int = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    def lines(self) -> list[str]:
        if self.label is None:
            return [f"{self.name} {self.values['']}"]
        return [
            f'{self.name}{{{self.label}="{key}"}} {value}' for key, value in self.values.items()
        ]


@dataclass
class Gauge:
    """A number as it is now."""

    name: str
    text: str
    value: float
    kind: str = "gauge"

    def lines(self) -> list[str]:
        return [f"{self.name} {_number(self.value)}"]


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            total += count
            lines.append(
                f'{self.name}_bucket{{le="{"+Inf" if bound == float("inf") else _number(bound)}"}} '
                f"{total}"
            )
        return [*lines, f"{self.name}_sum {_number(self.sum)}", f"{self.name}_count {total}"]


Metric = Counter | Gauge | Histogram


def exposition(metrics: list[Metric]) -> str:
    """The page that Prometheus scrapes."""
    lines = []
    for metric in metrics:
        lines += [
            f"# HELP {metric.name} {metric.text}",
            f"# TYPE {metric.name} {metric.kind}",
            *metric.lines(),
        ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Every digit: an integer as it is, else the shortest text that reads back as the same
    float."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def log_fault(what: str, fault: BaseException) -> None:
    """One line for a fault that nothing foresaw: what failed, why and where."""
    where = "".join(
        f" ({Path(last.filename).name}:{last.lineno})"
        for last in traceback.extract_tb(fault.__traceback__)[-1:]  # none if it was not raised
    )
    _LOG.error(one_line(f"{what}: {type(fault).__name__}: {str(fault)[:LONGEST_MESSAGE]}{where}"))
