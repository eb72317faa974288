"""Expected run time: work counted from the shapes, divided by a machine's rates.

Operations, 2 per multiplication and addition: the passes of every token through the linears, the
squares of every input, and GPTQ of every linear, two-sided for those that write to the residual
stream. A sweep of descent counts as GPTQ: it has twice the operations, all in large products, which
run at about twice the average rate. The head is multiplied with a thousand tokens a sublayer for
the cost of an error, and with the held-out tokens.

Exact operations are in float32: attention, and what factors and solves a square of an input.

Values are those that elementwise work passes over: weights that are rounded, once for each
candidate scale and sweep, the inputs and outputs of linears, and the logits of the head.

The speed of a machine, and of this one: measured in less than two seconds.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.input_statistics import SCALE_ROWS
from quantkit.calibrate.output_cost import HEAD_TOKENS, JUDGED_TOKENS
from quantkit.calibrate.recipe import load_recipe
from quantkit.common.devices import find_device
from quantkit.common.settings import find_yaml
from quantkit.common.sizes import format_duration
from quantkit.models.table import Parameter
from quantkit.quant.tensor_cores import sample_linear
from quantkit.quantization.job import Job

_SIZE = 1024
_MEASURED_S, _DISK_BYTES = 0.25, 16 * 2**20
_SCALING = 0.85
"""Exponent of a CPU's speed by its threads: they share memory, and small work keeps to one."""


@dataclass(frozen=True)
class Rate:
    """A machine's rates: operations a second in large products of calibration and in those of
    float32, values a second of a rounding, bytes a second to disk."""

    name: str
    flops: float
    exact: float
    values: float
    disk: float

    @property
    def assumption(self) -> str:
        return (
            f"{self.flops / 1e9:,.0f} GFLOP/s in large products, {self.exact / 1e9:,.0f} in "
            f"float32, {self.values / 1e9:,.1f} G values/s rounded, {self.disk / 1e9:.2g} GB/s disk"
        )


H200 = Rate("h200", 1e14, 6e13, 2e11, 1.5e9)
"""benchmarks/r1_shape.py."""


def measure_rate(folder: Path, device: torch.device | None = None) -> Rate:
    """This machine's, by its best device or the given one. folder: where the output goes; a file is
    written there and removed, if that is possible."""
    device = find_device("auto") if device is None else device
    return Rate(device.type, *_computing(device.type), _disk(folder))


@cache
def _computing(device: str) -> tuple[float, float, float]:
    """Operations, exact ones, and values a second. On a CPU one thread is measured, in its own
    time, for all: other jobs on this machine do not count, nor does waiting for each other."""
    threads = torch.get_num_threads()
    if device != "cpu":
        return _speeds(device, time.perf_counter)
    torch.set_num_threads(1)
    try:
        flops, exact, values = _speeds(device, time.thread_time)
    finally:
        torch.set_num_threads(threads)
    together = threads**_SCALING
    return flops * together, exact * together, values * together


def _speeds(device: str, clock: Callable[[], float]) -> tuple[float, float, float]:
    a = torch.randn(_SIZE, _SIZE, device=device)
    scale = a.abs().amax(1, keepdim=True) / 7
    return (
        2.0 * _SIZE**3 * _per_second(lambda: sample_linear(a, a), clock),
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


_PASSES = 2
"""Of every token through a linear: what its input is, and what comes after it is quantized."""
_COMPARED = {"expert": 1, "inside": 3, "output": 0}
"""Additional ones with drift: routed experts also run on the original path; of others both paths
are compared, before and after the linears before the output are quantized."""
_ATTENTION = 8.0
"""Exact operations for a token, a position and an input of the output projection: half of 4 in each
of two products, at a quarter of the speed of a large one."""
_ROUNDINGS, _SWEEP_PASSES = 12, 8
"""Passes over a weight's values besides the candidate scales, and in a sweep of descent."""
_TOUCHED, _ROUNDED = 1.8, 4.0
"""Passes over an input or output of a linear for every token: norms, activation functions, sums and
copies; and over an input that is rounded."""
_SOFTMAX_PASSES = 5
"""Over logits."""
_TRIANGLES = 4.0
"""Operations of a factorization, and of solving by it, run at a quarter of the speed of products."""
EFFICIENCY = 0.7
"""Share of the speed of a large matrix product that those of a run reach."""
LINEAR_SECONDS, _EXPERT_LINEARS = 0.12, 0.08
"""For each linear, whatever its size: searches, held-out errors, small operators; and what one of a
routed expert counts, as experts are solved many at a time."""
FIXED_SECONDS = 7.0
"""Of a calibrated run: libraries, the text, the report."""
CALIBRATED_SHARE = 0.98
"""Share of a calibrated run's time after which only units to round and copy are left."""


@dataclass(frozen=True)
class RunWork:
    """Work of a run: floating-point operations, and exact ones; bytes read and written; linears
    searched and solved one by one; values of elementwise work; fixed: seconds of start and end."""

    operations: float
    transferred: int
    linears: float
    values: float = 0.0
    exact: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: "RunWork") -> "RunWork":
        return RunWork(*(a + b for a, b in zip(astuple(self), astuple(other))))


def job_work(
    job: Job, linears: Sequence[Parameter], transferred: int, tokens: int | None = None
) -> RunWork:
    """Of those linears of a job, and so many bytes. tokens: of the calibration text; if unknown,
    the recipe's maximum."""
    recipe, methods = job.request.recipe, job.request.methods
    sweeps, drift = recipe.sweeps if "descent" in methods else 0, "drift" in methods
    weights = sum(float(row.shape[0]) * row.shape[1] for row in linears)
    values = weights * (_ROUNDINGS + _SWEEP_PASSES * sweeps)
    if not methods:
        return RunWork(0.0, transferred, 0, values)
    tokens = tokens or (recipe.samples + recipe.held_out) * recipe.seq_len
    length, chosen = tokens / (recipe.samples + recipe.held_out), _chosen(job)
    candidates = len({"awq", "smooth"}.intersection(methods)) * (recipe.scale_points + 1)
    products = exact = 0.0
    observed = set[str]()
    for row in linears:
        n, k = map(float, row.shape)
        routed, writes = row.expert is not None, row.split == "row"
        seen = tokens * chosen if routed else float(tokens)
        kind = "expert" if routed else "output" if writes else "inside"
        passes = _PASSES + (_COMPARED[kind] if drift else 0)
        products += passes * 2 * seen * n * k + n * k * k * (1 + sweeps) + n * n * k * writes
        products += candidates * min(n, recipe.search_rows) * k * k * (not routed)
        rounded = job.target.activation_bits_of(job.grids[row.module]) < 16
        values += passes * seen * (_TOUCHED * (n + k) + _ROUNDED * k * rounded)
        if drift:
            products += n * k * k
            if writes and not routed:  # what the residual stream lacks
                products += 2 * seen * n * k
        if row.projection == "o":
            exact += _ATTENTION * (2 + drift) * tokens * length * k
        # Gate and up of all experts of a layer share one input, and so do siblings of a fused
        # linear.
        shared = routed and row.fused
        site = f"{row.layer}.gate_up" if shared else row.fused or row.module
        if site not in observed:
            observed.add(site)
            seen = float(tokens) if shared else seen
            if rounded:  # sizes are tried by fourth moments, too, and on rows of the inputs
                values += 2 * candidates * min(seen, SCALE_ROWS) * k
            products += seen * k * k * (1 + min(1.0, _SIZE / k) + 2 * drift)
            exact += _TRIANGLES * k**3 * (1 / 3 + 2 * drift)
    solved = sum(1.0 if row.expert is None else _EXPERT_LINEARS for row in linears)
    fixed = FIXED_SECONDS * (len(linears) == len(job.linears))
    return _with_head(job, linears, RunWork(products, transferred, solved, values, exact, fixed))


def comparison_work(job: Job, tokens: int, length: int) -> RunWork:
    """Of running source and output over so many tokens, in documents of `length`, and comparing
    what they predict."""
    return _engine_work(job, 2.0 * tokens, length)


def writing_work(job: Job, tokens: int, length: int) -> RunWork:
    """Of so many tokens that the source writes, in documents of `length`."""
    return _engine_work(job, float(tokens), length)


def _engine_work(job: Job, seen: float, length: int) -> RunWork:
    products = exact = values = 0.0
    for row in job.rows:
        if row.role != "linear" or row.mtp:
            continue
        n, k = row.shape
        share = seen * (_chosen(job) if row.expert is not None else 1.0)
        products += share * 2 * n * k
        values += share * _TOUCHED * (n + k)
        exact += _ATTENTION * seen * length * k * (row.projection == "o")
    work = RunWork(products, 0, 0, values, exact)
    return _with_logits(job, work, seen)


def _chosen(job: Job) -> float:
    """Share of the routed experts that a token is given."""
    experts = len({row.expert for row in job.rows if row.expert is not None})
    routing = job.inventory.config.routing if experts else None
    return routing.num_experts_per_tok / experts if routing else 1.0


def _with_head(job: Job, linears: Sequence[Parameter], work: RunWork) -> RunWork:
    """The work with the head's: the cost of an error after each sublayer, and the KL of held-out
    text."""
    recipe = job.request.recipe
    sublayers = {(row.layer, row.block == "attention") for row in linears}
    costed = HEAD_TOKENS * len(sublayers) if recipe.output_curvature else 0
    judged = 3 * JUDGED_TOKENS if recipe.held_out and len(linears) == len(job.linears) else 0
    return _with_logits(job, work, 2 * costed + judged)


def _with_logits(job: Job, work: RunWork, tokens: float) -> RunWork:
    """The work with that of so many tokens' logits."""
    heads = [row for row in job.rows if row.role in ("head", "embedding") and not row.mtp]
    if not heads:
        return work
    rows, width = heads[-1].shape
    return replace(
        work,
        operations=work.operations + 2.0 * width * rows * tokens,
        values=work.values + float(_SOFTMAX_PASSES) * rows * tokens,
    )


def expected_seconds(work: RunWork, rate: Rate) -> float:
    """On a machine of these rates. Reading ahead and writing run while it computes."""
    computed = (
        work.operations / (EFFICIENCY * rate.flops)
        + work.exact / rate.exact
        + work.values / rate.values
        + work.linears * LINEAR_SECONDS
    )
    return max(computed, work.transferred / rate.disk) + work.fixed


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
