"""From a request to a proposal: plan every scheme, choose one, and refuse before any work what
cannot be done."""

import shutil
from dataclasses import replace
from pathlib import Path

import psutil

from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.common.devices import find_device, free_bytes
from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes
from quantkit.evaluation.run import prepare
from quantkit.guide.job import (
    DOCUMENTS,
    CalibrationText,
    GoRequest,
    read_calibration_text,
    run_bytes,
    writes_text,
)
from quantkit.guide.proposal import (
    CPU_SCHEME,
    Proposal,
    SchemeCandidate,
    candidates,
    choose_candidate,
)
from quantkit.planning.plan import Plan
from quantkit.quantization.cost import RunWork, comparison_work, measure_rate, writing_work
from quantkit.quantization.job import open_job
from quantkit.quantization.request import read_request, read_scheme

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
