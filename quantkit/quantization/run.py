"""quantize(): open the source, check everything, calibrate and write, account for every tensor."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.calibrate.cache_scales import QuantizedCache
from quantkit.calibrate.data import OWN_TEXT, SHIPPED_TEXT, Sequences, load_sequences
from quantkit.calibrate.hidden_states import Batches
from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.output import Findings, Output, ProgressLog
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.source_model import ParameterReader, SourceModel
from quantkit.calibrate.walk import Walk
from quantkit.checkpoint.aux_files import has_tokenizer
from quantkit.checkpoint.output_dir import check_target, complete_manifest
from quantkit.checkpoint.pruned import PrunedCheckpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import prepare
from quantkit.common.devices import describe_hardware, select_device
from quantkit.common.errors import UsageError
from quantkit.common.plots import check_drawable
from quantkit.common.progress import Note, OnEvent, Progress, RunUsage, ignore_event, peak_memory
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.grids.base import grid_label
from quantkit.grids.schemes import Scheme
from quantkit.models import is_known
from quantkit.models.architecture import longest_text
from quantkit.models.expert_counts import FILE_NAME, ExpertCounts
from quantkit.models.mtp import has_block_head
from quantkit.quantization.bit_allocation import (
    GridAssignment,
    GridOptions,
    read_sensitivities,
)
from quantkit.quantization.cost import (
    CALIBRATED_SHARE,
    expected_seconds,
    faster_run,
    job_work,
    measure_rate,
    unit_shares,
)
from quantkit.quantization.job import Job, open_job
from quantkit.quantization.memory import Peak, check_memory, expected_peak
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.model_card import NAME as CARD
from quantkit.quantization.model_card import RECIPE, model_card, own_command, own_settings
from quantkit.quantization.model_text import SELF, model_text, text_path
from quantkit.quantization.pruning import FILE_NAME as PRUNING
from quantkit.quantization.pruning import PrunedExperts, describe_pruning, prune, prune_as
from quantkit.quantization.report import (
    RunDescription,
    RunFacts,
    describe_drafts,
    read_findings,
    report_files,
)
from quantkit.quantization.request import NO_MIXTURE, JobRequest, read_request
from quantkit.quantization.result import QuantizationReport
from quantkit.quantization.rtn import round_units
from quantkit.quantization.sensitivity_run import NAME, find_sensitivities, sensitivities_path
from quantkit.tokenizer.chat import ChatTokenizer

_LONG_S = 60
"""From which an expected time is worth a line."""


def quantize(
    source: Path,
    out: Path,
    scheme: Scheme,
    format: str,
    recipe: Recipe,
    *,
    engine: str | None = None,
    mixture: Mixture = NO_MIXTURE,
    device: str = "auto",
    memory: int | None = None,
    overwrite: bool = False,
    records: Sequence[Any] | None = None,
    on_event: OnEvent = ignore_event,
) -> QuantizationReport:
    """Quantize the checkpoint `source` into the directory `out`.

    format: a format's command-line name, or "auto" for the scheme's first. engine: write what this
    engine loads, or refuse. mixture: linears that stay as they are, or are on other grids.
    recipe.calibration: a file or data set, None for quantkit's own text, "self" for text that the
    model writes; not used by schemes without calibration; records: in its place, which it then
    names. memory: bytes of host memory
    that the run must not exceed. Raises QuantkitError before any long work if the source, the
    recipe, the memory or the target do not fit; a stopped run resumes when it is called again with
    the same arguments, and a complete one returns its report.
    """
    start, ranks = time.perf_counter(), Ranks.join()
    listen = on_event if ranks.is_main else ignore_event
    check_drawable()
    given = recipe.calibration if recipe.calibration != SELF else None
    inputs = [source, *(Path(one) for one in (given, mixture.sensitivities) if one)]
    prepare(out, inputs, ranks.rank)
    request = read_request(scheme, format, engine, recipe, mixture)
    if recipe.calibration == SELF and (ranks.size > 1 or memory is not None):
        raise UsageError(
            "a model that writes its calibration text is loaded whole, by one process",
            "leave --calibration self out, or --memory and torchrun; a finished output has the "
            f"text as {SHIPPED_TEXT}, which --calibration takes as a file",
        )
    run = _checked(
        source,
        request,
        engine,
        memory,
        records,
        lambda checkpoint: model_text(checkpoint, out, recipe, device, on_event),
    )
    where = select_device(device)
    if run.options is not None:
        if ranks.is_main:
            _check_before_measuring(run, out, overwrite)
        run = _with_grids(
            run,
            run.options,
            out,
            mixture.sensitivities,
            ranks,
            where,
            listen,
        )
    job = run.job
    if (
        ranks.size > 1 and where.type != "cpu"
    ):  # torchrun sets one thread; on a CPU results depend on their number
        torch.set_num_threads(ranks.cores)
    source_reader, about = ParameterReader(job.checkpoint, where), job.inventory
    output = Output(
        source_reader,
        job.target,
        job.grids,
        job.units,
        about.dropped,
        about.described,
        job.extra_specs,
    )
    if not overwrite and (manifest := complete_manifest(out, run.fingerprint)):
        if isinstance(job.checkpoint, PrunedCheckpoint):
            prune_as(job.checkpoint, out)
        output.source_guard().verify_output(out, manifest)
        seconds = time.perf_counter() - start
        found = read_findings(out)
        return _report(run, output, out, seconds, peak_memory(), found, done_already=True)
    notes = [*(run.sequences.summary.lines() if run.sequences.summary else ()), job.note]
    if not has_tokenizer(source):
        notes.append(
            f"warning: {source} has no tokenizer, and so the output has none: engines need it "
            "next to the weights"
        )
    for note in filter(None, notes):
        listen(Note(note))
    writer = output.open(out, run.fingerprint, overwrite=overwrite, rank=ranks.rank, inputs=inputs)
    with writer, writer.report_interrupt(output.units):
        resumed = writer.progress(output.units) if ranks.is_main else ""
        if ranks.is_main and resumed:
            on_event(Note(f"resuming {out}: {resumed}"))
        usage = RunUsage(writer.state_dir / "spent.json", start, run.fingerprint)
        if ranks.is_main:
            seconds, faster = _expected_seconds(run, output, writer.state_dir, ranks.size)
            if seconds > _LONG_S and not resumed:
                on_event(Note(f"about {format_duration(seconds)} on this machine{faster}"))
            listen = usage.listener(on_event, seconds)
        pruned = _pruned(run, output, ranks, listen)
        if ranks.is_main:
            writer.check_source()
        found = _round(run, output, ranks, listen, pruned)
        if not ranks.is_main:
            writer.close()
        ranks.barrier()
        if ranks.is_main:
            facts = RunFacts(
                datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                round(usage.seconds, 1),
                describe_hardware(device),
                resumed,
            )
            account = _account(run, output, source, out, engine)
            files = report_files(account, found, job.rows, facts) | _counts_file(run, found)
            files |= {} if pruned is None else {PRUNING: pruned.to_bytes()}
            files |= {} if run.text is None else {SHIPPED_TEXT: run.text.read_bytes()}
            files[CARD] = _card(run, account, found)
            output.finish(
                job.request.scheme.weight, files | ({NAME: run.measured} if run.chosen else {})
            )
            sensitivities_path(out).unlink(missing_ok=True)
            if run.text == text_path(out):
                run.text.unlink()
    return _report(run, output, out, usage.seconds, usage.peak_memory, found)


def _expected_seconds(run: "_Run", output: Output, folder: Path, ranks: int) -> tuple[float, str]:
    """Of the run, and in words what would be faster on one rank."""
    stored, tokens = (
        sum(sum(parts.values()) for parts in output.bytes_by_part()),
        run.tokens or None,
    )
    rate = measure_rate(folder, output.source.device)
    seconds = expected_seconds(job_work(run.job, run.job.linears, stored, tokens), rate)
    faster = faster_run(run.job, stored, tokens) if ranks == 1 else None
    return seconds / ranks, f"; {faster.describe(rate)}" if faster else ""


@dataclass(frozen=True)
class _Run:
    """A job with its calibration text. sequences: empty without calibration. fingerprint:
    everything the output depends on. options: of grids to choose; chosen: the chosen ones, and
    measured, the content of the sensitivities file. text: the file of what the model wrote."""

    job: Job
    sequences: Sequences
    peak: Peak
    batches: Batches
    fingerprint: dict[str, str]
    options: GridOptions | None = None
    chosen: GridAssignment | None = None
    measured: bytes = b""
    text: Path | None = None

    def scratch(self, output: Output) -> Path | None:
        """Folder of the files of hidden states; None if they fit into memory."""
        return output.writer.state_dir if self.peak.in_file else None

    @property
    def calibration_tokens(self) -> int:
        return sum(len(s) for s in self.sequences.calibration)

    @property
    def tokens(self) -> int:
        """Held-out ones included."""
        return self.calibration_tokens + sum(len(s) for s in self.sequences.held_out)


def _checked(
    source: Path,
    request: JobRequest,
    engine: str | None,
    memory: int | None,
    records: Sequence[Any] | None,
    write_text: Callable[[Checkpoint], Path],
) -> _Run:
    """Validate everything before the first weight is read, but for text that the model writes."""
    job, recipe = open_job(request, Checkpoint.open(source)), request.recipe
    options = GridOptions(job) if request.mixture.chooses else None
    peak, batches = expected_peak(job, memory)
    check_memory(job, peak, memory)
    if job.request.methods or recipe.prune:
        job.inventory.config.check_tokenizer(source)
    sequences, text = Sequences([], []), None
    if job.request.methods or recipe.prune:
        text = write_text(job.checkpoint.source) if recipe.calibration == SELF else None
        path = str(text) if text else recipe.calibration
        positions = longest_text(job.inventory.config) if is_known(job.checkpoint.config) else 0
        sequences = load_sequences(
            path, ChatTokenizer(source), **recipe.sizes, records=records, positions=positions
        )
    name = job.request.format
    own = recipe.model_copy(
        update={"scheme": request.scheme.name}
    )  # a user's recipe may name another
    fingerprint = _fingerprint(
        job.checkpoint, own, f"{name} for {engine}" if engine else name, sequences
    )
    if batches != Batches():
        fingerprint["batches for --memory"] = str(batches)
    if request.scheme.cache == "fp8":
        fingerprint["cache"] = request.scheme.cache
    if request.mixture != NO_MIXTURE or job.fit:
        fingerprint["grids"] = _grids_digest(job)
    return _Run(job, sequences, peak, batches, fingerprint, options, text=text)


def _grids_digest(job: Job) -> str:
    fields = {module: grid_label(grid) for module, grid in job.grids.items()}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _check_before_measuring(run: _Run, out: Path, overwrite: bool) -> None:
    """Raise QuantkitError where `out` is something else than this run with other grids."""
    fields = {key: value for key, value in run.fingerprint.items() if key != "grids"}
    if overwrite or not complete_manifest(out, fields):
        check_target(out, fields, overwrite)


def _with_grids(
    run: _Run,
    options: GridOptions,
    out: Path,
    given: Path | None,
    ranks: Ranks,
    device: torch.device,
    on_event: OnEvent,
) -> _Run:
    """The run with chosen grids; the first rank measures sensitivities if no file has them."""
    if ranks.is_main:
        find_sensitivities(options, run.sequences, out, given, device, on_event)
    ranks.barrier()
    path = next(
        path
        for path in (given, sensitivities_path(out), out / NAME)
        if path is not None and path.is_file()
    )
    chosen = options.choose(read_sensitivities(path, options.job.checkpoint.fingerprint))
    fields = run.fingerprint | {"grids": _grids_digest(chosen.job)}
    return replace(
        run, job=chosen.job, fingerprint=fields, chosen=chosen, measured=path.read_bytes()
    )


def _report(
    run: _Run,
    output: Output,
    out: Path,
    seconds: float,
    peak: int,
    found: Findings,
    *,
    done_already: bool = False,
) -> QuantizationReport:
    return QuantizationReport(
        out=out,
        scheme=run.job.request.scheme.name,
        format=run.job.request.format,
        source_bytes=sum(tensor.nbytes for tensor in run.job.checkpoint.source.tensors.values()),
        output_bytes=sum(output.bytes_by_part()[1].values()),
        seconds=seconds,
        peak_memory=peak,
        planned_memory=run.peak.total,
        calibration_tokens=run.calibration_tokens,
        findings=found,
        coverage=run.job.coverage,
        pruned=describe_pruning(run.job.checkpoint),
        allocation=run.chosen.account() if run.chosen else None,
        done_already=done_already,
    )


def _pruned(run: _Run, output: Output, ranks: Ranks, on_event: OnEvent) -> PrunedExperts | None:
    """Which experts are left out, from now on also of the job's checkpoint; None where none are.
    One rank finds it out."""
    checkpoint, device = run.job.checkpoint, output.source.device
    if not isinstance(checkpoint, PrunedCheckpoint):
        return None
    total = sum(info.nbytes for info in checkpoint.base.tensors.values())

    def report(layer: int) -> None:
        on_event(Progress("choosing experts", f"layers.{layer}", 0, total, 0.0, 0, 0.0, False))

    found = None
    for turn in (True, False):
        if ranks.is_main == turn:
            state, scratch = output.writer.state_dir, run.scratch(output)
            found = prune(checkpoint, run.sequences, device, run.batches, state, report, scratch)
        ranks.barrier()
    output.source_chosen()
    return found


def _round(
    run: _Run, output: Output, ranks: Ranks, on_event: OnEvent, pruned: PrunedExperts | None
) -> Findings:
    """Calibrate and write the decoder layers, then round whatever is left; without methods, round
    everything."""
    job, recipe, methods = run.job, run.job.request.recipe, run.job.request.methods
    rtn = SolverTable(job.target, job.grids.__getitem__, recipe, (), run.batches.piece_values)
    if not methods:
        return round_units(output.source, output, rtn, on_event, ranks)
    solvers = SolverTable(
        job.target, job.grids.__getitem__, recipe, methods, run.batches.piece_values
    )
    quantized = {row.module for row in job.linears}
    frozen = job.grids.keys() - quantized
    model = SourceModel(
        output.source, job.inventory.architecture, job.inventory.config, job.rows, quantized, frozen
    )
    log = ProgressLog(model.units, output.source, output, on_event, unit_shares(job))
    cache = (
        QuantizedCache(job.inventory.config.cache, output.source.device, codes)
        if (codes := job.request.scheme.cache)
        else None
    )
    ends = job.inventory.embed_and_head(output.source)
    walk = Walk(model, solvers, log, ranks, run.batches, ends, cache, run.scratch(output))
    walk.unpruned = None if pruned is None else pruned.held_out
    findings = walk.run(run.sequences)
    round_units(output.source, output, rtn, on_event, ranks, begun=CALIBRATED_SHARE)
    return findings


def _account(
    run: _Run, output: Output, source: Path, out: Path, engine: str | None
) -> RunDescription:
    request, recipe = run.job.request, run.job.request.recipe
    before, after = output.bytes_by_part()
    experts = any(row.expert is not None for row in run.job.rows)
    return RunDescription(
        model=run.job.checkpoint.path.name,
        source=str(source.absolute()),
        command=own_command(request, source, out, engine),
        recipe=recipe.model_dump(mode="json"),
        scheme=request.scheme.name,
        format=request.format,
        version=__version__,
        calibration=_calibrated_on(request.recipe) if request.methods else None,
        calibration_tokens=run.calibration_tokens,
        min_expert_tokens=request.recipe.min_expert_tokens,
        source_bytes=before,
        output_bytes=after,
        quantized_share=run.job.coverage.share,
        left=run.job.coverage.left,
        allocation=run.chosen.account() if run.chosen else None,
        experts_left=experts and not any(row.expert is not None for row in run.job.linears),
        told=run.job.note,
    )


def _card(run: _Run, account: RunDescription, found: Findings) -> bytes:
    sizes = [
        format_bytes(sum(part.values())) for part in (account.output_bytes, account.source_bytes)
    ]
    facts = [
        ("scheme", account.scheme),
        ("weights", ", ".join(dict.fromkeys(grid.label for grid in run.job.grids.values()))),
        ("format", account.format),
        ("size", f"{sizes[0]}, from {sizes[1]}"),
        ("quantized", str(run.job.coverage)),
    ]
    if rotation := run.job.request.recipe.rotation:
        facts.append(("rotated", " and ".join(rotation)))
    if settings := own_settings(run.job.request):
        facts.append((RECIPE, f"`{json.dumps(settings)}`"))
    if account.calibration is not None:
        tokens = f"{account.calibration_tokens:,} tokens of {account.calibration}"
        facts.append(("calibration", tokens))
    if held := found.next_token:
        kl = f"{held['kl']:.2e} nats a token, on {int(held['tokens']):,} tokens held out"
        facts += [
            ("KL to the source", kl),
            ("same likeliest token", f"{held['top1_agree']:.1%} of them"),
            *([("accepted drafts", drafts)] if (drafts := describe_drafts(held)) else []),
        ]
    grids = list(dict.fromkeys(run.job.grids.values()))
    command = account.command.rpartition(" --out ")[0]
    return model_card(run.job.checkpoint, account.scheme, account.format, grids, facts, command)


def _counts_file(run: _Run, found: Findings) -> dict[str, bytes]:
    """Expert token counts of the calibration text, for `place`; empty without them."""
    if not found.expert_tokens:
        return {}
    has_head = has_block_head(run.job.rows)  # with experts of their own number
    stages = {row.layer for row in run.job.rows if has_head and row.mtp}
    counted = {int(layer): counts for layer, counts in found.expert_tokens.items()}
    layers = {layer: counts for layer, counts in counted.items() if layer not in stages}
    model_type = run.job.checkpoint.config.get("model_type")
    return {
        FILE_NAME: ExpertCounts.of(
            model_type, run.job.inventory.config, run.calibration_tokens, layers
        ).to_bytes()
    }


def _calibrated_on(recipe: Recipe) -> str:
    if recipe.calibration == SELF:
        return f"text that the model wrote, and {OWN_TEXT}"
    return OWN_TEXT if recipe.calibration is None else Path(recipe.calibration).name


def _fingerprint(
    checkpoint: Checkpoint, recipe: Recipe, format: str, sequences: Sequences
) -> dict[str, str]:
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
