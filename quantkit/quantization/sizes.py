"""What other budgets would make of a model: the size of the output, the KL to expect, and the
fewest devices that hold it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.calibrate.sensitivity import Sensitivities
from quantkit.common.sizes import format_bytes
from quantkit.models.table import Parameter
from quantkit.quantization.allocation import CurvePoint
from quantkit.quantization.job import Job
from quantkit.quantization.mixed_precision import Options

POINTS = 9
"""Of a curve that is told."""
MOST_DEVICES = 64

Fits = Callable[[list[tuple[Parameter, int]], int], bool]
"""(parameters with the bytes of each, devices) -> whether they hold it, and a request's cache."""


@dataclass(frozen=True)
class PlannedSize:
    """bits: a weight, of the linears that are chosen for. bytes: of the output. read_bytes: of
    those linears, for a token on average. kl: predicted, nats a token, None where no sensitivities
    are known. devices: the fewest that hold it, a power of two or the number that was given; None
    where none does."""

    bits: float
    bytes: int
    read_bytes: float
    kl: float | None
    devices: int | None

    def told(self) -> str:
        kl = "" if self.kl is None else f", predicted KL {self.kl:.2e}"
        held = (
            "no number of them holds it"
            if self.devices is None
            else f"{self.devices} device{'s' if self.devices > 1 else ''} hold it"
        )
        return (
            f"{format_bytes(self.bytes)}{kl}, {format_bytes(self.read_bytes)} read a token, {held}"
        )


@dataclass(frozen=True)
class PlannedChoice:
    """job: with the grids of the budget, or as near as bytes alone tell. points: of the curve, with
    the bytes of each parameter."""

    job: Job
    points: Sequence[tuple[CurvePoint, float | None, list[tuple[Parameter, int]]]]
    fits: Fits

    def sizes(self, given: int) -> tuple[PlannedSize, ...]:
        """given: the number of devices that was asked for."""
        counts = sorted({2**power for power in range(MOST_DEVICES.bit_length())} | {given})
        return tuple(
            PlannedSize(
                point.bits,
                sum(stored for _, stored in rows),
                point.read,
                kl,
                next((count for count in counts if self.fits(rows, count)), None),
            )
            for point, kl, rows in self.points
        )


def plan_choosing(
    options: Options, sensitivities: Sensitivities | None, fits: Fits
) -> PlannedChoice:
    """Without sensitivities every choice is taken to cost alike for its weights, so sizes and bytes
    are those of some allocation."""
    known = sensitivities is not None
    measured = sensitivities if sensitivities is not None else options.by_bytes()
    budgeting = options.budgeting(measured)
    curve = budgeting.curve()
    every = max(1, -(-(len(curve) - 1) // (POINTS - 1)))
    points = []
    for point in [*curve[:-1:every], curve[-1]]:
        job = options.with_allocation(budgeting.allocate(point.stored))
        rows = [(row, job.stored_bytes(row, job.grids.get(row.module))) for row in job.rows]
        points.append((point, point.kl if known else None, rows))
    return PlannedChoice(options.choose(measured).job, points, fits)
