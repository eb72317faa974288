"""plan(): what a quantization needs and writes, and whether the result fits the devices, from
config.json and safetensors headers alone.

A model is opened as quantize() opens it, with the same errors; no weights of a Hub model are
downloaded. Sizes are exact: those of the tensors that quantize() would write. Memory and time are
estimates with stated assumptions.
"""

import math
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantkit.checkpoint.aux_files import has_tokenizer
from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject, Result
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.engines.memory import NO_DRAFT, draft_sizes
from quantkit.executor.cache.cache import cache_dtype
from quantkit.executor.ranks.expert_parallel import check_experts
from quantkit.executor.speculation.draft_model import check_draft, check_rolls_back
from quantkit.grids.schemes import Scheme
from quantkit.models.architecture import CacheBits
from quantkit.models.eagle3 import is_head
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter
from quantkit.planning.device_fit import DeviceShare, RequestSizes, fit_devices
from quantkit.planning.devices import STANDARD_DEVICES, Devices, read_devices
from quantkit.planning.layouts import PlannedLayout, plan_layout
from quantkit.planning.options import PlanOptions
from quantkit.quantization.bit_allocation import (
    GridOptions,
    PlannedSize,
    SizeCurve,
    plan_sizes,
    read_sensitivities,
)
from quantkit.quantization.cost import (
    H200,
    Faster,
    RunWork,
    expected_seconds,
    faster_run,
    job_work,
    measure_rate,
)
from quantkit.quantization.job import Job, open_job
from quantkit.quantization.memory import Peak, expected_peak
from quantkit.quantization.request import read_request, read_scheme
from quantkit.tokenizer.chat import ChatTokenizer


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated seconds of quantizing on a device, with the assumptions."""

    device: str
    seconds: int
    assumption: str


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What a quantization needs and writes. Bytes are of tensors; disk_bytes is the free space
    needed for the output and the state that a run resumes from.

    sizes: alternatives for other --bits, if grids are chosen. layout: what each device holds
    in an engine's layout, if one was requested; `fits` then refers to it. description: as in
    `Inventory`.
    """

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
    host_peak: Peak
    disk_bytes: int
    disk_free_bytes: int
    parameters: int
    work: RunWork
    faster: Faster | None
    time: tuple[TimeEstimate, ...]
    sizes: tuple[PlannedSize, ...] = ()
    layout: PlannedLayout | None = None
    description: str = ""
    host_table_bytes: int = 0
    """Of n-gram tables, which whoever serves the output keeps in host memory."""

    def to_json(self) -> JsonObject:
        found = asdict(self)
        found["told"] = found.pop("description")  # key of the stored JSON
        for name in ("sizes", "layout", "told", "host_table_bytes"):
            if not found[name]:
                del found[name]
        return found

    def rows(self) -> list[JsonObject]:
        """A row for each part of the output."""
        parts = self.output_bytes_by_part.items()
        return [{"part": part, "bytes": count} for part, count in parts]

    @property
    def heading(self) -> str:
        return f"{self.model} as {self.scheme}"

    def facts(self) -> list[tuple[str, str]]:
        host = self.host_peak
        smaller = self.output_bytes_without_mtp
        without_mtp = (
            f", without MTP {format_bytes(smaller)}" if smaller < self.output_bytes else ""
        )
        return [
            (
                "output",
                f"{format_bytes(self.output_bytes)} ({self.format}){without_mtp}",
            ),
            *(
                (f"  {part}", format_bytes(count))
                for part, count in self.output_bytes_by_part.items()
            ),
            *([("of the source", self.description)] if self.description else []),
            ("fits", "yes" if self.fits else "NO"),
            *(self.devices.facts() if self.layout is None else self.layout.facts()),
            *((f"  at {one.bits:.2f} bits", one.describe()) for one in self.sizes),
            ("host memory, peak", f"{format_bytes(self.host_peak_bytes)} (at {host.where})"),
            *(
                [("hidden states, in a file", f"{format_bytes(host.in_file)} next to the output")]
                if host.in_file
                else []
            ),
            *(
                [("host memory, n-gram tables", f"{format_bytes(tables)} when it is served")]
                if (tables := self.host_table_bytes)
                else []
            ),
            (
                "disk",
                f"{format_bytes(self.disk_bytes)} needed, {format_bytes(self.disk_free_bytes)} "
                "free here",
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
    scheme: str | Scheme | None = None,
    options: PlanOptions = PlanOptions(),
    *,
    devices: Devices | None = None,
    tokens: int | None = None,
) -> Plan:
    """What quantize() with the same arguments writes and needs, and whether its output serves
    `context` tokens on the devices.

    model: a directory, a built-in name, a Hub id, or an open checkpoint. devices: in place of
    `options.devices`. tokens: of the calibration text, for the time estimate; by default the
    recipe's maximum. Raises QuantkitError where quantize() would refuse the source.
    """
    scheme, settings, mixture = read_scheme(scheme, options)
    layout = options.layout
    context, redundant, dp = options.context, options.redundant, options.dp
    if layout is not None and options.cache is not None:
        remedy = (
            "leave out --cache; --scheme int8-a8w8c8 has the scales of an 8-bit "
            "cache, which roles with such a cache read"
        )
        raise QuantkitError(
            "--cache does not go with --layout: a layout's engine decides the cache dtype of its "
            "roles",
            remedy,
        )
    request = read_request(scheme, options.format, options.engine, settings, mixture)
    target = devices or read_devices(options.devices or STANDARD_DEVICES)
    if not target.memory_bytes:
        target = replace(target, memory_bytes=read_devices(STANDARD_DEVICES).memory_bytes)
    cache = options.cache or scheme.cache
    draft = None if options.draft is None else open_headers(str(options.draft))
    serving = _read_request(target.count, context, redundant, cache, dp, draft)
    job = open_job(request, model if isinstance(model, Checkpoint) else open_headers(str(model)))
    if draft is not None:
        _check_draft(draft, job.checkpoint.path)
    check_experts(job.rows, dp)
    if redundant and all(row.expert is None for row in job.rows):
        raise QuantkitError("the model has no routed experts to copy", "leave out --redundant")
    choice = _choose(job, target, serving) if mixture.chooses else None
    job = choice.job if choice else job
    rows = [(row, job.stored_bytes(row, job.grids.get(row.module))) for row in job.rows]
    output = sum(nbytes for _, nbytes in rows)
    fits, device_share = fit_devices(rows, job, target, serving)
    planned_layout = None if layout is None else _plan_layout(rows, job, options, serving)
    peak, least = (expected_peak(job, memory)[0] for memory in (None, 0))
    stored = sum(tensor.nbytes for tensor in job.checkpoint.source.tensors.values())
    work = job_work(job, job.linears, stored + output, tokens)
    # Of the last finished layer, and of the next one while it is written; and those of the run.
    state = 2 * peak.hidden_states + 3 * peak.in_file
    return Plan(
        model=str(job.checkpoint.path),
        scheme=request.scheme.name,
        format=job.request.format,
        source_bytes=stored,
        output_bytes=output,
        output_bytes_without_mtp=sum(nbytes for row, nbytes in rows if not row.mtp),
        output_bytes_by_part=_by_part(rows),
        fits=fits if planned_layout is None else planned_layout.fits,
        devices=device_share,
        host_peak_bytes=peak.total,
        host_least_bytes=least.total,
        host_peak=peak,
        disk_bytes=output + state,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        parameters=sum(math.prod(row.shape) for row in job.rows),
        work=work,
        faster=faster_run(job, stored + output, tokens),
        time=_time_estimates(work),
        sizes=choice.sizes(target.count) if choice else (),
        layout=planned_layout,
        description=job.note,
        host_table_bytes=sum(nbytes for row, nbytes in rows if row.role == "ngram_table"),
    )


def _plan_layout(
    rows: list[tuple[Parameter, int]], job: Job, options: PlanOptions, serving: RequestSizes
) -> PlannedLayout:
    """`options.devices` are those of one machine; the layout's own by default."""
    engine, layout, devices = options.engine, options.layout, options.devices
    assert layout is not None
    if engine is None:
        raise QuantkitError(f"layout {layout!r} needs an engine", "give --engine")
    if job.inventory.by_name:
        raise QuantkitError(
            "layouts are planned for architectures that quantkit knows", "leave out --layout"
        )
    given = None if devices is None else read_devices(devices)
    machine: JsonObject = {}
    if given is not None:
        memory = given.memory_bytes / 2**30 or None
        machine = {"devices": given.count, "memory_gib": memory, "device": given.device}
    planned = plan_layout(
        engine,
        layout,
        rows,
        job.inventory.config,
        job.request.scheme,
        serving.context,
        serving.redundant,
        grid=job.grids.get,
        input_rotation=job.checkpoint.input_rotation,
        **machine,
    )
    option = "" if devices is None else f" --devices {devices}"
    starts = f"quantkit deploy OUT --engine {engine} --layout {layout}{option}"
    scheduled = f"{starts} --context {serving.context} --format slurm | sbatch"
    return replace(planned, launch=scheduled)


def _read_request(
    devices: int, context: int, redundant: int, cache: str | None, dp: int, draft: Checkpoint | None
) -> RequestSizes:
    bits: CacheBits = 16 if cache_dtype(cache) is None else 8
    if dp not in (1, devices):
        raise QuantkitError(
            f"--dp {dp} is for as many devices, and there are {devices}",
            f"give --dp {devices}, or leave it out",
        )
    if draft is not None and dp > 1:
        raise QuantkitError("--dp does not go with --draft", "give one or the other")
    draft_model = NO_DRAFT if draft is None else draft_sizes(draft, bits)
    return RequestSizes(context, redundant, bits, data=dp > 1, draft=draft_model)


def _check_draft(draft: Checkpoint, path: Path) -> None:
    """Refuses what `run` refuses; token ids only where both tokenizers are on this machine."""
    if has_tokenizer(draft.path) and has_tokenizer(path):
        check_draft(draft.path, ChatTokenizer(path))
    if not is_head(draft.config):
        check_rolls_back(draft.path, read_model(draft).config)


def _choose(job: Job, devices: Devices, serving: RequestSizes) -> SizeCurve:
    """Grids for the linears, and the sizes of alternatives."""
    options, path = GridOptions(job), job.request.mixture.sensitivities
    measured = None if path is None else read_sensitivities(path)

    def holds(rows: list[tuple[Parameter, int]], count: int) -> bool:
        return fit_devices(rows, options.job, replace(devices, count=count), serving)[0]

    return plan_sizes(options, measured, holds)


def _by_part(rows: list[tuple[Parameter, int]]) -> dict[str, int]:
    parts = Counter[str]()
    for row, stored in rows:
        parts[row.part] += stored
    return dict(parts.most_common())


def _time_estimates(work: RunWork) -> tuple[TimeEstimate, ...]:
    """For this machine, as it is found to be, and one H200."""
    return tuple(
        TimeEstimate(rate.name, round(expected_seconds(work, rate)), rate.assumption)
        for rate in (measure_rate(Path.cwd()), H200)
    )
