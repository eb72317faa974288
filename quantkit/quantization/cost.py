"""Expected run time: arithmetic, element-wise work and bytes divided by a machine's rates.

Operations are counted from the shapes, 2 per multiplication and addition: two forward passes of
every token, half of a symmetric Hessian for every input, its factorization, and GPTQ of every
linear, two-sided for those that write to the residual stream. A sweep of descent counts as GPTQ: it
has twice the operations, all in large products, which run at about twice the average rate. So do
the products of drift: they count half. The head is multiplied with a thousand tokens a sublayer for
the cost of an error, and with the held-out tokens.

Values are those that are rounded or passed through a softmax: weights, once for each candidate
scale and sweep, and the logits of the head.

The speed of a machine, and of this one: measured in less than two seconds.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.output_cost import HEAD_TOKENS, JUDGED_TOKENS
from quantkit.calibrate.recipe import load_recipe
from quantkit.common.devices import find_device
from quantkit.common.settings import find_yaml
from quantkit.common.sizes import format_duration
from quantkit.models.table import Parameter
from quantkit.quant.tensor_cores import sample_products
from quantkit.quantization.job import Job

_SIZE = 1024
_MEASURED_S, _DISK_BYTES = 0.25, 16 * 2**20


@dataclass(frozen=True)
class Rate:
    """A machine's rates: operations a second in large matrix products of calibration, values a
    second of a rounding in float32, bytes a second to disk."""

    name: str
    flops: float
    values: float
    disk: float

    @property
    def assumption(self) -> str:
        return (
            f"{self.flops / 1e9:,.0f} GFLOP/s in large products, "
            f"{self.values / 1e9:,.1f} G values/s rounded, {self.disk / 1e9:.2g} GB/s disk"
        )


H200 = Rate("h200", 5e13, 2e11, 1.5e9)
"""benchmarks/r1_shape.py."""


def measure_rate(folder: Path, device: torch.device | None = None) -> Rate:
    """This machine's, by its best device or the given one. folder: where the output goes; a file is
    written there and removed, if that is possible."""
    device = find_device("auto") if device is None else device
    flops, values = _computing(device.type)
    return Rate(device.type, flops, values, _disk(folder))


@cache
def _computing(device: str) -> tuple[float, float]:
    """Operations and values a second. On a CPU one thread is measured, in its own time, for all:
    other jobs on this machine do not count, nor does waiting for each other; and in BF16 where
    calibration is."""
    threads = torch.get_num_threads()
    if device != "cpu":
        return _speeds(device, time.perf_counter)
    torch.set_num_threads(1)
    try:
        with sample_products():
            flops, values = _speeds(device, time.thread_time)
    finally:
        torch.set_num_threads(threads)
    return flops * threads, values * threads


def _speeds(device: str, clock: Callable[[], float]) -> tuple[float, float]:
    a = torch.randn(_SIZE, _SIZE, device=device)
    scale = a.abs().amax(1, keepdim=True) / 7
    return (
        2.0 * _SIZE**3 * _per_second(lambda: a @ a, clock),
        a.numel() * _per_second(lambda: (a / scale).round_().clamp_(-8, 7).mul_(scale), clock),
    )


def _per_second(compute: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    compute()[0, 0].item()  # which waits for the device
    start, begun, count = time.perf_counter(), clock(), 0
    while time.perf_counter() - start < _MEASURED_S or not count:
        compute()[0, 0].item()
        count += 1
    return count / max(clock() - begun, 1e-6)


@cache
def _disk(folder: Path) -> float:
    """Bytes a second written to the disk, the file's flush included."""
    where = folder if os.access(folder, os.W_OK) else None
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=where) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - start)


_FORWARDS = 2
_COMPARED = {"expert": 2, "alone": 4}
"""Additional forward passes with drift, for the linears of routed experts and others: both paths
are compared, before and after the linears before them are quantized, and the original one
advances."""
_ROUNDINGS, _SWEEP_PASSES = 12, 8
"""Passes over a weight's values besides the candidate scales, and in a sweep of descent."""
_SOFTMAX_PASSES = 6
"""Over logits."""
EFFICIENCY = 0.45
"""Share of the speed of large matrix products that the products of a run reach: SmolLM2 on 32
documents takes some 250 s of a core with AMX, 0.48."""
LINEAR_SECONDS = 0.05
"""For each linear outside of routed experts, whatever its size: searches, held-out errors, small
operators."""
CALIBRATED_SHARE = 0.98
"""Share of a calibrated run's time after which only units to round and copy are left."""


@dataclass(frozen=True)
class RunWork:
    """Work of a run: floating-point operations, values rounded, bytes read and written, linears
    searched and solved one by one."""

    operations: float
    transferred: int
    linears: int
    values: float = 0.0


def work_of(
    linears: Sequence[Parameter],
    tokens: int,
    chosen: float,
    transferred: int,
    sweeps: int = 0,
    drift: bool = False,
) -> RunWork:
    """Of quantizing `linears` on `tokens` tokens, of which every routed expert gets the share
    `chosen`; no tokens: no calibration. sweeps: of descent; drift: whether weights are corrected
    for drift. Without the head."""
    values = sum(float(row.shape[0]) * row.shape[1] for row in linears)
    if not tokens:
        return RunWork(0.0, transferred, 0, values * _ROUNDINGS)
    alone = sum(row.expert is None for row in linears)  # routed experts are solved many at a time
    return RunWork(
        operations(linears, tokens, chosen, sweeps, drift),
        transferred,
        alone,
        values * (_ROUNDINGS + _SWEEP_PASSES * sweeps),
    )


def job_work(
    job: Job, linears: Sequence[Parameter], transferred: int, tokens: int | None = None
) -> RunWork:
    """Of those linears of a job, and so many bytes. tokens: of the calibration text; if unknown,
    the recipe's maximum."""
    recipe, calibrated = job.request.recipe, bool(job.request.methods)
    experts = len({row.expert for row in job.rows if row.expert is not None})
    routing = job.inventory.config.routing if experts and calibrated else None
    chosen = routing.num_experts_per_tok / experts if routing else 1.0
    most = (recipe.samples + recipe.held_out) * recipe.seq_len
    sweeps = recipe.sweeps if "descent" in job.request.methods else 0
    work = work_of(
        linears,
        (tokens or most) if calibrated else 0,
        chosen,
        transferred,
        sweeps,
        "drift" in job.request.methods,
    )
    return _with_head(job, linears, work) if calibrated else work


def _with_head(job: Job, linears: Sequence[Parameter], work: RunWork) -> RunWork:
    """The work with the head's: the cost of an error after each sublayer, and the KL of held-out
    text."""
    recipe = job.request.recipe
    heads = [row for row in job.rows if row.role in ("head", "embedding") and not row.mtp]
    if not heads:
        return work
    rows, width = heads[-1].shape
    sublayers = {(row.layer, row.block == "attention") for row in linears}
    costed = HEAD_TOKENS * len(sublayers) if recipe.output_curvature else 0
    judged = 3 * JUDGED_TOKENS if recipe.held_out and len(linears) == len(job.linears) else 0
    logits = float(rows) * (2 * costed + judged)
    return replace(
        work,
        operations=work.operations + 2.0 * width * logits,
        values=work.values + _SOFTMAX_PASSES * logits,
    )


def expected_seconds(work: RunWork, rate: Rate) -> float:
    """On a machine of these rates."""
    return (
        work.operations / (EFFICIENCY * rate.flops)
        + work.values / rate.values
        + work.transferred / rate.disk
        + work.linears * LINEAR_SECONDS
    )


@dataclass(frozen=True)
class Faster:
    """An option that makes a run shorter, and its work then."""

    option: str
    work: RunWork

    def describe(self, rate: Rate) -> str:
        return f"about {format_duration(expected_seconds(self.work, rate))} with {self.option}"


def faster_run(job: Job, transferred: int, tokens: int | None = None) -> Faster | None:
    """The scheme's quick recipe, if it has one with fewer methods, else a quarter of the sequences;
    None for a run without calibration. Arguments as for `job_work`."""
    recipe, quick = job.request.recipe, f"{job.request.scheme.name}-quick"
    if not job.request.methods or recipe.samples < 8:
        return None
    option, given = (
        f"--samples {recipe.samples // 4}",
        dict[str, object](samples=recipe.samples // 4),
    )
    if find_yaml(quick, "recipes") is not None:
        methods = load_recipe(quick).methods
        if methods is not None and set(methods) < set(job.request.methods):
            option, given = f"--recipe {quick}", {"methods": methods}
    changed = recipe.model_copy(update=given)
    if tokens is not None:
        share = (changed.samples + recipe.held_out) / (recipe.samples + recipe.held_out)
        tokens = round(tokens * share)
    shorter = replace(job, request=replace(job.request, recipe=changed))
    return Faster(option, job_work(shorter, job.linears, transferred, tokens))


def operations(
    linears: Iterable[Parameter], tokens: int, chosen: float, sweeps: int, drift: bool
) -> float:
    """Floating-point operations of a calibrated run, those of sweeps and of drift as described
    above."""
    total, observed = 0.0, set[str]()
    for row in linears:
        n, k = row.shape
        seen = tokens * chosen if row.expert is not None else tokens
        total += _FORWARDS * 2.0 * seen * n * k + float(n) * k * k * (1 + sweeps)
        total += float(n) * n * k if row.split == "row" else 0.0
        if drift:
            total += (
                _COMPARED["alone" if row.expert is None else "expert"] * float(seen) * n * k
                + float(n) * k * k
            )
            if row.split == "row" and row.expert is None:  # what the residual stream lacks
                total += 2.0 * seen * n * k
        # Gate and up of all experts of a layer share one input, and so do siblings of a fused
        # linear.
        site = (
            f"{row.layer}.gate_up"
            if row.expert is not None and row.fused
            else row.fused or row.module
        )
        if site not in observed:
            observed.add(site)
            shared = row.expert is not None and row.fused
            total += float(tokens if shared else seen) * k * k + k**3 / 3
            total += (float(tokens if shared else seen) * k * k + k**3) if drift else 0.0
    return total


def unit_shares(job: Job) -> dict[str, float]:
    """Of a calibrated run's expected time, by unit."""
    work = {}
    quantized = {row.module for row in job.linears}
    for unit, rows in job.units.items():
        work[unit] = expected_seconds(
            job_work(job, [row for row in rows if row.module in quantized], 0), H200
        )
    total = sum(work.values()) or 1.0
    return {unit: CALIBRATED_SHARE * seconds / total for unit, seconds in work.items()}
