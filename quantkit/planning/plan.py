"""plan(): what a quantization will need and make, and where the result runs, from config.json and
safetensors headers alone.

It opens a model as quantize() does, and refuses what that refuses. Of a hub model it downloads no
weight. Sizes are those of the tensors that quantize() would write, to the byte. Memory and time are
estimates whose assumptions are told.
"""

import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.remote import open_headers
from quantkit.common.errors import QuantkitError
from quantkit.common.result import Result
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.engines.memory import NO_DRAFT, DraftSizes, ParallelSizes, draft_sizes, fit_rows
from quantkit.evaluation.results.published import published_speeds
from quantkit.executor.cache.cache import cache_dtype
from quantkit.executor.ranks.expert_parallel import check_experts
from quantkit.grids.schemes import Scheme
from quantkit.models.architecture import CacheBits
from quantkit.models.table import Parameter
from quantkit.planning.clusters import PlannedLayout, plan_layout
from quantkit.planning.cost_model import predict
from quantkit.planning.devices import STANDARD_DEVICES, Devices, read_devices, read_number
from quantkit.planning.workspace import reserved
from quantkit.quantization.bit_allocation import (
    Options,
    PlannedChoice,
    PlannedSize,
    check_wanted,
    plan_choosing,
    read_sensitivities,
)
from quantkit.quantization.cost import RATES, RunWork, job_work, seconds_of
from quantkit.quantization.job import NO_MIXTURE, Job, open_job, read_request
from quantkit.quantization.memory import expected_peak
from quantkit.quantization.mixed_precision import Mixture

MEMORY_FRACTION = 0.9
"""Of a device's memory that an engine uses."""
RESERVE_GIB = 4.0
"""Of that, for activations, graphs and communication."""
_CACHE_NAMES: dict[CacheBits, str] = {8: "8-bit", 16: "BF16"}
PREDICTED_BATCHES = (1, 2, 4, 8, 16, 32)
PREDICTED_CONTEXT = 384
"""Tokens that each sequence of a predicted decode step attends to, at most: 128 of a prompt and, on
average, half of 512 written."""


@dataclass(frozen=True)
class HostPeak:
    """Bytes of host memory at the worst moment of the run, which is at the unit `where`."""

    process: int
    hidden_states: int
    work: int
    where: str


@dataclass(frozen=True)
class PlacedRequest:
    """What must fit beside the weights: one request of `context` tokens in a cache of `bits`.
    redundant: copies of routed experts a layer;
    data: whether devices have requests of their own, and share nothing but the routed experts.
    draft: of the model that guesses."""

    context: int
    redundant: int
    bits: CacheBits
    data: bool
    draft: DraftSizes = NO_DRAFT

    def sizes(self, devices: int) -> ParallelSizes:
        if self.data:
            return ParallelSizes(1, data=devices, expert=True, redundant=self.redundant)
        return ParallelSizes(devices, expert=self.redundant > 0, redundant=self.redundant)


@dataclass(frozen=True)
class DeviceShare:
    """What one of `count` devices holds, in bytes. cache_tokens: tokens that fit beside the
    weights, of all requests together; None, as cache_bytes_per_token and state_bytes_per_request,
    for an architecture that quantkit does not know. context: tokens of the request that must fit,
    and of all that are counted. state_bytes_per_request: what linear attention keeps of each,
    whatever its length.
    workspace_bytes: of the reserve, what is known to be taken, by what takes it; empty for hardware
    that is not known."""

    count: int
    memory_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int
    workspace_bytes: dict[str, int]
    cache_bytes: int
    cache_bytes_per_token: int | None
    state_bytes_per_request: int | None
    cache_tokens: int | None
    context: int
    assumption: str

    def facts(self) -> list[tuple[str, str]]:
        room = "" if self.cache_tokens is None else f", {self.cache_tokens:,} tokens"
        return [
            (
                f"  {self.count} device{'s' if self.count > 1 else ''} of {format_bytes(self.memory_bytes)}",
                f"{format_bytes(self.weight_bytes)} of weights each",
            ),
            ("  room for the cache", f"{format_bytes(self.cache_bytes)} each{room}"),
            ("  assuming", self.assumption),
        ]


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds that quantizing should take on a device, and what is assumed of it."""

    device: str
    seconds: int
    assumption: str


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What a quantization needs and makes. Bytes are of tensors; disk_bytes is what must be free
    for the output and what a run keeps
    to go on from. cost_model: predicted decoding times, where the devices are hardware that is
    known and all linears are on one grid.
    sizes: what other --bits would make, where grids are chosen. layout: what each device holds in a
    layout of the engine, where one was asked for; `fits` is then of it. told: as in `Inventory`."""

    model: str
    scheme: str
    format: str
    source_bytes: int
    output_bytes: int
    output_bytes_without_mtp: int
    output_bytes_by_part: dict[str, int]
    fits: bool
    devices: DeviceShare
    host_peak_bytes: int
    host_least_bytes: int
    host_peak: HostPeak
    disk_bytes: int
    disk_free_bytes: int
    work: RunWork
    time: tuple[TimeEstimate, ...]
    cost_model: dict[str, Any] | None = None
    sizes: tuple[PlannedSize, ...] = ()
    layout: PlannedLayout | None = None
    told: str = ""

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("sizes", "cost_model", "layout", "told"):
            if not found[name]:
                del found[name]
        return found

    @property
    def heading(self) -> str:
        return f"{self.model} as {self.scheme}"

    def facts(self) -> list[tuple[str, str]]:
        host = self.host_peak
        return [
            (
                "output",
                f"{format_bytes(self.output_bytes)} ({self.format}), without MTP "
                f"{format_bytes(self.output_bytes_without_mtp)}",
            ),
            *(
                (f"  {part}", format_bytes(count))
                for part, count in self.output_bytes_by_part.items()
            ),
            *([("of the source", self.told)] if self.told else []),
            ("fits", "yes" if self.fits else "NO"),
            *(self.devices.facts() if self.layout is None else self.layout.facts()),
            *((f"  at {one.bits:.2f} bits", one.told()) for one in self.sizes),
            ("host memory, peak", f"{format_bytes(self.host_peak_bytes)} (at {host.where})"),
            (
                "disk",
                f"{format_bytes(self.disk_bytes)} needed, {format_bytes(self.disk_free_bytes)} free here",
            ),
            *(
                (
                    f"time on {one.device}",
                    f"{format_duration(one.seconds)}, assuming {one.assumption}",
                )
                for one in self.time
            ),
        ]


def plan(
    model: str | Path | Checkpoint,
    scheme: Scheme,
    format: str = "auto",
    *,
    engine: str | None = None,
    mixture: Mixture = NO_MIXTURE,
    sensitivities: Path | None = None,
    recipe: Recipe | None = None,
    devices: str | Devices | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    context: int = 4096,
    redundant: int = 0,
    tokens: int | None = None,
    cache: str | None = None,
    dp: int = 1,
    draft: str | Path | None = None,
    layout: str | None = None,
) -> Plan:
    """What quantize() with the same arguments will write and need, and whether its output serves
    `context` tokens on `devices`.

    model: a directory, a built-in name, a hub id, or one that is open. recipe: the scheme's own by
    default; samples and seq_len are set
    over it. devices: "8x64GiB", as without, tensor parallel over all of them, or "8x910B1" for
    predicted decoding times as well. Raises QuantkitError where quantize() would refuse the source.
    redundant: copies of routed experts in each layer, all of which then
    lie whole on devices. tokens: of the calibration text, for the time; as many as the recipe takes
    at most otherwise.
    cache: int8 or fp8 counts one of 8 bits, as quantkit has it; the scheme's otherwise, and in a
    layout. dp: the number of devices, where each is to have requests of its own, a part of the
    routed experts, and everything else whole. draft: a draft model, which every device holds whole,
    and keeps a cache for. layout: of the engine, by name, as `deploy` has it; `devices` are those
    of one of its machines.
    """
    check_wanted(sensitivities, mixture)
    if layout is not None and cache is not None:
        remedy = (
            "leave out --cache; --scheme int8-a8w8c8 has steps of a cache in 8 bits, which "
            "roles that keep one read"
        )
        raise QuantkitError(
            "--cache does not go with --layout: a layout's engine decides how its roles keep tokens",
            remedy,
        )
    settings = (recipe or load_recipe(scheme.name)).with_given(samples=samples, seq_len=seq_len)
    request = read_request(scheme, format, engine, settings, mixture)
    target = (
        devices
        if isinstance(devices, Devices)
        else read_devices(STANDARD_DEVICES if devices is None else devices)
    )
    place = _read_place(target.count, context, redundant, cache or scheme.cache, dp, draft)
    job = open_job(request, model if isinstance(model, Checkpoint) else open_headers(str(model)))
    check_experts(job.rows, dp)
    if redundant and all(row.expert is None for row in job.rows):
        raise QuantkitError("the model has no routed experts to copy", "leave out --redundant")
    choosing = _choose(job, sensitivities, target, place) if mixture.chooses else None
    job = choosing.job if choosing else job
    rows = [(row, job.stored_bytes(row, job.grids.get(row.module))) for row in job.rows]
    output = sum(nbytes for _, nbytes in rows)
    fits, placed = _placed(rows, job, target, place)
    laid_out = None if layout is None else _laid_out(rows, job, engine, layout, place, devices)
    peak, least = (expected_peak(job, memory)[0] for memory in (None, 0))
    stored = sum(tensor.nbytes for tensor in job.checkpoint.unpruned.tensors.values())
    work = job_work(job, job.linears, stored + output, tokens)
    state = (
        2 * peak.hidden
    )  # of the last finished layer, and of its successor while they are written
    return Plan(
        model=str(job.checkpoint.path),
        scheme=request.scheme.name,
        format=job.request.format,
        source_bytes=stored,
        output_bytes=output,
        output_bytes_without_mtp=sum(nbytes for row, nbytes in rows if not row.mtp),
        output_bytes_by_part=_by_part(rows),
        fits=fits if laid_out is None else laid_out.fits,
        devices=placed,
        host_peak_bytes=peak.total,
        host_least_bytes=least.total,
        host_peak=HostPeak(peak.process, peak.hidden, peak.work, peak.where),
        disk_bytes=output + state,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        work=work,
        time=_times(work),
        cost_model=None if choosing or place.data else _predicted(job, target, context),
        sizes=choosing.sizes(target.count) if choosing else (),
        layout=laid_out,
        told=job.inventory.told,
    )


def _laid_out(
    rows: list[tuple[Parameter, int]],
    job: Job,
    engine: str | None,
    layout: str,
    place: PlacedRequest,
    devices: str | Devices | None,
) -> PlannedLayout:
    """devices: of one machine, as `deploy` takes them; those of the layout without."""
    if engine is None:
        raise QuantkitError(f"layout {layout!r} is of no engine", "give --engine")
    if job.inventory.by_name:
        raise QuantkitError(
            "layouts are planned for architectures that quantkit knows", "leave out --layout"
        )
    given = read_number(devices) if isinstance(devices, str) else devices
    machine: dict[str, Any] = {"devices": given}
    if isinstance(given, Devices):
        machine = {
            "devices": given.count,
            "memory_gib": given.memory_bytes / 2**30,
            "device": given.device,
        }
    options = {**machine, "grid": job.grids.get}
    return plan_layout(
        engine,
        layout,
        rows,
        job.inventory.config,
        job.request.scheme,
        place.context,
        place.redundant,
        **options,
    )


def _read_place(
    devices: int, context: int, redundant: int, cache: str | None, dp: int, draft: str | Path | None
) -> PlacedRequest:
    bits: CacheBits = 16 if cache_dtype(cache) is None else 8
    if dp not in (1, devices):
        raise QuantkitError(
            f"--dp {dp} is for as many devices, and there are {devices}",
            f"give --dp {devices}, or leave it out",
        )
    if draft is not None and dp > 1:
        raise QuantkitError("--dp does not go with --draft", "give one or the other")
    beside = NO_DRAFT if draft is None else draft_sizes(open_headers(str(draft)), bits)
    return PlacedRequest(context, redundant, bits, data=dp > 1, draft=beside)


def _choose(
    job: Job, sensitivities: Path | None, devices: Devices, place: PlacedRequest
) -> PlannedChoice:
    """Grids for the linears, and what other sizes would make."""
    options = Options(job)
    measured = None if sensitivities is None else read_sensitivities(sensitivities)

    def holds(rows: list[tuple[Parameter, int]], count: int) -> bool:
        return _placed(rows, options.job, replace(devices, count=count), place)[0]

    return plan_choosing(options, measured, holds)


def _by_part(rows: list[tuple[Parameter, int]]) -> dict[str, int]:
    parts = Counter[str]()
    for row, stored in rows:
        parts[row.part] += stored
    return dict(parts.most_common())


def _workspaces(job: Job, devices: Devices, context: int) -> dict[str, int]:
    """What a step takes beside weights and cache on hardware that is known; nothing elsewhere."""
    if devices.hardware is None or job.inventory.by_name:
        return {}
    grid, config = job.request.scheme.weight, job.inventory.config
    return reserved(job.rows, config, grid, devices=devices.count, context=context)


def _placed(
    rows: list[tuple[Parameter, int]], job: Job, devices: Devices, request: PlacedRequest
) -> tuple[bool, DeviceShare]:
    """Whether weights and one request fit, and what a device then holds."""
    context, usable = request.context, int(devices.memory_bytes * MEMORY_FRACTION)
    workspaces = _workspaces(job, replace(devices, count=1) if request.data else devices, context)
    reserve = max(int(RESERVE_GIB * 2**30), sum(workspaces.values()))
    told = (
        f"{MEMORY_FRACTION:.0%} of each device usable, {reserve / 2**30:.3g} GiB of that for "
        "activations"
    )
    if job.inventory.by_name:
        quantized = {row.name for row in job.linears}
        weights = sum(
            -(-stored // devices.count) if row.name in quantized else stored for row, stored in rows
        )
        weights += request.draft.weight_bytes
        fits, per_token, state, tokens = usable - reserve >= weights, None, None, None
        assumption = (
            f"quantized linears split over {devices.count}, {told}; the cache of an "
            "unknown architecture is not counted"
        )
    else:
        found = fit_rows(
            rows,
            job.inventory.config,
            request.sizes(devices.count),
            context,
            devices.memory_bytes / 2**30,
            MEMORY_FRACTION,
            reserve / 2**30,
            request.bits,
            request.draft,
        )
        weights, fits, per_token, tokens = (
            found.weight_bytes,
            found.fits,
            found.cache_bytes_per_token,
            found.tokens * (devices.count if request.data else 1),
        )
        state = found.state_bytes_per_request
        assumption = (
            f"{'data and expert' if request.data else 'tensor'} parallel over {devices.count}, MTP "
            f"layer not loaded, {told}, "
            f"{_CACHE_NAMES[request.bits]} cache; "
        )
        if request.data:
            assumption += (
                "attention and shared experts whole on every device, and each request's "
                "cache on one"
            )
        else:
            assumption += "MLA's latent is whole on every device"
        if state:
            assumption += (
                f"; {format_bytes(state)} of states for each request of {context:,} tokens"
            )
        if request.redundant:
            assumption += f"; experts whole, {request.redundant} copies a layer"
    if request.draft.weight_bytes:
        assumption += (
            f"; {format_bytes(request.draft.weight_bytes)} of a draft model on every device"
        )
    return fits, DeviceShare(
        count=devices.count,
        memory_bytes=devices.memory_bytes,
        usable_bytes=usable,
        weight_bytes=weights,
        reserve_bytes=reserve,
        workspace_bytes=workspaces,
        cache_bytes=max(usable - reserve - weights, 0),
        cache_bytes_per_token=per_token,
        state_bytes_per_request=state,
        cache_tokens=tokens,
        context=context,
        assumption=assumption,
    )


def _times(work: RunWork) -> tuple[TimeEstimate, ...]:
    """On this machine's processor and on one H200."""
    cores = os.cpu_count() or 1
    return tuple(
        TimeEstimate(rate.name, round(seconds_of(work, rate, cores)), rate.assumption(cores))
        for rate in RATES
    )


def _predicted(job: Job, devices: Devices, context: int) -> dict[str, Any] | None:
    """Decoding times on known hardware, beside what others published of it."""
    if devices.hardware is None:
        return None
    attended = min(context, PREDICTED_CONTEXT)
    predicted = predict(
        job.checkpoint.config,
        job.request.scheme,
        devices.hardware,
        devices=devices.count,
        batches=PREDICTED_BATCHES,
        context=attended,
    )
    published = [
        table for table in published_speeds() if devices.hardware.name in table["hardware"]
    ]
    return predicted | {"published": published}
