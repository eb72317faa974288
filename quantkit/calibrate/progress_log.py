"""Units as they are finished: written to the store with what was found out, found there after a
restart, and told to the listener."""

from collections.abc import Mapping, Sequence

import psutil
from torch import Tensor

from quantkit.calibrate.allocator import give_back
from quantkit.calibrate.findings import Findings
from quantkit.calibrate.linear_solver import Rounded
from quantkit.calibrate.output_store import UnitStore
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.common.progress import Note, OnEvent, Progress
from quantkit.grids.weights import Weight
from quantkit.models.table import Parameter


class UnitLog:
    """Of one run. units: all there are; source: tells what they weigh; shares: of the run's
    expected time, by unit. findings: of the units finished so far."""

    def __init__(
        self,
        units: Mapping[str, Sequence[Parameter]],
        source: ParameterReader,
        store: UnitStore,
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
        linears: Mapping[str, Rounded],
        plain: dict[str, Tensor],
        scales: Mapping[str, Tensor],
        *,
        mine: bool,
    ) -> None:
        """Take up what was found out, and write the unit where that is for this rank to do. scales:
        by group."""
        for module, one in linears.items():
            if one.method == "nearest":
                self.note(f"{module}: plain rounding is better on held-out inputs, and kept")
        facts = self.findings.facts(
            linears, scales
        )  # also of what is written already: a report tells of all units
        if mine:
            self.store.write(
                unit, {module: one.weight for module, one in linears.items()}, plain, facts
            )

    def load(self, unit: str) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        """A finished unit's weights by module, and its unquantized tensors by name."""
        weights, plain, facts = self.store.load(unit)
        self.findings.take(facts)
        self._found.add(unit)
        return weights, plain

    def take(self, unit: str) -> None:
        """What another rank found out of a unit that it has written."""
        self.findings.take(self.store.facts(unit))

    def enter(self, phase: str, unit: str) -> None:
        """A phase of a sublayer begins, with other sizes than the last. An expert's phases find the
        blocks of the expert before."""
        give_back()
        self.tell(phase, unit)

    def tell(self, phase: str, unit: str, *, found: bool = False) -> None:
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

    def finished(self, unit: str) -> None:
        """Nothing more is to be done with the unit."""
        self._done += self._bytes[unit]
        self._share += self._shares.get(unit, 0.0)
        self.tell("done", unit, found=unit in self._found)

    def skip(self, unit: str) -> None:
        """An earlier run finished the unit, and nothing is asked of it."""
        self._found.add(unit)
        self.finished(unit)

    def note(self, text: str) -> None:
        self.on_event(Note(text))
