"""Expected peak memory of a run, computed from shapes before it starts.

A calibrated run holds the hidden states of all tokens, in memory or in a file, and one of:
  sublayer  of attention or feed-forward: its weights and Hessians; or its Hessians and their
  factors, the
            largest being computed; or the factors and the linears of one input being solved
  experts   the inputs of the routed experts, the Hessian of the layer's input, and a batch of experts

A run without calibration holds one unit. Nothing depends on the number of layers or experts. The
factors below count the float32 copies that are alive together in quantkit.calibrate and
quantkit.quant; benchmarks/r1_shape.py measures them.
"""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

import torch

from quantkit.calibrate.hidden_states import BATCH_TOKENS, LARGEST_KEPT, Batches
from quantkit.calibrate.input_sums import WIDE
from quantkit.calibrate.output_cost import BLOCK_ROWS
from quantkit.calibrate.sensitivity import MOST_TOKENS, PATH_TOKENS
from quantkit.checkpoint.writer import MAX_QUEUED
from quantkit.common.errors import QuantkitError
from quantkit.models.hf_traced.skeleton import CALL_CACHE_BYTES
from quantkit.models.mtp import has_block_head
from quantkit.models.table import Parameter
from quantkit.quantization.job import Job

PROCESS_BYTES = (480 + 250 * bool(torch.version.cuda or torch.version.hip)) * 10**6
"""Python, torch, its BF16 kernels and the tokenizer, before any weight is read; and the libraries
that a torch built for GPUs loads."""
MODULES_BYTES = 150 * 10**6 + CALL_CACHE_BYTES
"""Additional memory if transformers computes: itself, and the masks and rotary tables with which
its layers are called."""
_FLOAT = 4
_SOLVED = 4
"""Matrices of a linear's size alive after it is solved, besides its weight: its values, in pieces
and whole, and codes."""
_RUN = 6
"""Activations as wide as the widest linear that are alive together while tokens run through a
sublayer."""
_HEARD = 4
"""Inputs of a batch of tokens that are held until the residual stream after them is known: of both
paths, as they are and weighted."""
_PIECE = 7
"""Matrices of the size of the piece being solved."""
_SEARCHED = 2
"""Squares of an input whose scale is searched: its Hessian, and its factor."""
_CORRECTED = 2
"""Copies of an input's drift while it is multiplied by the inverse of the Hessian."""
_PANELS = 3 * 512
"""Rows of such a square that are copied meanwhile."""
_BATCH = 6
"""Matrices of the size of a batch of experts: as read, scaled, quantized, and temporaries."""
_JUDGED = 5
"""Logits of a block of the head alive together: both paths', and their comparison."""
_COPIED = 3
"""Bytes per value while a 16-bit tensor is copied: itself, and a mask of finite values."""
_ROTATED = 2 * _FLOAT + 2
"""The same while it is rotated: in float32 before and after, and as stored."""
_ROUNDED = 6 * _FLOAT
"""Bytes per value of a matrix that is rounded to nearest, as in `rtn_peak`."""
_GIB = 2**30
BUDGET = 16 * _GIB
"""Of a run without --memory: where it would exceed this, hidden states lie in a file, and then
batches are smaller. It is not refused."""


@dataclass(frozen=True)
class RunSizes:
    """tokens: calibration and held-out; judged: the held-out ones; sequence: the longest.
    quantized: modules to quantize. mlp_output_width: as of `ModelConfig`. state_width: values of a token's hidden state in all its
    residual streams. drift: whether calibration tokens also run through the original path.
    kept_width: values of a token that a draft head has read (calibrate/block_drafts.py). in_file:
    whether hidden states lie in a file. rotated: whether tables are."""

    units: dict[str, list[Parameter]]
    quantized: set[str]
    hidden_size: int
    mlp_output_width: int
    state_width: int
    experts_per_token: int
    tokens: int
    judged: int
    sequence: int
    batches: Batches
    drift: bool = False
    kept_width: int = 0
    in_file: bool = False
    rotated: bool = False

    @property
    def every_path(self) -> int:
        """Tokens of all paths: the held-out ones of the source and of the RTN run, and with drift
        the calibration tokens on the original path, too."""
        again = self.tokens - self.judged if self.drift else 0
        return self.tokens + 2 * self.judged + again

    @property
    def read_width(self) -> int:
        """Channels of the routed experts' input."""
        rows = (row for rows in self.units.values() for row in rows if row.expert is not None)
        return next((row.shape[-1] for row in rows), self.hidden_size)


@dataclass(frozen=True)
class Peak:
    """Bytes of host memory alive together at the peak, which is reached at the unit `where`.
    in_file: of hidden states that lie in a file and not in memory, with copies of some channels
    that a layer needs."""

    process: int
    hidden_states: int
    work: int
    where: str
    in_file: int = 0

    @property
    def total(self) -> int:
        return self.process + self.hidden_states + self.work


def expected_peak(job: Job, ceiling: int | None = None) -> tuple[Peak, Batches]:
    """Peak memory of the run, in batches that keep it under `ceiling` bytes, or BUDGET, if any
    do."""
    quantized = {row.module for row in job.linears}
    rotated = any(job.checkpoint.is_rotated(row.name) for row in job.rows if row.layer is None)
    if not job.request.methods and not job.request.recipe.prune:
        return rtn_peak(job.units, quantized), Batches()
    # Pruning runs the calibration text, too.
    recipe, config, routing = job.request.recipe, job.inventory.config, job.inventory.config.routing
    work = RunSizes(
        units=job.units,
        quantized=quantized,
        hidden_size=config.hidden_size,
        mlp_output_width=config.mlp_output_width,
        state_width=config.state_width,
        experts_per_token=routing.num_experts_per_tok if routing else 0,
        tokens=(recipe.samples + recipe.held_out) * recipe.seq_len,
        judged=recipe.held_out * recipe.seq_len,
        sequence=recipe.seq_len,
        batches=Batches(),
        drift="drift" in job.request.methods,
        kept_width=config.hidden_size * has_block_head(job.rows),
        rotated=rotated,
    )
    measuring = Peak(0, 0, 0, "")
    if job.request.mixture.chooses:
        layers = {row.layer for row in job.rows if row.layer is not None and not row.mtp}
        measuring = sensitivity_peak(work, len(layers))
    budget = BUDGET if ceiling is None else ceiling
    peak, batches = batched_peak(work, budget - MODULES_BYTES * job.inventory.by_name)
    peak = replace(max(peak, measuring, key=lambda one: one.total), in_file=peak.in_file)
    return (
        replace(peak, process=peak.process + MODULES_BYTES) if job.inventory.by_name else peak
    ), batches


def calibrated_peak(work: RunSizes) -> Peak:
    """Peak of a calibrated run."""
    channel = work.every_path * _FLOAT
    kept = (work.tokens + work.judged) * work.kept_width * _FLOAT
    hidden, copied = channel * work.state_width + kept, 0
    if any(row.after_experts for rows in work.units.values() for row in rows):
        parallel = Counter[int | None]()
        for row in (row for rows in work.units.values() for row in rows if row.parallel_to_experts):
            parallel[row.layer] += row.shape[0]
        # From before the experts' half of a layer, until all of them have added.
        copied = channel * (work.mlp_output_width + max(parallel.values(), default=0))
    in_file = 0
    if work.in_file:
        in_file, hidden, copied = hidden + copied, 0, 0
    moments = [
        (bytes_ + copied * any(row.after_experts for row in rows), unit)
        for unit, rows in work.units.items()
        for bytes_ in _moments(work, rows)
    ]
    layers = {row.layer for rows in work.units.values() for row in rows if row.expert is not None}
    for layer in sorted(layer for layer in layers if layer is not None)[:1]:
        moments.append((_experts_bytes(work, layer) + copied, f"layers.{layer}.experts"))
    # A table is read whole where the text is embedded, with a mask of its finite values; an
    # embedding may be rounded there.
    copied_table = _ROTATED if work.rotated else _COPIED
    tables = [
        (
            (_ROUNDED if rows[0].module in work.quantized else copied_table)
            * max(map(_values, rows)),
            unit,
        )
        for unit, rows in work.units.items()
        if rows[0].layer is None
    ]
    bytes_, unit = max([*moments, *tables], key=lambda moment: moment[0])
    freed = min(2 * LARGEST_KEPT, bytes_ // 8)  # blocks kept for reuse
    return Peak(PROCESS_BYTES, hidden, bytes_ + freed, unit, in_file)


def sensitivity_peak(work: RunSizes, layers: int) -> Peak:
    """Peak of the pass that measures sensitivities.

    Three copies of its paths are alive. They go through a sublayer with its original weights, those
    of one group of linears rounded, and those of all rounded together.
    """
    paths, (least, most) = 2 * layers + 1, PATH_TOKENS
    tokens = paths * max(least, min(MOST_TOKENS // paths, work.tokens // 3 // paths, most))
    hidden, moments = 3 * tokens * work.state_width * _FLOAT, []
    for unit, rows in work.units.items():
        linears = [_FLOAT * _values(row) for row in rows if row.module in work.quantized]
        if rows[0].layer is None or not linears:
            continue
        widest = max(row.shape[0] for row in rows if len(row.shape) == 2)
        run = _RUN * _FLOAT * min(tokens, max(BATCH_TOKENS, work.sequence)) * widest
        routed = (
            (1 + _COPIED) * tokens * work.hidden_size * _FLOAT
            if any(row.role == "router" for row in rows)
            else 0
        )
        if any(row.after_experts for row in rows):  # as in `calibrated_peak`
            routed += _FLOAT * tokens * work.mlp_output_width
        weights = _FLOAT * sum(map(_values, rows)) + sum(linears) + (_SOLVED + 1) * max(linears)
        moments.append((weights + run + routed + 3 * _FLOAT * work.hidden_size**2, unit))
    logits = min(
        BLOCK_ROWS,
        max(row.shape[0] for rows in work.units.values() for row in rows if row.layer is None),
    )
    moments.append((_JUDGED * _FLOAT * (tokens // paths) * logits, "head"))
    bytes_, where = max(moments)
    return Peak(PROCESS_BYTES, hidden, bytes_ + min(2 * LARGEST_KEPT, bytes_ // 8), where)


def batched_peak(work: RunSizes, ceiling: int) -> tuple[Peak, Batches]:
    """The peak in the largest batches that keep it under `ceiling` bytes, or in the smallest if
    none do; and these batches. Hidden states that would exceed it lie in a file."""
    peak = calibrated_peak(work)
    if peak.total > ceiling:
        work = replace(work, in_file=True)
        peak = calibrated_peak(work)
    while peak.total > ceiling and work.batches.halved() != work.batches:
        work = replace(work, batches=work.batches.halved())
        peak = calibrated_peak(work)
    return peak, work.batches


def rtn_peak(units: dict[str, list[Parameter]], quantized: set[str]) -> Peak:
    """Peak of a run without calibration: one unit at a time, its linears in float32, copied tensors
    as stored; and what waits for the disk. (Calibration is slower than any disk.)"""
    moments, waiting = [], 0
    for unit, rows in units.items():
        linears = [_FLOAT * _values(row) for row in rows if row.module in quantized]
        copied = [_COPIED * _values(row) for row in rows if row.module not in quantized]
        moments.append((2 * sum(linears) + 4 * max(linears, default=0) + sum(copied), unit))
        waiting += sum(linears) // _FLOAT + sum(
            copied
        )  # quantized weights take a byte a value, or less
    work, where = max(moments)
    return Peak(PROCESS_BYTES, 0, work + min(MAX_QUEUED, waiting), where)


def check_memory(job: Job, peak: Peak, ceiling: int | None) -> None:
    """Refuse a run that exceeds `ceiling` bytes, stating the least it needs, and how many samples
    would fit."""
    if ceiling is None or peak.total <= ceiling:
        return
    remedy = f"give --memory {math.ceil(peak.total / _GIB * 2) / 2:g}GiB or more"
    if job.request.methods:
        count = samples_within(job, ceiling)
        remedy += f", or --samples {count}, which fits" if count else ", or a shorter --seq-len"
    message = (
        f"the run needs {peak.total / _GIB:.1f} GiB of memory at {peak.where} and --memory is "
        f"{ceiling / _GIB:.1f} GiB"
    )
    raise QuantkitError(message, remedy)


def samples_within(job: Job, ceiling: int) -> int:
    """The most calibration samples, fewer than in the recipe, with which the run stays under
    `ceiling` bytes; 0 if none."""
    recipe = job.request.recipe

    def fits(count: int) -> bool:
        fewer = replace(
            job, request=replace(job.request, recipe=recipe.model_copy(update={"samples": count}))
        )
        return expected_peak(fewer, ceiling)[0].total <= ceiling

    return bisect_left(range(1, recipe.samples), True, key=lambda count: not fits(count))


def _moments(work: RunSizes, rows: list[Parameter]) -> list[int]:
    """Of the head, or of one sublayer: while its inputs are observed, while each one's scale is
    searched, while its linears are solved, and while it runs quantized."""
    linears = [row for row in rows if row.module in work.quantized]
    table = rows[0].layer is None  # the head, which no tokens run through
    if rows[0].expert is not None or rows[0].role == "embedding" or not linears:
        return []
    one_stream, drift = work.state_width == work.hidden_size, work.drift and not table
    weights = _FLOAT * sum(map(_values, rows))
    held = work.every_path * work.read_width * _FLOAT * any(row.role == "router" for row in rows)
    # The cost of an error in that stream; how rows compensate, for blocks of one or two sizes.
    held += 2 * _FLOAT * work.hidden_size**2 * one_stream
    # With drift those that write to the residual stream are observed again, after the others.
    early, late = (
        _readers([row for row in linears if (drift and row.split == "row") == last])
        for last in (False, True)
    )
    passed = min(max(work.batches.tokens, work.sequence), work.tokens)
    widest = max(row.shape[0] for row in rows if len(row.shape) == 2)
    run = _RUN * _FLOAT * passed * (widest if one_stream else max(widest, work.state_width))
    squares, again = (sum(map(_square, sites)) for sites in (early, late))
    drifts = drift * squares  # of the inputs on both paths
    moments = [] if table else [held + weights + squares + drifts + again + run]
    moments += [] if table else [held + weights + weights // _FLOAT + run]
    every = [*early, *late]
    moments.append(held + drifts + _SEARCHED * (squares + again) + _panels(max(every)))
    solved = weights // _FLOAT  # a byte a value of those already solved
    for columns, sizes in early.items():
        factors = squares + drifts + again
        # What a correction is computed in; later it is one square, and changes a weight.
        corrected = _CORRECTED * _square(columns) + max(sizes) if drift else 0
        aimed = _square(columns) + max(sizes) if drift else 0
        moments += [held + factors + corrected, held + factors + aimed + _solving(work, sizes)]
    if late:
        lost = sum(sum(sizes) for sizes in late.values()) * one_stream  # by the stream
        lost += sum(_drift(columns, sizes) for columns, sizes in late.items())
        rounded = _FLOAT * sum(_values(row) for row in linears if row.split != "row")
        heard = _HEARD * _FLOAT * passed * sum(late)
        moments.append(held + weights + rounded + again + lost + run + heard)
        moments.append(held + solved + again + lost + _panels(max(late)))
    for columns, sizes in late.items():
        changed = _CORRECTED * _drift(columns, sizes) + (1 + one_stream) * max(sizes)
        moments += [held + solved + again + lost + changed + max(sizes)]
        moments += [held + solved + again + lost + _solving(work, sizes)]
    return moments


def _readers(linears: list[Parameter]) -> dict[int, list[int]]:
    """Bytes in float32 of the linears, by their input channels."""
    found: dict[int, list[int]] = {}
    for row in linears:
        found.setdefault(row.shape[1], []).append(_FLOAT * _values(row))
    return found


def _square(columns: int) -> int:
    return _FLOAT * columns**2


def _panels(columns: int) -> int:
    return _FLOAT * _PANELS * columns


def _drift(columns: int, sizes: list[int]) -> int:
    """Of an input observed after the linears before it are quantized."""
    square = _square(columns)
    return sizes[0] if len(sizes) == 1 and sizes[0] < square >= WIDE else square


def _solving(work: RunSizes, sizes: list[int]) -> int:
    """Linears of one input, of these bytes, while one of them is solved."""
    columns_piece = min(_FLOAT * work.batches.piece_values, max(sizes))
    return sum(sizes) + _SOLVED * max(sizes) + _PIECE * columns_piece


def _experts_bytes(work: RunSizes, layer: int) -> int:
    """Of one batch of routed experts; those with the most tokens get about four times their share,
    but no more than half of all."""
    rows = [row for rows in work.units.values() for row in rows if row.layer == layer]
    experts = [row for row in rows if row.expert is not None]
    expert = [row for row in experts if row.expert == experts[0].expert]
    count = len(experts) // len(expert)
    values = sum(_values(row) for row in expert)
    batch = min(count, max(1, work.batches.expert_values // values))
    shared = sum(_values(row) for row in rows if row.block in ("mlp", "router", "shared_expert"))
    width, read = min(row.shape[0] for row in expert), expert[0].shape[-1]
    routed = work.every_path * read * _FLOAT
    share = work.tokens * work.experts_per_token // count
    busiest = max(share, min(work.tokens // 2, 4 * share))
    tokens = _FLOAT * busiest * (2 * read + 3 * width)
    squares = _FLOAT * (5 * read**2 + 4 * batch * width**2)
    if work.drift:
        squares += _FLOAT * 2 * read**2  # of the layer's input: its drift and correction matrix
        squares += _FLOAT * 3 * batch * values // len(expert)  # changes of the down projections
        tokens += _FLOAT * busiest * (read + 2 * width)
    return routed + 2 * _FLOAT * shared + squares + _BATCH * _FLOAT * batch * values + tokens


def _values(row: Parameter) -> int:
    """Held at once: an n-gram table is copied in parts."""
    return 0 if row.role == "ngram_table" else math.prod(row.shape)
