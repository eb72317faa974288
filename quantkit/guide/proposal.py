"""Which scheme and engine to take for a model on given devices: every scheme that an engine loads
there is planned, from headers alone.

Of those that fit, with room for a request, the one with the least measured loss is proposed
(recipes/go/expected.yaml); round-to-nearest only if calibration is not possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError
from quantkit.common.result import Result
from quantkit.common.settings import Strict, read_yaml
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.engines.check import check_model, find_load
from quantkit.engines.memory import ParallelSizes, find_split_problem
from quantkit.engines.profiles import Device, choose, find_engine
from quantkit.grids.schemes import SCHEMES, Scheme, find_scheme
from quantkit.models import find_architecture
from quantkit.planning.devices import Devices
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import Plan, plan
from quantkit.quantization.job import JobRequest, open_job, read_request

QUANTKIT = "quantkit"
"""The engine that serves on a CPU: this package."""
ENGINES: dict[Device, tuple[str, ...]] = {
    "cuda": ("vllm", "sglang"),
    "npu": ("vllm-ascend", "omni-infer", "sglang"),
    "cpu": (QUANTKIT,),
}
"""By kind of device, in order of preference; all have launch recipes."""

LEAST_SAVED = 0.9
"""Share of the source's bytes above which an output is not worth making."""


class ExpectedLoss(Strict):
    """Measured loss of a scheme: KL from the source, minimum and maximum, and points of accuracy;
    None if not measured."""

    scheme: str
    kl: tuple[float, float] | None
    points: float | None

    def describe(self) -> str:
        kl = [] if self.kl is None else [f"KL {self.kl[0]:.2g} to {self.kl[1]:.2g}"]
        points = [] if self.points is None else [f"{self.points:+.1f} points"]
        return ", ".join([*kl, *points]) or "not measured"


@dataclass(frozen=True)
class SchemeCandidate:
    """A scheme for an engine, planned over `devices` of the machine; refused: why it is not
    possible, without a plan."""

    scheme: str
    engine: str
    devices: int = 0
    plan: Plan | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True, repr=False)
class Proposal(Result):
    """candidates: every scheme, least expected loss first. chosen: one of them. seconds: of
    quantizing it on this machine, to within
    `factor` either way. why: the choice in words."""

    model: str
    box: Devices
    candidates: tuple[SchemeCandidate, ...]
    chosen: SchemeCandidate
    why: str
    seconds: float
    factor: float

    @property
    def plan(self) -> Plan:
        assert self.chosen.plan is not None
        return self.chosen.plan

    @property
    def heading(self) -> str:
        return f"{self.model} on {self.box.name}"

    def facts(self) -> list[tuple[str, str]]:
        planned, placed = self.plan, self.plan.devices
        room = "" if placed.cache_tokens is None else f", room for {placed.cache_tokens:,} tokens"
        used = (
            ""
            if self.chosen.devices in (self.box.count, 1)
            else f" on {self.chosen.devices} of the devices"
        )
        return [
            ("scheme", f"{self.chosen.scheme}, {SCHEMES[self.chosen.scheme].summary}"),
            ("  why", self.why),
            (
                "  written",
                f"{format_bytes(planned.output_bytes)} in format {planned.format}, from "
                f"{format_bytes(planned.source_bytes)}",
            ),
            (
                "engine",
                f"{self.chosen.engine}{used}: {format_bytes(placed.weight_bytes)} of weights on "
                f"each{room}",
            ),
            (
                "loss to expect",
                f"{expected_losses()[self.chosen.scheme].describe()} (tiny-r1's; round-to-nearest: "
                f"{_rtn_loss()})",
            ),
            (
                "time",
                f"about {format_duration(self.seconds)} on this machine, within a factor of "
                f"{self.factor:g}, "
                "and as much text as is then measured",
            ),
            (
                "disk",
                f"{format_bytes(planned.disk_bytes)} needed, "
                f"{format_bytes(planned.disk_free_bytes)} free",
            ),
            (
                "memory",
                f"{format_bytes(planned.host_peak_bytes)} of the host at most, "
                f"{format_bytes(planned.host_least_bytes)} at least",
            ),
            *(
                (f"  not {one.scheme}", _against(one))
                for one in self.candidates
                if one.scheme != self.chosen.scheme
            ),
        ]


@cache
def expected_losses() -> dict[str, ExpectedLoss]:
    """By scheme, least loss first."""
    listed = read_yaml(
        asset("recipes", "go", "expected.yaml"), tuple[ExpectedLoss, ...], "restore that file"
    )
    return {one.scheme: one for one in listed}


@dataclass(frozen=True)
class Wanted:
    """settings: a scheme's recipe. scheme, engine: if given. context: tokens of the longest
    request.
    tokens: of the calibration text, if known."""

    settings: Callable[[str], Recipe]
    scheme: str | None = None
    engine: str | None = None
    context: int = 4096
    tokens: int | None = None


def candidates(checkpoint: Checkpoint, box: Devices, wanted: Wanted) -> list[SchemeCandidate]:
    """Every scheme, or the given one, in order of expected loss, on the first engine for these
    devices that loads it."""
    if wanted.scheme is not None:
        find_scheme(wanted.scheme)
    return [
        _candidate(checkpoint, box, SCHEMES[name], wanted)
        for name in expected_losses()
        if wanted.scheme in (None, name)
    ]


def choose_candidate(found: list[SchemeCandidate], box: Devices) -> tuple[SchemeCandidate, str]:
    """The first that fits, and why. Raises QuantkitError if none does, with the devices that the
    smallest needs."""
    for place, one in enumerate(found):
        if one.fits:
            others = [other for other in found[:place] if other.plan is not None]
            lost = (
                "least loss where schemes were measured, of those that fit"
                if len(found) > 1
                else "as asked for"
            )
            return (
                one,
                f"{lost}; {', '.join(other.scheme for other in others)} would not fit"
                if others
                else lost,
            )
    planned = [one for one in found if one.plan is not None]
    if not planned:
        raise QuantkitError(
            "; ".join(dict.fromkeys(one.refused for one in found)),
            "choose another model, scheme, engine or other devices",
        )
    smallest = min(planned, key=lambda one: one.plan.output_bytes_without_mtp if one.plan else 0)
    assert smallest.plan is not None
    placed = smallest.plan.devices
    needed, there = placed.weight_bytes + placed.reserve_bytes, placed.usable_bytes
    raise QuantkitError(
        f"no scheme fits {box.name}: {smallest.scheme}, the smallest, needs {format_bytes(needed)} "
        "of "
        f"each of {smallest.devices} devices "
        f"and a cache of {placed.context} tokens, where {format_bytes(there)} may be used",
        "give more or larger devices, or a smaller model",
    )


def _candidate(
    checkpoint: Checkpoint, box: Devices, scheme: Scheme, wanted: Wanted
) -> SchemeCandidate:
    refusals, recipe = [], wanted.settings(scheme.name)
    for name in _engines(box, wanted.engine):
        try:
            _check_engine(name, scheme, box, checkpoint)
            devices = _ranks(
                checkpoint, read_request(scheme, "auto", _format_for(name), recipe), box
            )
            options = PlanOptions(engine=_format_for(name), recipe=recipe, context=wanted.context)
            planned = plan(
                checkpoint,
                scheme,
                options,
                devices=Devices(devices, box.memory_bytes),
                tokens=wanted.tokens,
            )
            _check_smaller(planned, name, checkpoint, box)
            return SchemeCandidate(scheme.name, name, devices, planned)
        except QuantkitError as error:
            refusals.append(error.problem)
    return SchemeCandidate(scheme.name, "", refused=refusals[0])


def _engines(box: Devices, asked: str | None) -> tuple[str, ...]:
    if asked is not None and asked != QUANTKIT:
        find_engine(asked)
    assert box.device is not None
    there = ENGINES[box.device]
    if asked is not None and asked not in there:
        raise QuantkitError(
            f"{asked} is not launched on {box.name}", f"engines for it are {', '.join(there)}"
        )
    return (asked,) if asked else there


def _check_engine(engine: str, scheme: Scheme, box: Devices, checkpoint: Checkpoint) -> None:
    """Raises QuantkitError unless the engine loads the scheme on these devices and runs the
    model."""
    if engine == QUANTKIT:
        find_architecture(checkpoint.config)
        return
    format = choose(engine, scheme, device=box.device).format
    for unfit in check_model(find_engine(engine), checkpoint, format):
        raise QuantkitError(unfit.problem, unfit.remedy)


def _check_smaller(planned: Plan, engine: str, checkpoint: Checkpoint, box: Devices) -> None:
    """Refuse a scheme that saves nothing for a source that the engine loads unchanged."""
    loads = engine == QUANTKIT or find_load(engine, checkpoint, box.device) is not None
    if loads and planned.output_bytes > LEAST_SAVED * planned.source_bytes:
        there = (
            f"{format_bytes(planned.output_bytes)} are no fewer than the source's "
            f"{format_bytes(planned.source_bytes)}"
        )
        raise QuantkitError(
            f"{there}, which {engine} loads as it is", "take a scheme of fewer bits"
        )


def _format_for(engine: str) -> str | None:
    """The engine for quantize(): None for quantkit, which reads every format."""
    return None if engine == QUANTKIT else engine


def _ranks(checkpoint: Checkpoint, request: JobRequest, box: Devices) -> int:
    """The largest number of devices that can split the model's linears as the engine does; whole
    machines if there are several."""
    if box.count == 1 or box.boxes > 1:
        return box.count
    job = open_job(request, checkpoint)
    for ranks in range(box.count, 1, -1):
        if (
            box.count % ranks == 0
            and find_split_problem(job.rows, job.grids.get, ParallelSizes(ranks)) is None
        ):
            return ranks
    return 1


def _against(one: SchemeCandidate) -> str:
    """Why another candidate was not chosen."""
    if one.plan is None:
        return one.refused
    reason = "" if one.plan.fits else "does not fit: "
    return (
        f"{reason}{format_bytes(one.plan.output_bytes)} on {one.engine}, "
        f"{expected_losses()[one.scheme].describe()}"
    )


def _rtn_loss() -> str:
    return expected_losses()["rtn-w4a16"].describe()
