"""Writing a corrected copy of a checkpoint.

Shards without a change are copied, so everything else is identical bit for bit. A shard with a
changed tensor, or with a copy of one that the index assigns to another shard, is rewritten without
the copy. Tensors from the source go into a new shard. The output appears atomically, by one rename.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorSpec, encode_header, read_header
from quantkit.common.atomic_write import sync_folder, sync_tree
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import is_there
from quantkit.diagnosis.survey import INDEX, Survey

_NEW_SHARD = "model-repaired.safetensors"


@dataclass(frozen=True)
class AddedTensors:
    """Tensors that the checkpoint lacks. make: all of `specs`, by name."""

    specs: list[TensorSpec]
    make: Callable[[], dict[str, Tensor]]


@dataclass
class Repair:
    """changes: as text. config, files: new contents. changed: tensors with new values of the same
    shape and dtype."""

    config: dict[str, Any]
    files: dict[str, bytes]
    changes: list[str] = field(default_factory=list)
    changed: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    added: list[AddedTensors] = field(default_factory=list)


def write_copy(survey: Survey, plan: Repair, out: Path, prove: Callable[[Path], None]) -> None:
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
