"""The steps of a check: headers first, then tensors and behaviour if requested and readable."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from quantkit.calibrate.recipe import RotationKind
from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.output_dir import read_report
from quantkit.checkpoint.reader import Checkpoint, HeaderCheckpoint, open_headers
from quantkit.common.errors import QuantkitError
from quantkit.common.settings import checked
from quantkit.diagnosis import Findings
from quantkit.diagnosis.behaviour import SublayerError, compare_behaviour, read_compared
from quantkit.diagnosis.description import Description, describe
from quantkit.diagnosis.sampled_rows import sample_unquantized_rows
from quantkit.diagnosis.settings import check_settings, compare_settings
from quantkit.diagnosis.source_comparison import SourceComparison, is_matrix
from quantkit.diagnosis.structure import Structure, compare, read_table, rename
from quantkit.diagnosis.survey import (
    Survey,
    compare_copy_headers,
    compare_copy_values,
    survey_model,
)
from quantkit.diagnosis.tensors import TensorCheck
from quantkit.diagnosis.unquantized import check_activation_scales
from quantkit.engines.check import check_checkpoint, check_model
from quantkit.engines.profiles import find_engine
from quantkit.models import is_known
from quantkit.models.stored_parameters import check_stored, read_model
from quantkit.quantization import pruning
from quantkit.quantization.rotation import has_head, open_rotated

Depth = Literal["headers", "tensors", "behaviour"]
DEPTHS: tuple[Depth, ...] = ("headers", "tensors", "behaviour")
_BYTES_A_SECOND = 0.35e9
"""On one CPU core. R1's shapes took 2.1 CPU s per GB in FP8 and 2.8 in the AWQ format."""


@dataclass
class ExaminedCheckpoint:
    """A checkpoint as far as it could be read. offsets: steps that zero points are off, by module;
    inverted: modules with an inverted global scale."""

    survey: Survey
    structure: Structure
    description: Description
    offsets: dict[str, float] = field(default_factory=dict)
    inverted: list[str] = field(default_factory=list)


@dataclass
class Diagnosis:
    """The result of a check. source_faults: names of findings that the source has too, or cannot
    cure; seconds: by depth."""

    model: str
    examined: ExaminedCheckpoint
    findings: Findings
    source: ExaminedCheckpoint | None = None
    source_faults: set[str] = field(default_factory=set)
    seconds: dict[Depth, float] = field(default_factory=dict)
    sublayers: list[SublayerError] = field(default_factory=list)
    kl: float | None = None

    @property
    def checked(self) -> list[str]:
        """What was looked at, a line each."""
        survey = self.examined.survey
        found = {
            "headers": f"{len(survey.tensors):,} tensors by name, shape and dtype against the model's "
            "table; config.json, its quantization, the index, the tokenizer and chat template",
            "tensors": f"{survey.nbytes / 1e9:.2f} GB of codes, scales and zero points",
            "behaviour": "each layer's output and the next tokens, computed by both models",
        }
        lines = [found[depth] for depth in self.seconds]
        against = [] if self.source is None else ["config.json and weights, against the source"]
        return [*lines, *against]

    def cured_by_source(self, *names: str) -> bool:
        """Whether one of these was found here and not in the source."""
        return self.findings.has(*{*names} - self.source_faults)

    def to_json(self) -> dict[str, Any]:
        return self.findings.to_json()


Notify = Callable[[str], None]
OnBytes = Callable[[int, int], None]


def diagnose(
    model: str,
    *,
    source: str | None = None,
    engine: str | None = None,
    depth: Depth = "headers",
    text: Path | None = None,
    notify: Notify = lambda _: None,
    on_bytes: OnBytes = lambda done, total: None,
) -> Diagnosis:
    """All faults of the checkpoint `model`, compared with `source` if given.

    engine: also report what keeps that engine from loading it. depth: how deep to check; each depth
    includes the previous ones. text: that both models compute for the behaviour, by default
    quantkit's own. notify: called with the next step and its expected time. on_bytes: called with
    checked and total bytes of tensors. Raises QuantkitError for an unknown model or engine, or an
    unreadable text.
    """
    if engine is not None:
        find_engine(engine)
    documents = _documents(source, text) if depth == "behaviour" else []
    start = time.perf_counter()
    findings = Findings()
    notify("headers: seconds")
    examined = examine(model, findings)
    if depth == "behaviour":
        _check_computes(examined)
    diagnosis = Diagnosis(model, examined, findings)
    if source is not None:
        source_findings = Findings()
        diagnosis.source = examine(source, source_findings)
        _refuse_pruned(model, examined, diagnosis.source)
        compare_settings(
            examined.survey,
            examined.structure,
            diagnosis.source.survey,
            diagnosis.source.structure,
            findings,
        )
        _compare_mtp(examined, diagnosis.source, findings)
        diagnosis.source_faults = {one.name for one in source_findings.found}
        if source_findings.has("tokenizer-missing"):
            diagnosis.source_faults.add("tokenizer-broken")
        findings.replace_remedies(diagnosis.source_faults)
    _check_loading(examined, engine, findings)
    diagnosis.seconds["headers"] = time.perf_counter() - start
    if depth != "headers" and examined.survey.has_weights:
        notify(
            f"tensors: {examined.survey.nbytes / 1e9:.2f} GB, about "
            f"{examined.survey.nbytes / _BYTES_A_SECOND + 1:.0f} s"
        )
        start = time.perf_counter()
        check_tensors(examined, source, diagnosis, on_bytes)
        diagnosis.seconds["tensors"] = time.perf_counter() - start
    if depth == "behaviour":
        notify("behaviour: both models read once, about twice as long again")
        start = time.perf_counter()
        _check_behaviour(examined, source, documents, diagnosis)
        diagnosis.seconds["behaviour"] = time.perf_counter() - start
    return diagnosis


def _refuse_pruned(model: str, examined: ExaminedCheckpoint, source: ExaminedCheckpoint) -> None:
    """Raise QuantkitError if experts of the source were pruned: the remaining ones have other
    numbers."""
    ours, theirs = (one.structure.config for one in (examined, source))
    if (
        pruning.FILE_NAME not in examined.survey.names
        or ours is None
        or theirs is None
        or ours.routing == theirs.routing
    ):
        return
    problem = (
        f"{model} has fewer experts than {source.survey.path} (see {pruning.FILE_NAME}), "
        "and experts are compared by their number"
    )
    raise QuantkitError(
        problem, "check it without --source; its report.html has the KL from the source"
    )


def _documents(source: str | None, text: Path | None) -> list[Tensor]:
    """Token ids that both models are to compute, read before anything else."""
    folder = None if source is None else find_local(source)
    if folder is None:
        raise QuantkitError(
            "behaviour is compared with the source", "give --source, a model on this machine"
        )
    return read_compared(folder, text)


def _check_computes(examined: ExaminedCheckpoint) -> None:
    """Check that quantkit itself computes the architecture. A config.json without one is reported
    as a finding."""
    model_type = examined.survey.config.get("model_type")
    if isinstance(model_type, str) and not is_known(examined.survey.config):
        problem = (
            f"quantkit has no implementation of the architecture {model_type!r}, which "
            "comparing the behaviour needs"
        )
        raise QuantkitError(
            f"{examined.survey.path}: {problem}",
            "leave out --depth behaviour, and measure it with quantkit ppl --baseline SRC",
        )


def _check_behaviour(
    examined: ExaminedCheckpoint, source: str | None, documents: list[Tensor], diagnosis: Diagnosis
) -> None:
    if source is None or not examined.survey.has_weights:
        raise QuantkitError(
            f"{examined.survey.path} is not on this machine, so it cannot be computed",
            "download it, or leave out --depth behaviour",
        )
    survey = examined.survey
    try:
        checkpoint = Checkpoint(survey.path, survey.config, survey.side, survey.tensors)
        check_stored(checkpoint, [row for row in read_model(checkpoint).rows if not row.mtp])
        theirs = _open_source(source, diagnosis)
        errors, kl = compare_behaviour(checkpoint, theirs, documents, diagnosis.findings)
    except QuantkitError as fault:
        if (
            diagnosis.findings.verdict != "bad" and examined.description.readable
        ):  # else reported as `not-read`
            diagnosis.findings.add("not-loadable", str(survey.path), fault.problem, fault.remedy)
        return
    diagnosis.sublayers, diagnosis.kl = errors, kl


class _Rotations(BaseModel):
    """Of the recipe in a report.json."""

    rotation: tuple[RotationKind, ...] = ()
    seed: int = 0


def _open_source(source: str, diagnosis: Diagnosis) -> Checkpoint:
    """The source as the checkpoint was made from it: rotated as its report.json says, and a tied
    head a tensor if the checkpoint has one."""
    examined, theirs = diagnosis.examined, diagnosis.source
    path = examined.survey.path
    said = read_report(path).get("recipe", {})
    recipe = checked(said, _Rotations, str(path / "report.json"), "check it without --source")
    rows = [] if theirs is None else theirs.structure.rows
    untie = bool(rows) and has_head(examined.structure.rows) and not has_head(rows)
    checkpoint = open_headers(source)
    if not recipe.rotation and not untie:
        return checkpoint
    return open_rotated(checkpoint, recipe.rotation, recipe.seed, untie=untie)


@torch.inference_mode()
def check_tensors(
    examined: ExaminedCheckpoint, source: str | None, diagnosis: Diagnosis, on_bytes: OnBytes
) -> None:
    """Check every stored byte, in the order of the shards."""
    survey, description, findings = examined.survey, examined.description, diagnosis.findings
    compare_copy_values(survey, findings)
    check = TensorCheck(survey, examined.structure, description, findings)
    comparison = None
    if source is not None and find_local(source) is not None:
        theirs = _open_source(source, diagnosis)
        comparison = SourceComparison(theirs, survey, examined.structure, description, findings)
    owner = {
        name: module for module, linear in description.linears.items() for name in linear.tensors
    }
    matrices = {row.name: row.module for row in examined.structure.rows if is_matrix(row)}
    done, total, checked = 0, survey.nbytes, set[str]()
    for name in sorted(
        survey.tensors, key=lambda name: (survey.tensors[name].shard, survey.tensors[name].offset)
    ):
        done += survey.tensors[name].nbytes
        module = owner.get(name)
        if module is None:
            check.unquantized(name)
            if comparison is not None and name in matrices and comparison.is_unquantized(name):
                comparison.add(matrices[name], sample_unquantized_rows(survey, name))
        elif module not in checked:
            checked.add(module)
            rows = check.linear(module, description.linears[module])
            if rows is not None and comparison is not None:
                comparison.add(module, rows)
        on_bytes(done, total)
    check.finish(comparison.matching if comparison is not None else ())
    if comparison is not None:
        comparison.finish()
        examined.offsets |= comparison.offsets
    examined.offsets |= check.offsets
    examined.inverted += check.inverted


def examine(model: str, findings: Findings) -> ExaminedCheckpoint:
    """Check headers and the files next to the weights."""
    survey = survey_model(model, findings)
    compare_copy_headers(survey, findings)
    structure = read_table(survey, findings)
    rename(survey, structure, findings)
    description = describe(survey, {row.module: row.shape for row in structure.rows}, findings)
    where = (
        "config.json"
        if survey.config.get("quantization_config")
        else next(iter(survey.side), "config.json")
    )
    compare(survey, structure, description, where, findings)
    check_activation_scales(survey, description, findings)
    check_settings(survey, structure, findings)
    return ExaminedCheckpoint(survey, structure, description)


def _compare_mtp(
    examined: ExaminedCheckpoint, source: ExaminedCheckpoint, findings: Findings
) -> None:
    """MTP layers of the source that this checkpoint neither stores nor declares."""
    missing = {row.name for row in source.structure.missing}
    theirs = [row.name for row in source.structure.rows if row.mtp and row.name not in missing]
    ours = [row for row in examined.structure.rows if row.mtp]
    if (
        theirs
        and not ours
        and examined.structure.rows
        and not findings.has("mtp-not-announced", "mtp-missing")
    ):
        findings.add(
            "mtp-missing",
            theirs,
            f"the source has an MTP layer of {len(theirs)} tensors, and it was left out",
        )


def _check_loading(examined: ExaminedCheckpoint, engine: str | None, findings: Findings) -> None:
    """Open the checkpoint as other commands do, adding a finding for an error that was not found
    before; then check the engine's rules."""
    if engine is None and findings.verdict == "bad":
        return
    try:
        kind, survey = (
            (Checkpoint if examined.survey.has_weights else HeaderCheckpoint),
            examined.survey,
        )
        checkpoint = kind(survey.path, survey.config, survey.side, survey.tensors)
        if is_known(checkpoint.config) and not findings.has("mtp-missing", "mtp-incomplete"):
            check_stored(checkpoint, read_model(checkpoint).rows)
    except QuantkitError as fault:
        is_read = examined.description.readable and not findings.has("not-read")
        if findings.verdict != "bad" and is_read:
            findings.add("not-loadable", str(examined.survey.path), fault.problem, fault.remedy)
        return
    if engine is not None:
        _check_engine(engine, checkpoint, findings)


def _check_engine(engine: str, checkpoint: Checkpoint, findings: Findings) -> None:
    profile, format = find_engine(engine), checkpoint.format.name
    known = profile.covers_format(format)
    if not known:
        findings.add(
            "engine-unknown",
            engine,
            f"the profile of {engine} {profile.release} does not cover {format}",
        )
    try:
        problems = (
            check_checkpoint(engine, checkpoint)
            if known
            else check_model(profile, checkpoint, format, checkpoint.format.variant)
        )
    except QuantkitError as fault:
        findings.add("engine-refuses", engine, fault.problem, fault.remedy)
        return
    for problem in problems:
        name = "engine-refuses" if problem.severity == "error" else "engine-loses"
        findings.add(name, engine, problem.problem, problem.remedy)
