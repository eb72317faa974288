"""Repair of a checkpoint in a copy, which is written and proven before it appears.

Shards without a change are copied, so everything else is identical bit for bit. A shard with a
changed tensor, or with a copy of one that the index assigns to another shard, is rewritten without
the copy. Tensors from the source go into a new shard. The output appears atomically, by one rename.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.checkpoint.aux_files import AUX_FILES
from quantkit.checkpoint.header import encode_header, read_header
from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.atomic_write import sync_folder, sync_tree
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import is_there, read_file
from quantkit.diagnosis import catalogue, join_names
from quantkit.diagnosis.behaviour import SEQ_LEN, cross_entropy, read_compared
from quantkit.diagnosis.corrections import AddedTensors, Repair, plan_changes, set_engine_keys
from quantkit.diagnosis.diagnose import Depth, Diagnosis, diagnose
from quantkit.diagnosis.survey import INDEX, Survey
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.models import is_known
from quantkit.models.stored_parameters import check_stored, read_model

_NEW_SHARD = "model-repaired.safetensors"


def check_new(out: Path) -> None:
    """Raises QuantkitError if the target of the copy exists."""
    if out.exists():
        raise QuantkitError(f"{out} exists", "choose another --repair")


def repair(
    diagnosis: Diagnosis, out: Path, source: str | None = None, engine: str | None = None
) -> list[str]:
    """Write the corrected checkpoint to `out`; returns the changes as text. Raises QuantkitError if
    nothing can be repaired.

    engine: also set what this engine needs in config.json and the list of unquantized modules.
    """
    examined = diagnosis.examined
    survey = examined.survey
    if not survey.has_weights:
        raise QuantkitError(
            f"{survey.path} is not on this machine", "download it, and repair the copy"
        )
    check_new(out)
    if diagnosis.findings.has("shard-missing", "shard-damaged", "config-unreadable"):
        raise QuantkitError(
            f"{survey.path} lacks files that cannot be restored", "download them first"
        )
    if diagnosis.findings.has("not-read"):
        raise QuantkitError(
            f"{survey.path} is not read, so it cannot be shown that a repaired copy is right",
            "see the remedies of the findings",
        )
    if diagnosis.findings.has("tensor-twice"):
        raise QuantkitError(
            f"two shards of {survey.path} hold a tensor of one name, and there is no index to "
            "choose by",
            "remove one of them",
        )
    files, unreadable = _files(survey)
    plan = Repair(dict(survey.config), files)
    origin = (
        Checkpoint.open(path)
        if source is not None and (path := find_local(source)) is not None
        else None
    )
    wanted = [
        one.name
        for one in diagnosis.findings.found
        if catalogue()[one.name].from_source and diagnosis.cured_by_source(one.name)
    ]
    if source is not None and origin is None and wanted:
        raise QuantkitError(
            f"{source} is not on this machine, and {join_names(wanted)} needs files of it",
            "download it, and give its folder as --source",
        )
    plan_changes(diagnosis, plan, origin)
    if engine is not None:
        set_engine_keys(engine, examined, plan)
    if not plan.changes:
        raise QuantkitError(
            f"nothing that was found in {survey.path} can be repaired",
            "see the remedies of the findings",
        )
    plan.changes += [
        f"{name} was left out: {fault}"
        for name, fault in unreadable.items()
        if name not in plan.files
    ]
    _write_copy(examined.survey, plan, out, lambda copy: _prove(diagnosis, copy, source))
    return plan.changes


_WORSE, _CHANCE, _DOCUMENTS = 1.01, 0.9, 2
"""Factor over the cross entropy before, of what is equal but for its rounding; share of that of equal
probabilities above which a model predicts nothing; documents of SEQ_LEN tokens that are measured."""


def _prove(diagnosis: Diagnosis, written: Path, source: str | None) -> None:
    """Raise QuantkitError, so that the copy is taken back, unless it runs, has no fault that was not
    there before, and predicts a text as well as what was repaired, where that ran."""
    survey = diagnosis.examined.survey
    depth: Depth = "tensors" if "tensors" in diagnosis.seconds else "headers"
    found = diagnose(str(written), source=source, depth=depth).findings
    before = {one.name for one in diagnosis.findings.found}
    new = next((one for one in found.ordered if one.name not in before), None)
    if new is not None and new.severity == "error":
        raise _taken_back(survey, f"{new.name} in {new.where}: {new.evidence}")
    try:
        shipped = survey.path / SHIPPED_TEXT
        text = shipped if shipped.is_file() else None
        documents = read_compared(written, text)[:_DOCUMENTS]
    except QuantkitError:  # without a tokenizer any tokens do
        documents = [torch.arange(SEQ_LEN) % survey.config["vocab_size"]]
    try:
        after = _cross_entropy(Checkpoint.open(written), documents)
    except QuantkitError as fault:
        raise _taken_back(survey, fault.problem) from fault
    try:
        before_it = Checkpoint(survey.path, survey.config, survey.side, survey.tensors)
        first = _cross_entropy(before_it, documents)
    except (QuantkitError, RuntimeError):
        return  # what does not run has nothing to be compared with
    chance = _CHANCE * math.log(survey.config["vocab_size"])
    if first < chance and not after <= first * _WORSE:
        raise _taken_back(
            survey, f"it predicts a text worse, {after:.3f} nats a token, not {first:.3f}"
        )


def _taken_back(survey: Survey, problem: str) -> QuantkitError:
    return QuantkitError(
        f"the repaired copy of {survey.path} was taken back: {problem}",
        "see the remedies of the findings",
    )


def _cross_entropy(checkpoint: Checkpoint, documents: list[Tensor]) -> float:
    """In nats a token."""
    if not is_known(checkpoint.config):
        options = PerplexityOptions(device="cpu")
        return math.log(measure(str(checkpoint.path), documents, options).ppl)
    check_stored(checkpoint, [row for row in read_model(checkpoint).rows if not row.mtp])
    return cross_entropy(checkpoint, documents)


def _files(survey: Survey) -> tuple[dict[str, bytes], dict[str, QuantkitError]]:
    """Files next to the weights, and errors of those that cannot be read."""
    found, unreadable = dict[str, bytes](), dict[str, QuantkitError]()
    for name in (*AUX_FILES, *survey.side):
        if name in survey.names:
            try:
                found[name] = read_file(survey.path / name)
            except QuantkitError as fault:
                unreadable[name] = fault
    return found, unreadable


def _write_copy(survey: Survey, plan: Repair, out: Path, prove: Callable[[Path], None]) -> None:
    """Write the survey's checkpoint with the planned changes to the new directory `out`,
    atomically, if `prove` raises nothing for the written copy."""
    partial = out.with_name(f"{out.name}.partial")
    if is_there(partial):
        raise QuantkitError(f"{partial} is there from a run that was stopped", "remove it")
    partial.mkdir(parents=True)
    try:
        tensors = [
            tensor
            for shard in _write_shards(survey, plan, partial)
            for tensor in read_header(partial, shard)
        ]
        weight_map = {tensor.name: tensor.shard for tensor in tensors}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        (partial / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
        for name, content in plan.files.items():
            (partial / name).write_bytes(content)
        prove(partial)
        sync_tree(partial)
        partial.rename(out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _write_shards(survey: Survey, plan: Repair, folder: Path) -> list[str]:
    """Returns the shard names."""
    by_shard: dict[str, list[str]] = {}
    for name, info in survey.tensors.items():
        by_shard.setdefault(info.shard, []).append(name)
    with_copies = {other.shard for _, other in survey.copies}
    for shard, names in by_shard.items():
        (folder / shard).parent.mkdir(parents=True, exist_ok=True)
        changed = {name: plan.changed[name] for name in names if name in plan.changed}
        if changed or shard in with_copies or any(name in survey.renamed for name in names):
            _rewrite(survey, names, changed, folder / shard)
        else:
            shutil.copyfile(survey.path / shard, folder / shard)
    if plan.added:
        _save(folder / _NEW_SHARD, plan.added)
    return sorted({*by_shard, *([_NEW_SHARD] if plan.added else ())})


def _rewrite(
    survey: Survey, names: list[str], changed: Mapping[str, Callable[[], Tensor]], target: Path
) -> None:
    """Rewrite a shard tensor by tensor, in the order of its bytes."""
    ordered = sorted(names, key=lambda name: survey.tensors[name].offset)
    header, _ = encode_header([survey.tensors[name] for name in ordered])
    with target.open("wb") as file:
        file.write(header)
        for name in ordered:
            _append(
                file,
                changed[name]() if name in changed else survey.shards.read(survey.tensors[name]),
            )


def _save(target: Path, added: list[AddedTensors]) -> None:
    header, _ = encode_header([spec for one in added for spec in one.specs])
    with target.open("wb") as file:
        file.write(header)
        for one in added:
            tensors = one.make()
            for spec in one.specs:
                _append(file, tensors[spec.name])


def _append(file: BinaryIO, tensor: Tensor) -> None:
    if tensor.numel():
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
