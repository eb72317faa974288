"""Progress of a calibrated run: finished units with their findings, written, restored after a
restart, and reported to the listener."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from torch import Tensor

from quantkit.calibrate.hidden_states import trim_heap
from quantkit.calibrate.linear_solver import LinearResult
from quantkit.calibrate.output import Output
from quantkit.calibrate.source_model import ParameterReader
from quantkit.common.progress import Note, OnEvent, Progress
from quantkit.common.scratch import give_back
from quantkit.grids.base import Weight
from quantkit.models.table import Parameter


@dataclass
class Findings:
    """What a calibrated run measured, the content of its report. Grows as units finish; after a
    restart it is restored from the facts stored with finished units."""

    errors: dict[str, float] = field(default_factory=dict)
    """module -> squared output error over squared output, on held-out inputs"""
    methods: dict[str, str] = field(default_factory=dict)
    """module -> method that quantized it"""
    scales: dict[str, list[float]] = field(default_factory=dict)
    """group -> smallest, median and largest s"""
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    """layer -> calibration tokens of every expert"""
    expert_agreement: dict[str, float] = field(default_factory=dict)
    """layer -> share of (token, slot) choices that the quantized and the original path have in
    common"""
    hidden_error: dict[str, float] = field(default_factory=dict)
    """layer -> squared distance of the two paths over the squared norm of the original"""

    next_token: dict[str, float] = field(default_factory=dict)
    """fields of `NextTokenKl` on held-out tokens, and plain_kl, the KL of round-to-nearest; empty
    without held-out tokens"""

    def facts(
        self, linears: Mapping[str, LinearResult], scales: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Facts to store with a unit so that a resumed run reports the same; also merged here."""
        facts = {
            "errors": {
                module: None if math.isnan(one.error) else one.error
                for module, one in linears.items()
            },
            "methods": {module: one.method for module, one in linears.items()},
            "scales": {
                name: [float(s.min()), float(s.median()), float(s.max())]
                for name, s in scales.items()
            },
        }
        self.merge(facts)
        return facts

    def merge(self, facts: dict[str, Any]) -> None:
        self.errors |= {
            module: math.nan if error is None else error
            for module, error in facts["errors"].items()
        }
        self.methods |= facts["methods"]
        self.scales |= facts["scales"]

    @property
    def mean_error(self) -> float:
        known = [error for error in self.errors.values() if not math.isnan(error)]
        return math.fsum(known) / len(known) if known else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ProgressLog:
    """Of one run. units: all units; source: gives their bytes; shares: of the run's expected time,
    by unit. findings: of the units finished so far."""

    def __init__(
        self,
        units: Mapping[str, Sequence[Parameter]],
        source: ParameterReader,
        store: Output,
        on_event: OnEvent,
        shares: Mapping[str, float],
    ) -> None:
        self.store, self.on_event, self._shares, self._share = store, on_event, shares, 0.0
        self.findings = Findings()
        self._bytes = {
            unit: sum(source.stored_bytes(row) for row in rows) for unit, rows in units.items()
        }
        self._total, self._done = sum(self._bytes.values()), 0
        self._found: set[str] = set()
        self._process = psutil.Process()

    def write(
        self,
        unit: str,
        linears: Mapping[str, LinearResult],
        unquantized: dict[str, Tensor],
        scales: Mapping[str, Tensor],
        *,
        owned: bool,
    ) -> None:
        """Merge the unit's facts, and write it if this rank owns it. scales: by group."""
        for module, one in linears.items():
            if one.method == "nearest":
                self.note(f"{module}: round-to-nearest is better on held-out inputs, and is used")
        facts = self.findings.facts(
            linears, scales
        )  # also for a unit that is already written: a report covers all units
        if owned:
            self.store.write(
                unit, {module: one.weight for module, one in linears.items()}, unquantized, facts
            )

    def load(self, unit: str) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        """A finished unit's weights by module, and its unquantized tensors by name."""
        weights, unquantized, facts = self.store.load(unit)
        self.findings.merge(facts)
        self._found.add(unit)
        return weights, unquantized

    def merge_facts(self, unit: str) -> None:
        """Merge the facts of a unit that another rank has written."""
        self.findings.merge(self.store.facts(unit))

    def begin_phase(self, phase: str, unit: str) -> None:
        """Begin a phase of a sublayer, whose tensors have other sizes than the last: trim the heap.
        Phases of an expert reuse the blocks of the expert before."""
        trim_heap()
        self.report(phase, unit)

    def report(self, phase: str, unit: str, *, found: bool = False) -> None:
        give_back()
        memory = self._process.memory_info().rss
        self.on_event(
            Progress(
                phase,
                unit,
                self._done,
                self._total,
                self.findings.mean_error,
                memory,
                min(self._share, 1.0),
                found,
            )
        )

    def finish(self, unit: str) -> None:
        """Count the unit as done."""
        self._done += self._bytes[unit]
        self._share += self._shares.get(unit, 0.0)
        self.report("done", unit, found=unit in self._found)

    def skip(self, unit: str) -> None:
        """Count a unit of an earlier run as done; its result is not needed."""
        self._found.add(unit)
        self.finish(unit)

    def note(self, text: str) -> None:
        self.on_event(Note(text))
