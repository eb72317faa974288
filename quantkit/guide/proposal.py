"""Which scheme and engine to take for a model on given devices: every scheme that an engine loads
there is planned, from headers alone.

Of those that fit, with room for a request, the one with the least measured loss is proposed
(recipes/go/expected.yaml); on a processor INT4, unless the model is too small for it.
What cannot be done is refused before any work.
"""

import shutil
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.common.assets import asset
from quantkit.common.devices import find_device, free_bytes
from quantkit.common.errors import QuantkitError
from quantkit.common.result import Result
from quantkit.common.settings import Strict, read_yaml
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.engines.check import check_model, find_load
from quantkit.engines.memory import ParallelSizes, find_split_problem
from quantkit.engines.profiles import Device, choose, find_engine
from quantkit.evaluation.run import prepare
from quantkit.grids.schemes import SCHEMES, Scheme, find_scheme
from quantkit.guide.job import (
    DOCUMENTS,
    CalibrationText,
    GoRequest,
    read_calibration_text,
    run_bytes,
    writes_text,
)
from quantkit.guide.options import QUANTKIT
from quantkit.models import find_architecture
from quantkit.planning.devices import Devices
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import Plan, plan
from quantkit.quantization.cost import (
    Rate,
    RunWork,
    comparison_work,
    expected_seconds,
    measure_rate,
    writing_work,
)
from quantkit.quantization.job import open_job
from quantkit.quantization.report import FAR
from quantkit.quantization.request import JobRequest, read_request, read_scheme

ENGINES: dict[Device, tuple[str, ...]] = {
    "cuda": ("vllm", "sglang"),
    "npu": ("vllm-ascend", "omni-infer", "sglang"),
    "cpu": (QUANTKIT,),
}
"""By kind of device, in order of preference; all have launch recipes."""

LEAST_SAVED = 0.9
"""Share of the source's bytes above which an output is not worth making."""


SIZE_CLASS = 2
"""A measured loss is shown for models of up to so many times the parameters, or as many fewer."""
CPU_SCHEME = "awq-w4a16"
"""On a processor, which reads every weight for a token, INT4 is taken where its KL per token is not
above FAR: where a measured model of at most SIZE_CLASS times the parameters lost no more."""


class MeasuredLoss(Strict):
    """Of a published model: KL from the source by scheme."""

    model: str
    parameters: float
    kl: dict[str, float]


class ExpectedLosses(Strict):
    """order: schemes, the least loss first."""

    order: tuple[str, ...]
    measured: tuple[MeasuredLoss, ...]

    def describe(self, scheme: str, parameters: int) -> str:
        """The loss of a scheme on models of this size class; empty where none was measured."""
        found = [
            f"KL {one.kl[scheme]:.2g} a token ({one.model})"
            for one in self.measured
            if scheme in one.kl and 1 / SIZE_CLASS <= parameters / one.parameters <= SIZE_CLASS
        ]
        return ", ".join(found)

    def least_parameters(self, scheme: str) -> float:
        """Of models that lose at most FAR."""
        known = [one.parameters for one in self.measured if one.kl.get(scheme, 1.0) <= FAR]
        return min(known) / SIZE_CLASS


@dataclass(frozen=True)
class SchemeCandidate:
    """A scheme for an engine, planned over `devices` of the machine; refused: why it is not
    possible, without a plan, and the remedy."""

    scheme: str
    engine: str
    devices: int = 0
    plan: Plan | None = None
    refused: str = ""
    remedy: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True, repr=False)
class Proposal(Result):
    """candidates: every scheme, least expected loss first. chosen: one of them. rate: of this
    machine; times are known to within `factor` either way. why: the choice in words. measuring:
    work of the step after quantizing."""

    model: str
    box: Devices
    candidates: tuple[SchemeCandidate, ...]
    chosen: SchemeCandidate
    why: str
    rate: Rate
    factor: float
    measuring: RunWork

    @property
    def seconds(self) -> float:
        """Of quantizing."""
        return expected_seconds(self.plan.work, self.rate)

    @property
    def measuring_seconds(self) -> float:
        return expected_seconds(self.measuring, self.rate)

    @property
    def _loss(self) -> str:
        return expected_losses().describe(self.chosen.scheme, self.plan.parameters)

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "model": self.model,
            "scheme": chosen.scheme,
            "engine": chosen.engine,
            "devices": chosen.devices,
            "why": self.why,
            "seconds": round(self.seconds),
            "measuring_seconds": round(self.measuring_seconds),
            "expected_loss": self._loss,
            "plan": self.plan.to_json(),
            "others": {
                one.scheme: _against(one) for one in self.candidates if one.scheme != chosen.scheme
            },
        }

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
            *([("of the source", planned.description)] if planned.description else []),
            *([("loss to expect", self._loss)] if self._loss else []),
            (
                "time",
                f"about {format_duration(self.seconds)}, then "
                f"{format_duration(self.measuring_seconds)} to measure, within a factor of "
                f"{self.factor:g}",
            ),
            *([("  faster", planned.faster.describe(self.rate))] if planned.faster else []),
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
def expected_losses() -> ExpectedLosses:
    return read_yaml(asset("recipes", "go", "expected.yaml"), ExpectedLosses, "restore that file")


def candidates(
    checkpoint: Checkpoint,
    box: Devices,
    options: PlanOptions,
    scheme: str | None = None,
    tokens: int | None = None,
) -> list[SchemeCandidate]:
    """Every scheme, or the given one, in order of expected loss, on the first engine for these
    devices that loads it. options: of the output; tokens: of the calibration text, if known."""
    if scheme is not None:
        find_scheme(scheme)
    return [
        _candidate(checkpoint, box, name, options, tokens)
        for name in expected_losses().order
        if scheme in (None, name)
    ]


def choose_candidate(found: list[SchemeCandidate], box: Devices) -> tuple[SchemeCandidate, str]:
    """The first that fits, on a processor INT4 of models that are large enough, and why. Raises
    QuantkitError if none does, with the devices that the smallest needs."""
    chosen = next((one for one in found if one.fits), None)
    if chosen is None:
        raise _none_fits(found, box)
    if len(found) == 1:
        return chosen, "as asked for"
    why = "least loss where schemes were measured, of those that fit"
    int4 = next((one for one in found if one.fits and one.scheme == CPU_SCHEME), chosen)
    if box.device == "cpu" and int4 is not chosen and int4.plan is not None:
        least = expected_losses().least_parameters(CPU_SCHEME)
        if int4.plan.parameters >= least:
            return int4, (
                "decoding on a processor is as fast as its weights are few bytes, and the KL "
                f"to expect is not above {FAR:g}; --scheme takes another"
            )
        why += f"; INT4 below {least / 1e6:.0f} M parameters may lose more than KL {FAR:g}"
    unfit = [one.scheme for one in found[: found.index(chosen)] if one.plan]
    return chosen, f"{why}; {', '.join(unfit)} would not fit" if unfit else why


def _none_fits(found: list[SchemeCandidate], box: Devices) -> QuantkitError:
    planned = [(one, one.plan) for one in found if one.plan is not None]
    if not planned:
        remedies = list(dict.fromkeys(one.remedy for one in found))
        return QuantkitError(
            "; ".join(dict.fromkeys(one.refused for one in found)),
            remedies[0]
            if len(remedies) == 1
            else "choose another model, scheme, engine or other devices",
        )
    smallest, plan = min(planned, key=lambda one: one[1].output_bytes_without_mtp)
    placed = plan.devices
    needed, there = placed.weight_bytes + placed.reserve_bytes, placed.usable_bytes
    return QuantkitError(
        f"no scheme fits {box.name}: {smallest.scheme}, the smallest, needs {format_bytes(needed)} "
        f"of each of {smallest.devices} devices and a cache of {placed.context} tokens, where "
        f"{format_bytes(there)} may be used",
        "give more or larger devices, or a smaller model",
    )


def _candidate(
    checkpoint: Checkpoint, box: Devices, name: str, wanted: PlanOptions, tokens: int | None
) -> SchemeCandidate:
    refusals = []
    for engine in _engines(box, wanted.engine):
        try:
            options = replace(wanted, engine=None if engine == QUANTKIT else engine)
            scheme, recipe, mixture = read_scheme(name, options)
            _check_engine(engine, scheme, box, checkpoint)
            request = read_request(scheme, options.format, options.engine, recipe, mixture)
            devices = _ranks(checkpoint, request, box)
            share = Devices(devices, box.memory_bytes)
            planned = plan(checkpoint, scheme, options, devices=share, tokens=tokens)
            _check_smaller(planned, engine, checkpoint, box)
            return SchemeCandidate(name, engine, devices, planned)
        except QuantkitError as error:
            refusals.append(error)
    return SchemeCandidate(name, "", refused=refusals[0].problem, remedy=refusals[0].remedy)


def _engines(box: Devices, engine: str | None) -> tuple[str, ...]:
    if engine is not None and engine != QUANTKIT:
        find_engine(engine)
    assert box.device is not None
    there = ENGINES[box.device]
    if engine is not None and engine not in there:
        raise QuantkitError(
            f"{engine} is not launched on {box.name}", f"engines for it are {', '.join(there)}"
        )
    return (engine,) if engine else there


def _check_engine(engine: str, scheme: Scheme, box: Devices, checkpoint: Checkpoint) -> None:
    """Raises QuantkitError unless the engine loads the scheme on these devices and runs the
    model."""
    if engine == QUANTKIT:
        find_architecture(checkpoint.config)
        return
    rule = choose(engine, scheme, device=box.device).rule
    for unfit in check_model(find_engine(engine), checkpoint, rule.format, rule.variant):
        raise QuantkitError(unfit.problem, unfit.remedy)


def _check_smaller(planned: Plan, engine: str, checkpoint: Checkpoint, box: Devices) -> None:
    """Refuse a scheme that saves nothing for a source that the engine loads unchanged."""
    loads = engine == QUANTKIT or find_load(engine, checkpoint, box.device) is not None
    if loads and planned.output_bytes > LEAST_SAVED * planned.source_bytes:
        raise QuantkitError(
            f"the output saves less than {1 - LEAST_SAVED:.0%} of the source's "
            f"{format_bytes(planned.source_bytes)}, which {engine} loads as it is",
            "take a scheme of fewer bits",
        )


def _ranks(checkpoint: Checkpoint, request: JobRequest, box: Devices) -> int:
    """The largest number of devices that can split the model's linears as the engine does; whole
    machines if there are several."""
    if box.count == 1 or box.boxes > 1:
        return box.count
    job = open_job(request, checkpoint)
    split = partial(find_split_problem, job.rows, job.grids.get, job.checkpoint.input_rotation)
    for ranks in range(box.count, 1, -1):
        if box.count % ranks == 0 and split(ParallelSizes(ranks)) is None:
            return ranks
    return 1


def _against(one: SchemeCandidate) -> str:
    """Why another candidate was not chosen."""
    if one.plan is None:
        return one.refused
    reason = "" if one.plan.fits else "does not fit: "
    loss = expected_losses().describe(one.scheme, one.plan.parameters)
    size = f"{format_bytes(one.plan.output_bytes)} on {one.engine}"
    return f"{reason}{size}{', ' if loss else ''}{loss}"


TIME_FACTOR = 1.5
"""The estimated time is within this factor of the measured one, on a CPU (docs/quantize.md)."""


def propose(request: GoRequest) -> Proposal:
    """Raises QuantkitError if no scheme fits, or this machine has too little disk or memory."""
    _check_tasks(request)
    checkpoint, options = open_headers(request.model), request.options
    text = _calibration_text(request)
    tokens = None if text is None else text.tokens
    found = candidates(checkpoint, request.box, options.planned, request.scheme, tokens)
    chosen, why = choose_candidate(found, request.box)
    folder = _existing_parent(request.out)
    chosen = _with_disk(chosen, folder)
    assert chosen.plan is not None
    _check_room(chosen.plan, request.model, folder)
    return Proposal(
        request.model,
        request.box,
        tuple(found),
        chosen,
        why,
        measure_rate(folder),
        TIME_FACTOR,
        _measuring(request, checkpoint, chosen, text),
    )


def _measuring(
    request: GoRequest,
    checkpoint: Checkpoint,
    chosen: SchemeCandidate,
    text: CalibrationText | None,
) -> RunWork:
    """Of writing the calibration text, and of the step that follows quantizing, none where the
    source does not fit in memory."""
    assert chosen.plan is not None
    scheme, recipe, mixture = read_scheme(chosen.scheme, request.options)
    job = open_job(read_request(scheme, chosen.plan.format, None, recipe, mixture), checkpoint)
    source, needed = find_local(request.model), run_bytes(chosen.plan.parameters)
    lengths, work = [recipe.seq_len] * DOCUMENTS, RunWork(0.0, 0, 0)
    if source is not None and text is not None:
        recipe = request.recipe(chosen.scheme, source)
        lengths = list(map(len, text.documents))
    if needed <= free_bytes(find_device("auto")):
        work += comparison_work(job, sum(lengths), sum(lengths) // len(lengths))
    if job.request.methods and writes_text(request, recipe, checkpoint.config, needed):
        written = (recipe.samples + recipe.held_out) // 2
        work += writing_work(job, written * recipe.seq_len, recipe.seq_len)
    return work


def _calibration_text(request: GoRequest) -> CalibrationText | None:
    """The same for all schemes; None if the tokenizer is not on this machine."""
    source = find_local(request.model)
    if source is None:
        return None
    return read_calibration_text(source, request.recipe(CPU_SCHEME, source))


def _check_tasks(request: GoRequest) -> None:
    """Raises QuantkitError for a task that does not exist, lacks data or runs programs."""
    for name in request.options.scored_tasks:
        if prepare(name, "evalscope", None, request.options.limit, None, None, 0).grader.runs_code:
            raise QuantkitError(
                f"{name} runs programs that the model wrote",
                "score it with quantkit eval --allow-code-exec",
            )


def _existing_parent(path: Path) -> Path:
    """The nearest existing parent folder."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def _with_disk(chosen: SchemeCandidate, folder: Path) -> SchemeCandidate:
    assert chosen.plan is not None
    return replace(
        chosen, plan=replace(chosen.plan, disk_free_bytes=shutil.disk_usage(folder).free)
    )


def _check_room(planned: Plan, model: str, folder: Path) -> None:
    if planned.disk_bytes > planned.disk_free_bytes:
        raise QuantkitError(
            f"the output needs {format_bytes(planned.disk_bytes)} of disk and {folder} has "
            f"{format_bytes(planned.disk_free_bytes)} free",
            "free some, or give an --out on another disk",
        )
    if find_local(model) is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = _existing_parent(Path(HF_HUB_CACHE))
        free = shutil.disk_usage(cache).free
        same = cache.stat().st_dev == folder.stat().st_dev
        needed = planned.source_bytes + (planned.disk_bytes if same else 0)
        if needed > free:
            raise QuantkitError(
                f"downloading {model} needs {format_bytes(needed)} of disk and {cache} has "
                f"{format_bytes(free)} "
                "free",
                "free some, or set HF_HOME",
            )
    available = psutil.virtual_memory().available
    if planned.host_least_bytes > available:
        raise QuantkitError(
            f"quantizing needs {format_bytes(planned.host_least_bytes)} of memory at least and "
            f"{format_bytes(available)} are free",
            "close other programs, or give fewer --samples or a shorter --seq-len",
        )
