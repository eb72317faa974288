"""diagnose(): the line of a check. Headers first; then tensors and behaviour, where they are asked
for and can be read."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.remote import HeaderCheckpoint, open_headers
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.against_source import SourceComparison, is_matrix
from quantkit.diagnosis.behaviour import SublayerError, compare_behaviour, read_compared
from quantkit.diagnosis.copies import compare_forms, compare_values
from quantkit.diagnosis.description import Described, describe
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.settings import check_settings, compare_settings
from quantkit.diagnosis.side_scales import compare_side_scales
from quantkit.diagnosis.stored_rows import plain_rows
from quantkit.diagnosis.structure import Structure, compare, read_table, rename
from quantkit.diagnosis.survey import Survey, survey_model
from quantkit.diagnosis.tensors import TensorCheck
from quantkit.engines.check import check_checkpoint, check_model
from quantkit.engines.profiles import find_engine
from quantkit.models import is_known
from quantkit.models.stored_parameters import check_stored, read_model
from quantkit.quantization import pruning

Depth = Literal["headers", "tensors", "behaviour"]
DEPTHS: tuple[Depth, ...] = ("headers", "tensors", "behaviour")
_BYTES_A_SECOND = 0.35e9
"""Of one processor. R1's shapes took 2.1 CPU s a GB in FP8, and 2.8 in AWQ's format."""


@dataclass
class Patient:
    """A checkpoint as far as it was understood. offsets: steps that zero points are off. inverted:
    modules whose global scale is."""

    survey: Survey
    structure: Structure
    described: Described
    offsets: dict[str, float] = field(default_factory=dict)
    inverted: list[str] = field(default_factory=list)


@dataclass
class Diagnosis:
    """What came of it. seconds: of each depth that was gone to."""

    model: str
    patient: Patient
    findings: DiagnosisFindings
    source: Patient | None = None
    seconds: dict[Depth, float] = field(default_factory=dict)
    sublayers: list[SublayerError] = field(default_factory=list)
    kl: float | None = None

    def to_json(self) -> dict[str, Any]:
        """verdict and findings."""
        return self.findings.to_json()


Tell = Callable[[str], None]
OnBytes = Callable[[int, int], None]


def diagnose(
    model: str,
    *,
    source: str | None = None,
    engine: str | None = None,
    depth: Depth = "headers",
    text: Path | None = None,
    tell: Tell = lambda _: None,
    on_bytes: OnBytes = lambda done, total: None,
) -> Diagnosis:
    """Everything that is wrong with the checkpoint `model`, compared with `source` where it is
    given.

    engine: also what keeps that engine from loading it. depth: how deep it looks; each depth holds
    the one before. text: what both compute for the behaviour, quantkit's own without. tell: what is
    about to be done, and how long it takes. on_bytes: bytes of tensors that were looked at, and all
    of them. Raises QuantkitError where there is no such model or engine, or the text cannot be
    read.
    """
    if engine is not None:
        find_engine(engine)
    documents = _documents(source, text) if depth == "behaviour" else []
    start = time.perf_counter()
    findings = DiagnosisFindings()
    tell("headers: seconds")
    patient = examine(model, findings)
    if depth == "behaviour":
        _check_computes(patient)
    diagnosis = Diagnosis(model, patient, findings)
    if source is not None:
        diagnosis.source = examine(source, DiagnosisFindings())
        _refuse_pruned(model, patient, diagnosis.source)
        compare_settings(
            patient.survey,
            patient.structure,
            diagnosis.source.survey,
            diagnosis.source.structure,
            findings,
        )
        _compare_mtp(patient, diagnosis.source, findings)
    _open(patient, engine, findings)
    diagnosis.seconds["headers"] = time.perf_counter() - start
    if depth != "headers" and patient.survey.has_weights:
        tell(
            f"tensors: {patient.survey.nbytes / 1e9:.2f} GB, about "
            f"{patient.survey.nbytes / _BYTES_A_SECOND + 1:.0f} s"
        )
        start = time.perf_counter()
        look_at_tensors(patient, source, diagnosis, on_bytes)
        diagnosis.seconds["tensors"] = time.perf_counter() - start
    if depth == "behaviour":
        tell("behaviour: both models read once, about twice as long again")
        start = time.perf_counter()
        _look_at_behaviour(patient, source, documents, diagnosis)
        diagnosis.seconds["behaviour"] = time.perf_counter() - start
    return diagnosis


def _refuse_pruned(model: str, patient: Patient, source: Patient) -> None:
    """Raise QuantkitError where experts of the source were left out on purpose: those that are
    there have other numbers."""
    ours, theirs = (one.structure.config for one in (patient, source))
    if (
        pruning.FILE_NAME not in patient.survey.names
        or ours is None
        or theirs is None
        or ours.routing == theirs.routing
    ):
        return
    told = (
        f"{model} has fewer experts than {source.survey.path} ({pruning.FILE_NAME} says "
        "which), and experts are compared by their number"
    )
    raise QuantkitError(
        told, "check it without --source; its report.html has the KL from the source"
    )


def _documents(source: str | None, text: Path | None) -> list[Tensor]:
    """What both models are to compute, read before anything else is."""
    folder = None if source is None else find_local(source)
    if folder is None:
        raise QuantkitError(
            "behaviour is compared with the source's", "give --source, a model on this machine"
        )
    return read_compared(folder, text)


def _check_computes(patient: Patient) -> None:
    """That quantkit computes the architecture by itself. A config.json that names none is told as a
    finding."""
    model_type = patient.survey.config.get("model_type")
    if isinstance(model_type, str) and not is_known(patient.survey.config):
        problem = (
            f"quantkit has no file of the architecture {model_type!r}, and behaviour is "
            "compared where it has one"
        )
        raise QuantkitError(
            f"{patient.survey.path}: {problem}",
            "leave out --depth behaviour, and measure it with quantkit ppl --baseline SRC",
        )


def _look_at_behaviour(
    patient: Patient, source: str | None, documents: list[Tensor], diagnosis: Diagnosis
) -> None:
    if source is None or not patient.survey.has_weights:
        raise QuantkitError(
            f"{patient.survey.path} is not on this machine, so it computes nothing",
            "download it, or leave out --depth behaviour",
        )
    seen = patient.survey
    try:
        checkpoint = Checkpoint(seen.path, seen.config, seen.side, seen.tensors)
        check_stored(checkpoint, [row for row in read_model(checkpoint).rows if not row.mtp])
        errors, kl = compare_behaviour(
            checkpoint, open_headers(source), documents, diagnosis.findings
        )
    except QuantkitError as fault:
        if (
            diagnosis.findings.verdict != "bad" and patient.described.readable
        ):  # else `not-read` has told
            diagnosis.findings.add("not-loadable", str(seen.path), fault.problem, fault.remedy)
        return
    diagnosis.sublayers, diagnosis.kl = errors, kl


@torch.inference_mode()
def look_at_tensors(
    patient: Patient, source: str | None, diagnosis: Diagnosis, on_bytes: OnBytes
) -> None:
    """Every stored byte, in the order of the shards."""
    seen, described, findings = patient.survey, patient.described, diagnosis.findings
    compare_values(seen, findings)
    check = TensorCheck(seen, patient.structure, described, findings)
    compared = _comparison(patient, source, findings)
    owner = {
        name: module for module, linear in described.linears.items() for name in linear.tensors
    }
    matrices = {row.name: row.module for row in patient.structure.rows if is_matrix(row)}
    done, total, looked = 0, seen.nbytes, set[str]()
    for name in sorted(
        seen.tensors, key=lambda name: (seen.tensors[name].shard, seen.tensors[name].offset)
    ):
        done += seen.tensors[name].nbytes
        module = owner.get(name)
        if module is None:
            check.plain(name)
            if compared is not None and name in matrices and compared.is_plain(name):
                compared.look(matrices[name], plain_rows(seen, name))
        elif module not in looked:
            looked.add(module)
            rows = check.linear(module, described.linears[module])
            if rows is not None and compared is not None:
                compared.look(module, rows)
        on_bytes(done, total)
    check.finish(compared.agreed if compared is not None else ())
    if compared is not None:
        compared.finish()
        patient.offsets |= compared.offsets
    patient.offsets |= check.offsets
    patient.inverted += check.inverted


def _comparison(
    patient: Patient, source: str | None, findings: DiagnosisFindings
) -> SourceComparison | None:
    if source is None or find_local(source) is None:
        return None
    return SourceComparison(source, patient.survey, patient.structure, patient.described, findings)


def examine(model: str, findings: DiagnosisFindings) -> Patient:
    """Headers and the files beside them."""
    seen = survey_model(model, findings)
    compare_forms(seen, findings)
    structure = read_table(seen, findings)
    rename(seen, structure, findings)
    described = describe(seen, {row.module: row.shape for row in structure.rows}, findings)
    where = (
        "config.json"
        if seen.config.get("quantization_config")
        else next(iter(seen.side), "config.json")
    )
    compare(seen, structure, described, where, findings)
    compare_side_scales(seen, described, findings)
    check_settings(seen, structure, findings)
    return Patient(seen, structure, described)


def _compare_mtp(patient: Patient, source: Patient, findings: DiagnosisFindings) -> None:
    """MTP layers that the source has, and this checkpoint neither stores nor promises."""
    lost = {row.name for row in source.structure.lost}
    theirs = [row.name for row in source.structure.rows if row.mtp and row.name not in lost]
    ours = [row for row in patient.structure.rows if row.mtp]
    if (
        theirs
        and not ours
        and patient.structure.rows
        and not findings.has("mtp-not-announced", "mtp-missing")
    ):
        findings.add(
            "mtp-missing",
            theirs,
            f"the source has an MTP layer of {len(theirs)} tensors, and it was left out",
        )


def _open(patient: Patient, engine: str | None, findings: DiagnosisFindings) -> None:
    """As every verb opens it: what stops there and was not found before is a finding too. Then the
    engine's own rules."""
    if engine is None and findings.verdict == "bad":
        return
    try:
        kind, seen = (
            (Checkpoint if patient.survey.has_weights else HeaderCheckpoint),
            patient.survey,
        )
        checkpoint = kind(seen.path, seen.config, seen.side, seen.tensors)
        if is_known(checkpoint.config) and not findings.has("mtp-missing", "mtp-incomplete"):
            check_stored(checkpoint, read_model(checkpoint).rows)
    except QuantkitError as fault:
        if findings.verdict != "bad" and patient.described.readable:
            findings.add("not-loadable", str(patient.survey.path), fault.problem, fault.remedy)
        return
    if engine is not None:
        _ask_engine(engine, checkpoint, findings)


def _ask_engine(engine: str, checkpoint: Checkpoint, findings: DiagnosisFindings) -> None:
    profile, format = find_engine(engine), checkpoint.format.name
    known = profile.tells_of(format)
    if not known:
        findings.add(
            "engine-unknown",
            engine,
            f"the profile of {engine} {profile.release} says nothing of {format}",
        )
    try:
        problems = (
            check_checkpoint(engine, checkpoint)
            if known
            else check_model(profile, checkpoint, format)
        )
    except QuantkitError as fault:
        findings.add("engine-refuses", engine, fault.problem, fault.remedy)
        return
    for problem in problems:
        name = "engine-refuses" if problem.severity == "error" else "engine-loses"
        findings.add(name, engine, problem.problem, problem.remedy)
