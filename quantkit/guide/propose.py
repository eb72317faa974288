"""From a request to a proposal: plan every scheme, choose one, and refuse before any work what
cannot be done."""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from quantkit.api import load_settings
from quantkit.calibrate.data import load_sequences
from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.remote import open_headers
from quantkit.common.devices import find_device
from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes
from quantkit.evaluation.run import prepare
from quantkit.guide.job import GoRequest
from quantkit.guide.proposal import Proposal, SchemeCandidate, Wanted, candidates, choose_candidate
from quantkit.planning.plan import Plan
from quantkit.quantization.cost import Rate, expected_seconds
from quantkit.tokenizer.chat import ChatTokenizer

_SIZE = 1024
_PRODUCTS_S, _DISK_BYTES = 0.25, 64 * 2**20
EFFICIENCY = 0.45
"""Share of the speed of large matrix products that a whole run reaches (docs/quantize.md, Time)."""
TIME_FACTOR = 2.0
"""The estimated time is within this factor of the measured one, on a CPU (docs/quantize.md)."""


def propose(request: GoRequest) -> Proposal:
    """Raises QuantkitError if no scheme fits, or this machine has too little disk or memory."""
    _check_tasks(request)
    checkpoint = open_headers(request.model)
    options = request.options
    wanted = Wanted(
        request.recipe,
        options.scheme,
        options.engine,
        options.context,
        _calibration_tokens(request),
    )
    found = candidates(checkpoint, request.box, wanted)
    chosen, why = choose_candidate(found, request.box)
    folder = _existing_parent(request.out)
    chosen = _with_disk(chosen, folder)
    assert chosen.plan is not None
    _check_room(chosen.plan, request.model, folder)
    rate = measure_rate(folder)
    return Proposal(
        request.model,
        request.box,
        tuple(found),
        chosen,
        why,
        expected_seconds(chosen.plan.work, rate),
        TIME_FACTOR,
    )


def _calibration_tokens(request: GoRequest) -> int | None:
    """Tokens of the calibration text, the same for all schemes; None if the tokenizer is not on
    this machine."""
    source = find_local(request.model)
    if source is None:
        return None
    recipe = load_settings(source, request.recipe("awq-w4a16"))
    taken = load_sequences(
        recipe.calibration,
        ChatTokenizer(source),
        samples=recipe.samples,
        held_out=recipe.held_out,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
    )
    return sum(map(len, [*taken.calibration, *taken.held_out]))


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


def measure_rate(folder: Path) -> Rate:
    """The speed of this machine, in half a second: float32 products and disk writes. folder: where
    the output goes; a file is written there and removed."""
    device = find_device("auto")
    return Rate(device.type, EFFICIENCY * _products(device), False, _disk(folder))


def _products(device: torch.device) -> float:
    """float32 operations a second in products of _SIZE squared."""
    a = torch.randn(_SIZE, _SIZE, device=device)
    _wait(a @ a)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < _PRODUCTS_S:
        _wait(a @ a)
        count += 1
    return 2.0 * _SIZE**3 * count / elapsed


def _wait(result: torch.Tensor) -> None:
    result[0, 0].item()


def _disk(folder: Path) -> float:
    """Bytes a second written to the disk, the file's flush included."""
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - start)
