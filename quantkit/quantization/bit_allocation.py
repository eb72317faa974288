"""Grids for --bits and --size: candidate grids of each group of linears, their cost, and the job
with the best allocation.

options = GridOptions(job)               candidates, from headers alone; refuses a budget below the smallest
chosen = options.choose(sensitivities)   the best allocation for the budget
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from quantkit.calibrate.sensitivity import LinearGroup, Sensitivities, linear_groups
from quantkit.common.errors import QuantkitError
from quantkit.common.settings import checked
from quantkit.common.sizes import format_bytes
from quantkit.grids.base import Grid, grid_label
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models.table import Parameter
from quantkit.quantization.allocation import Allocation, Allocator, CurvePoint, Option
from quantkit.quantization.fitting import GROUP_SIZES, INT8, Allowed, in_groups_of
from quantkit.quantization.job import Job, outer_grids
from quantkit.quantization.mixed_precision import FP8, is_fp8, matcher

FINE_GROUP = 32
"""Group size of the finer int4."""


@dataclass(frozen=True)
class GridAssignment:
    """A job with chosen grids."""

    job: Job
    allocation: Allocation
    weights: int
    other_bytes: int

    @property
    def bits(self) -> float:
        """Per weight of the linears with a choice, scales included."""
        return 8 * self.allocation.stored / self.weights

    def account(self) -> dict[str, Any]:
        """For a report: every group's grid, the curve, the prediction. Sizes are of the whole
        output."""
        chosen = {name: option.label for name, option in self.allocation.chosen.items()}
        curve = [
            {**asdict(point), "size": point.stored + self.other_bytes}
            for point in self.allocation.curve
        ]
        return {
            "bits": self.bits,
            "size": self.allocation.stored + self.other_bytes,
            "kl": self.allocation.kl,
            "grids": chosen,
            "curve": curve,
        }


class GridOptions:
    """Of one job. grids: candidates of each group; groups of MTP layers have only the cheapest.
    measured: with the head's, which has a choice where the budget is of the whole output."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.grids: dict[LinearGroup, tuple[Grid | None, ...]] = {}
        kept = job.request.mixture.keeps
        for choice in linear_groups(
            row for row in job.rows if row.module in job.grids and not kept(row)
        ):
            found = self._sorted(choice)
            self.grids[choice] = found[:1] if choice.rows[0].mtp else found
        outer, ignored = outer_grids(job), job.request.mixture.ignore
        heads = linear_groups(
            row
            for row in job.rows
            if row.role == "head"
            and row.module in outer
            and not any(matcher(pattern)(row.module) for pattern in ignored)
        )
        self.measured = self.grids | {choice: self._sorted(choice) for choice in heads}
        if job.request.mixture.size is not None:
            self.grids = {
                choice: grids
                for choice, grids in self.measured.items()
                if choice in self.grids or len(grids) > 1
            }
        if not any(len(grids) > 1 for grids in self.grids.values()):
            raise QuantkitError(
                "there is nothing to choose: every linear may be on one grid only",
                "use --scheme alone",
            )
        self._check_budget()

    @cached_property
    def weights(self) -> int:
        """Of all groups together."""
        return sum(math.prod(row.shape) for choice in self.grids for row in choice.rows)

    @cached_property
    def other_bytes(self) -> int:
        """Bytes of the output outside these groups."""
        chosen = {row.module for choice in self.grids for row in choice.rows}
        return sum(
            self.job.stored_bytes(row, self.job.grids.get(row.module))
            for row in self.job.rows
            if row.module not in chosen
        )

    @property
    def budget(self) -> int:
        """Bytes available to the groups."""
        mixture = self.job.request.mixture
        if mixture.size is not None:
            return mixture.size - self.other_bytes
        assert mixture.bits is not None
        return int(mixture.bits * self.weights / 8)

    def cheapest(self) -> Job:
        """The job with every group on its smallest grid."""
        return self._with({choice: grids[0] for choice, grids in self.grids.items()})

    def sensed(self) -> dict[LinearGroup, tuple[Grid, ...]]:
        """The grids whose cost has to be measured."""
        rounded = {
            choice: tuple(grid for grid in grids if grid is not None and not _exact(grid))
            for choice, grids in self.measured.items()
            if not choice.rows[0].mtp
        }
        return {choice: grids for choice, grids in rounded.items() if grids}

    def choose(self, sensitivities: Sensitivities) -> GridAssignment:
        """Raises QuantkitError if the sensitivities are of another model, or lack a grid."""
        budgeting = self.budgeting(sensitivities)
        allocation = budgeting.allocate(self.budget)
        return GridAssignment(
            self.with_allocation(allocation), allocation, self.weights, self.other_bytes
        )

    def with_allocation(self, allocation: Allocation) -> Job:
        """The job on the grids of an allocation."""
        return self._with({choice: allocation.chosen[choice.name].grid for choice in self.grids})

    def by_bytes(self) -> Sensitivities:
        """Substitute for sensitivities that were not measured: an error of four to the power of
        minus bits, for every weight alike."""
        kl: dict[str, dict[str, float]] = {}
        for choice, grids in self.sensed().items():
            count = sum(math.prod(row.shape) for row in choice.rows)
            bits = {grid: 8 * self._stored(choice, grid) / count for grid in grids}
            kl[choice.name] = {
                grid_label(grid): count / self.weights * 4.0 ** -bits[grid] for grid in grids
            }
        config = self.job.inventory.config
        routing = None if config is None else config.routing
        experts = {
            str(choice.layer): len({row.expert for row in choice.rows})
            for choice in self.grids
            if choice.of_experts
        }
        chosen = routing.num_experts_per_tok if routing else 0
        return Sensitivities(
            kl,
            {layer: [chosen] * count for layer, count in experts.items()},
            max(experts.values(), default=1),
        )

    def budgeting(self, sensitivities: Sensitivities) -> Allocator:
        options = {
            choice.name: [self._option(choice, grid, sensitivities) for grid in grids]
            for choice, grids in self.grids.items()
        }
        return Allocator(options, self.weights, self.job.request.mixture.read_weight)

    def _option(
        self, choice: LinearGroup, grid: Grid | None, sensitivities: Sensitivities
    ) -> Option:
        stored, label = self._stored(choice, grid), grid_label(grid)
        read = 0.0 if choice.rows[0].mtp else float(stored)
        if choice.of_experts and read:
            counts = sensitivities.asked.get(str(choice.layer))
            if counts is None:
                raise _lacks(f"the expert token counts of layer {choice.layer}")
            read *= sum(counts) / len(counts) / sensitivities.tokens
        if _exact(grid) or choice.rows[0].mtp:
            return Option(grid, stored, read, 0.0)
        kl = sensitivities.kl.get(choice.name, {}).get(label)
        if kl is None:
            raise _lacks(f"the cost of {choice.name} in {label}")
        return Option(grid, stored, read, kl)

    def _with(self, chosen: Mapping[LinearGroup, Grid | None]) -> Job:
        grids = dict(self.job.grids)
        for choice, grid in chosen.items():
            for row in choice.rows:
                grids.pop(row.module, None)
                if grid is not None:
                    grids[row.module] = grid
        return replace(self.job, grids=grids)

    def _sorted(self, choice: LinearGroup) -> tuple[Grid | None, ...]:
        """What it may be on, the smallest first."""
        return tuple(sorted(self._allowed(choice), key=lambda grid: self._stored(choice, grid)))

    def _allowed(self, choice: LinearGroup) -> list[Grid | None]:
        """The grids that the source, the format, the engine and the shapes allow."""
        mixed_choice, checkpoint = self.job.request.mixed_choice, self.job.checkpoint
        base = self.job.request.scheme.grid(expert=choice.of_experts, mtp=choice.rows[0].mtp)
        allows = (lambda row, grid: True) if mixed_choice is None else mixed_choice.allows
        output = Allowed(self.job.request.target, allows)
        sizes = [in_groups_of(base, size) for size in GROUP_SIZES]
        fine = base.with_group_size(FINE_GROUP) if base.group_size else None
        fp8 = all(is_fp8(checkpoint, row) for row in choice.rows)
        # Rounded inputs of SmolLM2's head cost a hundred times what its weights in groups do.
        eight = [IntGrid(8, size, symmetric=True) for size in GROUP_SIZES]
        int8 = output.first(choice, eight) if choice.rows[0].role == "head" else INT8
        candidates = dict.fromkeys(
            (output.first(choice, sizes), fine, Nvfp4Grid(), int8, *([FP8] if fp8 else []))
        )
        held = (
            grid
            for grid in candidates
            if grid is not None and all(output.holds(row, grid) for row in choice.rows)
        )
        allowed: list[Grid | None] = list(held)
        return allowed if FP8 in allowed else [*allowed, None]

    def _stored(self, choice: LinearGroup, grid: Grid | None) -> int:
        return sum(self.job.stored_bytes(row, grid) for row in choice.rows)

    def _check_budget(self) -> None:
        smallest = sum(self._stored(choice, grids[0]) for choice, grids in self.grids.items())
        if self.budget >= smallest:
            return
        mixture, least = self.job.request.mixture, smallest + self.other_bytes
        if mixture.size is not None:
            message, remedy = (
                f"--size {format_bytes(mixture.size)}",
                f"give --size {math.ceil(least / 10**4) / 100:g}MB or more",
            )
            raise QuantkitError(
                f"{message} cannot be reached: the smallest output is {format_bytes(least)}", remedy
            )
        bits = math.ceil(8 * smallest / self.weights * 1000) / 1000
        message = (
            f"--bits {mixture.bits:g} cannot be reached: the smallest is {bits:g} bits a weight"
        )
        raise QuantkitError(message, f"give --bits {bits:g} or more")


def _exact(grid: Grid | None) -> bool:
    """Whether a linear on this grid equals the source's."""
    return grid is None or grid == FP8


def _lacks(what: str) -> QuantkitError:
    return QuantkitError(
        f"the sensitivities lack {what}",
        "measure them on this model for this engine: leave out --sensitivities",
    )


class _File(BaseModel):
    kl: dict[str, dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]]
    asked: dict[str, list[int]]
    tokens: int = Field(ge=1)
    source: str


def read_sensitivities(path: Path, source: str | None = None) -> Sensitivities:
    """A file written by a run. source: the fingerprint of the checkpoint that it must be of. Raises
    QuantkitError."""
    remedy = "give a sensitivities.json of an earlier run"
    try:
        read = checked(json.loads(path.read_text(encoding="utf-8")), _File, str(path), remedy)
    except OSError as error:
        raise QuantkitError(
            f"cannot read sensitivities {path}: {error.strerror}", remedy
        ) from error
    except (ValueError, RecursionError) as error:
        raise QuantkitError(f"{path} is not a file of sensitivities", remedy) from error
    if source is not None and read.source != source:
        raise QuantkitError(
            f"{path} was measured on another source",
            "leave out --sensitivities to measure this one",
        )
    return Sensitivities(read.kl, read.asked, read.tokens)


def sensitivities_file(found: Sensitivities, key: Mapping[str, str]) -> bytes:
    """Content that `read_sensitivities` reads. key: what they were measured on, including the
    source's fingerprint."""
    return (json.dumps({**key, **asdict(found)}, indent=1) + "\n").encode()


def rounded_labels(grids: Mapping[LinearGroup, Sequence[Grid]]) -> str:
    """Identifies the measured grids: other grids need another file."""
    return json.dumps(
        {choice.name: [grid_label(grid) for grid in own] for choice, own in grids.items()},
        sort_keys=True,
    )


def describe_grids(account: Mapping[str, Any]) -> str:
    """`GridAssignment.account` in a line."""
    counts = Counter(account["grids"].values())
    grids = ", ".join(f"{label} {count}" for label, count in counts.most_common())
    return (
        f"{account['bits']:.3f} bits a weight ({grids}), predicted KL {account['kl']:.2e} if "
        "rounded to nearest"
    )


POINTS = 9
"""Points of a curve in a plan."""
MOST_DEVICES = 64

Fits = Callable[[list[tuple[Parameter, int]], int], bool]
"""(parameters with the bytes of each, devices) -> whether they hold it, and a request's cache."""


@dataclass(frozen=True)
class PlannedSize:
    """bits: per weight, of the linears with a choice. bytes: of the output. read_bytes: of those
    linears, for a token on average. kl: predicted, nats a token, None without sensitivities.
    devices: the fewest that hold it, a power of two or the given number; None if none do."""

    bits: float
    bytes: int
    read_bytes: float
    kl: float | None
    devices: int | None

    def describe(self) -> str:
        kl = "" if self.kl is None else f", predicted KL {self.kl:.2e}"
        held = (
            "no number of devices holds it"
            if self.devices is None
            else f"{self.devices} device{'s' if self.devices > 1 else ''} hold it"
        )
        return (
            f"{format_bytes(self.bytes)}{kl}, {format_bytes(self.read_bytes)} read a token, {held}"
        )


@dataclass(frozen=True)
class SizeCurve:
    """Other budgets: size of the output, expected KL, and the fewest devices that hold it. job:
    with the budget's grids, or estimated from bytes alone. points: of the curve, with the bytes of
    each parameter."""

    job: Job
    points: Sequence[tuple[CurvePoint, float | None, list[tuple[Parameter, int]]]]
    fits: Fits

    def sizes(self, given: int) -> tuple[PlannedSize, ...]:
        """given: the number of devices requested."""
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


def plan_sizes(options: GridOptions, sensitivities: Sensitivities | None, fits: Fits) -> SizeCurve:
    """Without sensitivities every group is taken to cost alike per weight, so sizes and bytes are
    those of some allocation."""
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
    return SizeCurve(options.choose(measured).job, points, fits)
