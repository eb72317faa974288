"""What a run will hold in memory at its worst moment, and how much arithmetic it is, before it
starts.

A calibrated run holds the hidden states of all tokens, and then one of:
  sublayer  of attention or feed-forward: its weights and Hessians; or its Hessians and their
  factors, the largest being made; or the
            factors and the linears of one input being solved
  experts   the inputs of the routed experts, the Hessian of the layer's input, and a batch of experts being solved
A run without calibration holds one unit. Nothing depends on the number of layers or experts. The
factors below count the float32 copies that are alive together in quantkit.calibrate and
quantkit.quant; benchmarks/r1_shape.py measures them.
"""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

from quantkit.calibrate.hidden_states import BATCH_TOKENS, LARGEST_KEPT, Batches
from quantkit.calibrate.output_cost import BLOCK_ROWS
from quantkit.calibrate.sensitivity import MOST_TOKENS, PATH_TOKENS
from quantkit.checkpoint.writer import MAX_QUEUED
from quantkit.common.errors import QuantkitError
from quantkit.models.architecture import ModelConfig
from quantkit.models.hf_traced.skeleton import CALL_CACHE_BYTES
from quantkit.models.table import Parameter
from quantkit.quantization.job import Job

PROCESS_BYTES = 400 * 10**6
"""Python, torch and the tokenizer, before any weight is read."""
MODULES_BYTES = 150 * 10**6 + CALL_CACHE_BYTES
"""More where transformers computes: itself, and the masks and rotary tables that its layers are
called with."""
_FLOAT = 4
_SOLVED = 4
"""Matrices of a linear's size alive when it was solved, besides its weight: its values, in pieces
and whole, and codes."""
_RUN = 6
"""Activations as wide as the widest linear that are alive together while tokens run through a
sublayer."""
_PIECE = 7
"""Matrices of the size of the piece that is being solved."""
_SEARCHED = 3
"""Squares of an input while it is factored: its Hessian, that in the order of solving, and its
factor."""
_PANELS = 3 * 512
"""Rows of such a square that are copied on the way."""
_BATCH = 6
"""Matrices of the size of a batch of experts: as read, scaled, rounded, and what rounding needs."""
_JUDGED = 5
"""Logits of a block of the head alive together: both paths', and what their comparison makes of
them."""
_COPIED = 3
"""Bytes a value while a 16-bit tensor is copied: itself, and a mask that says where it is
finite."""
_GIB = 2**30


@dataclass(frozen=True)
class RunSizes:
    """tokens: calibration and held-out; judged: the held-out ones; sequence: the longest.
    quantized: modules the output holds quantized.
    state_width: values of a token's hidden states, of all its streams. drift: calibration tokens
    run through the original path too."""

    units: dict[str, list[Parameter]]
    quantized: set[str]
    hidden_size: int
    state_width: int
    experts_per_token: int
    tokens: int
    judged: int
    sequence: int
    batches: Batches
    drift: bool = False

    @property
    def original_tokens(self) -> int:
        """Tokens that run through the original path besides the held-out ones."""
        return self.tokens - self.judged if self.drift else 0


@dataclass(frozen=True)
class Peak:
    """Bytes alive together at the worst moment: `process`, `hidden` states, and the sublayer or
    experts in `work`. where: the unit."""

    process: int
    hidden: int
    work: int
    where: str

    @property
    def total(self) -> int:
        return self.process + self.hidden + self.work


def expected_peak(job: Job, ceiling: int | None = None) -> tuple[Peak, Batches]:
    """What the run will hold in memory at its worst moment, in batches that keep it under `ceiling`
    bytes if any do."""
    quantized = {row.module for row in job.linears}
    if not job.request.methods and not job.request.recipe.prune:
        return rtn_peak(job.units, quantized), Batches()
    recipe, routing = (
        job.request.recipe,
        job.inventory.config.routing,
    )  # pruning walks over the text, too
    work = RunSizes(
        units=job.units,
        quantized=quantized,
        hidden_size=job.inventory.config.hidden_size,
        state_width=state_width(job.inventory.config),
        experts_per_token=routing.num_experts_per_tok if routing else 0,
        tokens=(recipe.samples + recipe.held_out) * recipe.seq_len,
        judged=recipe.held_out * recipe.seq_len,
        sequence=recipe.seq_len,
        batches=Batches(),
        drift="drift" in job.request.methods,
    )
    measuring = Peak(0, 0, 0, "")
    if job.request.mixture.chooses:
        layers = {row.layer for row in job.rows if row.layer is not None and not row.mtp}
        measuring = sensitivity_peak(work, len(layers))
    peak, batches = batched_peak(
        work, ceiling if ceiling is None or not job.inventory.by_name else ceiling - MODULES_BYTES
    )
    peak = max(peak, measuring, key=lambda one: one.total)
    return (
        replace(peak, process=peak.process + MODULES_BYTES) if job.inventory.by_name else peak
    ), batches


def state_width(config: ModelConfig) -> int:
    """Values of a token's hidden states between sublayers."""
    return (
        config.hidden_size
        if config.streams is None
        else config.streams.count * config.hidden_size + 1
    )


def calibrated_peak(work: RunSizes) -> Peak:
    """The worst moment of a calibrated run."""
    width = work.state_width
    if any(row.after_experts for rows in work.units.values() for row in rows):
        width += (
            work.hidden_size
        )  # what they were before the experts, until all of these have added
        original_tokens = Counter[int | None]()
        for row in (row for rows in work.units.values() for row in rows if row.parallel_to_experts):
            original_tokens[row.layer] += row.shape[0]
        width += max(original_tokens.values(), default=0)
    hidden = (
        (work.tokens + 2 * work.judged + work.original_tokens) * width * _FLOAT
    )  # the held-out ones of the source and of plain rounding, too
    moments = [
        (bytes_, unit) for unit, rows in work.units.items() for bytes_ in _moments(work, rows)
    ]
    layers = {row.layer for rows in work.units.values() for row in rows if row.expert is not None}
    for layer in sorted(layer for layer in layers if layer is not None)[:1]:
        moments.append((_experts_bytes(work, layer), f"layers.{layer}.experts"))
    bytes_, unit = max(moments, key=lambda moment: moment[0])
    return Peak(
        PROCESS_BYTES, hidden, bytes_ + min(2 * LARGEST_KEPT, bytes_ // 8), unit
    )  # and freed blocks that wait for the next


def sensitivity_peak(work: RunSizes, layers: int) -> Peak:
    """The worst moment of the pass that measures what each grid costs.

    Three copies of its paths are alive. They go through a sublayer with its original weights, those
    of one choice rounded, and those of all rounded together.
    """
    paths, (least, most) = 2 * layers + 1, PATH_TOKENS
    tokens = paths * max(least, min(MOST_TOKENS // paths, work.tokens // 3 // paths, most))
    hidden, moments = 3 * tokens * work.hidden_size * _FLOAT, []
    for unit, rows in work.units.items():
        linears = [_FLOAT * _values(row) for row in rows if row.module in work.quantized]
        if rows[0].layer is None or not linears:
            continue
        widest = max(row.shape[0] for row in rows if len(row.shape) == 2)
        run = _RUN * _FLOAT * min(tokens, max(BATCH_TOKENS, work.sequence)) * widest
        asked = (
            (1 + _COPIED) * tokens * work.hidden_size * _FLOAT
            if any(row.role == "router" for row in rows)
            else 0
        )
        weights = _FLOAT * sum(map(_values, rows)) + sum(linears) + (_SOLVED + 1) * max(linears)
        moments.append((weights + run + asked + 3 * _FLOAT * work.hidden_size**2, unit))
    logits = min(
        BLOCK_ROWS,
        max(row.shape[0] for rows in work.units.values() for row in rows if row.layer is None),
    )
    moments.append((_JUDGED * _FLOAT * (tokens // paths) * logits, "head"))
    bytes_, where = max(moments)
    return Peak(PROCESS_BYTES, hidden, bytes_ + min(2 * LARGEST_KEPT, bytes_ // 8), where)


def batched_peak(work: RunSizes, ceiling: int | None) -> tuple[Peak, Batches]:
    """The peak in the largest batches that keep it under `ceiling` bytes, or in the smallest where
    none do; and these batches."""
    peak = calibrated_peak(work)
    while ceiling is not None and peak.total > ceiling and work.batches.halved() != work.batches:
        work = replace(work, batches=work.batches.halved())
        peak = calibrated_peak(work)
    return peak, work.batches


def rtn_peak(units: dict[str, list[Parameter]], quantized: set[str]) -> Peak:
    """The worst moment of a run without calibration: one unit at a time, its linears in float32,
    what is copied as it is stored; and what waits for the disk. (Calibration is slower than any
    disk.)"""
    moments, waiting = [], 0
    for unit, rows in units.items():
        linears = [_FLOAT * _values(row) for row in rows if row.module in quantized]
        copied = [_COPIED * _values(row) for row in rows if row.module not in quantized]
        moments.append((2 * sum(linears) + 4 * max(linears, default=0) + sum(copied), unit))
        waiting += sum(linears) // _FLOAT + sum(
            copied
        )  # what is rounded takes a byte a value, or less
    work, where = max(moments)
    return Peak(PROCESS_BYTES, 0, work + min(MAX_QUEUED, waiting), where)


def check_memory(job: Job, peak: Peak, ceiling: int | None) -> None:
    """Refuse a run that will not keep under `ceiling` bytes, with the least it needs, and how many
    texts would fit."""
    if ceiling is None or peak.total <= ceiling:
        return
    remedy = f"give --memory {math.ceil(peak.total / _GIB * 2) / 2:g}GiB or more"
    if job.request.methods:
        count = samples_within(job, ceiling)
        remedy += f", or --samples {count}, which fits" if count else ", or a shorter --seq-len"
    told = (
        f"the run needs {peak.total / _GIB:.1f} GiB of memory at {peak.where} and --memory is "
        f"{ceiling / _GIB:.1f} GiB"
    )
    raise QuantkitError(told, remedy)


def samples_within(job: Job, ceiling: int) -> int:
    """The most calibration texts, fewer than the recipe asks for, whose run keeps under `ceiling`
    bytes; 0 where not even one does."""
    recipe = job.request.recipe

    def fits(count: int) -> bool:
        fewer = replace(
            job, request=replace(job.request, recipe=recipe.model_copy(update={"samples": count}))
        )
        return expected_peak(fewer, ceiling)[0].total <= ceiling

    return bisect_left(range(1, recipe.samples), True, key=lambda count: not fits(count))


def _moments(work: RunSizes, rows: list[Parameter]) -> list[int]:
    """Of one unit that is a sublayer: while its inputs are observed, while each one's scale is
    searched, while its readers are solved, and while it runs with what came of them."""
    linears = [row for row in rows if row.module in work.quantized]
    if rows[0].layer is None or rows[0].expert is not None or not linears:
        return []
    weights = _FLOAT * sum(_values(row) for row in rows)
    asked = (
        (work.tokens + 2 * work.judged + work.original_tokens) * work.hidden_size * _FLOAT
        if any(row.role == "router" for row in rows)
        else 0
    )
    held = asked + _FLOAT * work.hidden_size**2  # and what an error in the residual stream costs
    readers: dict[int, list[int]] = {}  # bytes of the linears, by their input channels
    for row in linears:
        readers.setdefault(row.shape[1], []).append(_FLOAT * _values(row))
    squares = {columns: _FLOAT * columns**2 for columns in readers}
    if work.drift:
        held += sum(squares.values())
    passed = min(max(work.batches.tokens, work.sequence), work.tokens)
    widest = max(row.shape[0] for row in rows if len(row.shape) == 2)
    run = (
        _RUN
        * _FLOAT
        * passed
        * (widest if work.state_width == work.hidden_size else max(widest, work.state_width))
    )
    moments = [
        held + weights + sum(squares.values()) + run,
        held + weights + weights // _FLOAT + run,
    ]
    for columns, sizes in readers.items():
        # Every input has its Hessian, and those searched before their factors.
        others = sum(2 * squares[k] for k in squares if k != columns)
        moments.append(held + others + _SEARCHED * squares[columns] + _FLOAT * _PANELS * columns)
        piece = min(_FLOAT * max(work.batches.piece_values, columns), max(sizes))
        solved = sum(map(sum, readers.values())) // _FLOAT  # a byte a value of those solved before
        aimed = (
            squares[columns] + max(sizes) if work.drift else 0
        )  # what changes a weight, and by how much
        moments.append(
            held
            + sum(squares.values())
            + solved
            + sum(sizes)
            + _SOLVED * max(sizes)
            + _PIECE * piece
            + aimed
        )
    return moments


def _experts_bytes(work: RunSizes, layer: int) -> int:
    """Of one batch of routed experts; those with the most tokens get about four times their share
    of them."""
    rows = [row for rows in work.units.values() for row in rows if row.layer == layer]
    experts = [row for row in rows if row.expert is not None]
    expert = [row for row in experts if row.expert == experts[0].expert]
    count = len(experts) // len(expert)
    values = sum(_values(row) for row in expert)
    batch = min(count, max(1, work.batches.expert_values // values))
    shared = sum(_values(row) for row in rows if row.block in ("mlp", "router", "shared_expert"))
    width = min(row.shape[0] for row in expert)
    asked = (work.tokens + 2 * work.judged + work.original_tokens) * work.hidden_size * _FLOAT
    busiest = min(work.tokens, 4 * work.tokens * work.experts_per_token // count)
    tokens = _FLOAT * busiest * (2 * work.hidden_size + 3 * width)
    squares = _FLOAT * (5 * work.hidden_size**2 + 4 * batch * width**2)
    if work.drift:
        squares += (
            _FLOAT * 2 * work.hidden_size**2
        )  # of the layer's input: its drift, and what changes a weight
        squares += (
            _FLOAT * 3 * batch * values // len(expert)
        )  # of the down projections: by how much they change, in the making
        tokens += _FLOAT * busiest * (work.hidden_size + 2 * width)
    return asked + 2 * _FLOAT * shared + squares + _BATCH * _FLOAT * batch * values + tokens


def _values(row: Parameter) -> int:
    return math.prod(row.shape)
