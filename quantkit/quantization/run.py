"""quantize(): open the source, check everything, calibrate and write, account for every tensor."""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit import __version__
from quantkit.calibrate.batches import Batches
from quantkit.calibrate.data import Sequences, load_sequences
from quantkit.calibrate.findings import Findings
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.solver import Solver
from quantkit.calibrate.source_model import SourceModel
from quantkit.calibrate.unit_log import UnitLog
from quantkit.calibrate.units import units_of
from quantkit.calibrate.walk import Walk
from quantkit.checkpoint.formats import find_format
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.manifest import made_for
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import prepare
from quantkit.devices import find_device
from quantkit.engines.choice import choose
from quantkit.errors import QuantkitError
from quantkit.models import ARCHITECTURES
from quantkit.models.tied import check_stored_head
from quantkit.progress import Note, OnEvent, peak_memory, silent
from quantkit.quantization.checks import Inventory, check_groups, take_inventory
from quantkit.quantization.for_engine import narrowed
from quantkit.quantization.memory import Peak, RunSizes, check_memory, fitting_peak, nearest_peak
from quantkit.quantization.nearest import round_units
from quantkit.quantization.output import Output
from quantkit.quantization.report import Account, read_findings, report_files
from quantkit.recipe import Recipe
from quantkit.schemes import IntGrid, Method, Scheme, check_pair
from quantkit.tokenizer.chat import ChatTokenizer


@dataclass(frozen=True)
class QuantizationReport:
    """What came of a run. Bytes are of tensors; peak_memory is this process's largest resident set, planned_memory what was expected."""

    out: Path
    scheme: str
    format: str
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_memory: int
    planned_memory: int
    calibration_tokens: int
    findings: Findings
    done_already: bool = False
    """Nothing was done: `out` was there, complete, from the same source and settings."""


def quantize(
    source: Path,
    out: Path,
    scheme: Scheme,
    format: str,
    recipe: Recipe,
    *,
    engine: str | None = None,
    device: str = "auto",
    memory: int | None = None,
    overwrite: bool = False,
    on_event: OnEvent = silent,
) -> QuantizationReport:
    """Quantize the checkpoint `source` into the directory `out`.

    format: a format's command-line name, or "auto" for the scheme's first. engine: write what this engine loads, or refuse.
    recipe.calibration: a file or data set; not read by schemes that need none. memory: bytes of host memory that the run must keep
    under. Raises QuantkitError before any long work where the source, the recipe, the memory or the target do not fit; a run that was
    stopped goes on when it is called again with the same arguments, and of one that is complete the report is told again.
    """
    start, ranks = time.perf_counter(), Ranks.meet()
    inputs = [source, *([Path(recipe.calibration)] if recipe.calibration else [])]
    prepare(out, inputs, ranks.rank)
    job = _checked(source, scheme, format, engine, recipe, memory)
    where = find_device(device)
    if ranks.size > 1 and where.type != "cpu":  # torchrun allows one thread; on a CPU results depend on their number
        torch.set_num_threads(ranks.cores)
    output = Output(ParameterReader(job.checkpoint, where), job.target, job.scheme, _units(job.inventory), job.inventory.dropped)
    if not overwrite and (manifest := made_for(out, job.fingerprint)):
        output.watch().compare_with(out, manifest)
        return _report(job, output, out, start, read_findings(out), done_already=True)
    writer = output.open(out, job.fingerprint, overwrite=overwrite, rank=ranks.rank, inputs=inputs)
    with writer, writer.keeping(output.units):
        if ranks.leads:
            writer.check_source()
            if resumed := writer.finished(output.units):
                on_event(Note(f"resuming {out}: {resumed}"))
        found = _round(job, output, ranks, on_event if ranks.leads else silent)
        if not ranks.leads:
            writer.close()
        ranks.wait()
        if ranks.leads:
            output.finish(report_files(_account(job, output), found, job.inventory.rows))
    return _report(job, output, out, start, found)


@dataclass(frozen=True)
class _Job:
    """A run that nothing is known to be wrong with. methods: none for a run without calibration, which has no sequences either."""

    checkpoint: Checkpoint
    inventory: Inventory
    scheme: Scheme
    format: str
    target: Format
    recipe: Recipe
    methods: tuple[Method, ...]
    sequences: Sequences
    peak: Peak
    batches: Batches
    fingerprint: dict[str, str]

    @property
    def calibration_tokens(self) -> int:
        return sum(len(s) for s in self.sequences.calibration)


def _checked(source: Path, scheme: Scheme, format: str, engine: str | None, recipe: Recipe, memory: int | None) -> _Job:
    """Everything that can be known to be wrong is, before the first weight is read."""
    choice = choose(engine, scheme, format=None if format == "auto" else format) if engine else None
    if choice is not None:
        scheme = replace(scheme, weight=choice.grid)
    name = choice.format if choice else scheme.formats[0] if format == "auto" else format
    check_pair(scheme, name)
    scheme = with_group_size(scheme, recipe)
    target = find_format(name, scheme)
    checkpoint = Checkpoint.open(source)
    methods = scheme.methods if recipe.methods is None else recipe.methods
    if methods and checkpoint.config.get("model_type") not in ARCHITECTURES:
        told = f"model_type {checkpoint.config.get('model_type')!r} of {source / 'config.json'}"
        fault = f"{told} is not supported by {scheme.name}, which needs calibration"
        raise QuantkitError(fault, f"quantkit has {', '.join(ARCHITECTURES)}; use --scheme rtn-w4a16 for others")
    inventory = take_inventory(checkpoint, by_name=not methods)
    check_stored_head(checkpoint, inventory.rows)
    if choice is not None:
        target = narrowed(target, choice, inventory.rows)
    check_groups(inventory.rows, scheme, target)
    peak, batches = expected_peak(inventory, target, scheme, recipe, memory)
    check_memory(peak, memory)
    sequences = _sequences(source, recipe) if methods else Sequences([], [])
    fingerprint = _fingerprint(checkpoint, recipe, f"{name} for {engine}" if engine else name, sequences)
    if batches != Batches():
        fingerprint["batches for --memory"] = str(batches)
    return _Job(checkpoint, inventory, scheme, name, target, recipe, methods, sequences, peak, batches, fingerprint)


def _report(job: _Job, output: Output, out: Path, start: float, found: Findings, *, done_already: bool = False) -> QuantizationReport:
    return QuantizationReport(
        out=out,
        scheme=job.scheme.name,
        format=job.format,
        source_bytes=sum(tensor.nbytes for tensor in job.checkpoint.tensors.values()),
        output_bytes=sum(output.bytes_by_part()[1].values()),
        seconds=time.perf_counter() - start,
        peak_memory=peak_memory(),
        planned_memory=job.peak.total,
        calibration_tokens=job.calibration_tokens,
        findings=found,
        done_already=done_already,
    )


def _round(job: _Job, output: Output, ranks: Ranks, on_event: OnEvent) -> Findings:
    """Calibrate and write the decoder layers, then round whatever is left; without methods, round everything."""
    solver = Solver(job.scheme.grid(expert=False, mtp=False), job.target.scale_dtype, job.recipe, job.methods, job.batches.piece_values)
    if not job.methods:
        return round_units(output.source, output, solver, on_event, ranks)
    rows = job.inventory.rows
    quantized = {row.module for row in rows if output.quantizes(row)}
    model = SourceModel(output.source, job.inventory.architecture, job.inventory.config, rows, quantized)
    log = UnitLog(model.units, output.source, output, on_event)
    findings = Walk(model, solver, log, ranks, job.batches).run(job.sequences)
    round_units(output.source, output, Solver(solver.grid, job.target.scale_dtype, job.recipe, ()), on_event, ranks)
    return findings


def _account(job: _Job, output: Output) -> Account:
    before, after = output.bytes_by_part()
    return Account(
        model=job.checkpoint.path.name,
        scheme=job.scheme.name,
        format=job.format,
        version=__version__,
        calibration=Path(job.recipe.calibration).name if job.methods and job.recipe.calibration else None,
        calibration_tokens=job.calibration_tokens,
        min_expert_tokens=job.recipe.min_expert_tokens,
        source_bytes=before,
        output_bytes=after,
    )


def with_group_size(scheme: Scheme, recipe: Recipe) -> Scheme:
    """The scheme with the recipe's group size, where it sets one. Raises QuantkitError where there is none to set."""
    if recipe.group_size is None:
        return scheme
    if not isinstance(scheme.weight, IntGrid) or scheme.weight.group_size is None:
        raise QuantkitError(f"the recipe sets group_size, and {scheme.name} has none to choose", "remove group_size from the recipe")
    return replace(scheme, weight=replace(scheme.weight, group_size=recipe.group_size))


def _units(inventory: Inventory) -> dict[str, list]:
    layers = sorted({row.layer for row in inventory.rows if row.layer is not None})
    groups = [group for layer in layers for group in inventory.architecture.scale_groups(inventory.config, layer)]
    return units_of(inventory.rows, groups)


def expected_peak(inventory: Inventory, format: Format, scheme: Scheme, recipe: Recipe, memory: int | None = None) -> tuple[Peak, Batches]:
    """What the run will hold in memory at its worst moment, in batches that keep it under `memory` bytes if any do."""
    quantized = {row.module for row in inventory.rows if format.quantizes(row.module, row.role, mtp=row.mtp)}
    if not (scheme.methods if recipe.methods is None else recipe.methods):
        return nearest_peak(_units(inventory), quantized), Batches()
    routing = inventory.config.routing
    work = RunSizes(
        units=_units(inventory),
        quantized=quantized,
        hidden_size=inventory.config.hidden_size,
        experts_per_token=routing.num_experts_per_tok if routing else 0,
        tokens=(recipe.samples + recipe.held_out) * recipe.seq_len,
        judged=recipe.held_out * recipe.seq_len,
        sequence=recipe.seq_len,
        batches=Batches(),
    )
    return fitting_peak(work, memory)


def _sequences(source: Path, recipe: Recipe) -> Sequences:
    if recipe.calibration is None:
        raise QuantkitError(
            f"the recipe {recipe.scheme} needs calibration text", "give --calibration FILE.txt, FILE.jsonl or a data set's id"
        )
    return load_sequences(
        recipe.calibration,
        ChatTokenizer(source),
        samples=recipe.samples,
        held_out=recipe.held_out,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
    )


def _fingerprint(checkpoint: Checkpoint, recipe: Recipe, format: str, sequences: Sequences) -> dict[str, str]:
    tokens = hashlib.sha256()
    for sequence in (*sequences.calibration, *sequences.held_out):
        tokens.update(sequence.numpy().tobytes() + b"|")
    return {
        "source": checkpoint.fingerprint,
        "recipe": recipe.fingerprint,
        "format": format,
        "calibration": tokens.hexdigest(),
        "version": __version__,
    }
