"""Writing a corrected copy of a checkpoint: what is changed in it, and the files.

Shards without a change are copied, so everything else is the same to the bit. A shard with a
changed tensor, or with a copy of one that the index says is in another shard, is written anew,
without the copy. What is taken from the source goes into a shard of its own. The output appears
whole, by one rename.
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
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.survey import INDEX, Survey

_NEW_SHARD = "model-repaired.safetensors"


@dataclass(frozen=True)
class Added:
    """Tensors that the checkpoint lacked. make: all of `specs`, by name."""

    specs: list[TensorSpec]
    make: Callable[[], dict[str, Tensor]]


@dataclass
class Repair:
    """What is done: `changes` in words. config, files: their new contents. changed: tensors of
    which only values change."""

    config: dict[str, Any]
    files: dict[str, bytes]
    changes: list[str] = field(default_factory=list)
    changed: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    added: list[Added] = field(default_factory=list)


def write(seen: Survey, plan: Repair, out: Path) -> None:
    """The checkpoint of `seen` as the plan has it, in the new directory `out`, which appears
    whole."""
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():
        raise QuantkitError(f"{partial} is there from a run that was stopped", "remove it")
    partial.mkdir(parents=True)
    try:
        held = [
            tensor
            for shard in _write_shards(seen, plan, partial)
            for tensor in read_header(partial, shard)
        ]
        weight_map = {tensor.name: tensor.shard for tensor in held}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in held)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        (partial / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
        for name, content in plan.files.items():
            (partial / name).write_bytes(content)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _write_shards(seen: Survey, plan: Repair, folder: Path) -> list[str]:
    """Returns their names."""
    by_shard: dict[str, list[str]] = {}
    for name, info in seen.tensors.items():
        by_shard.setdefault(info.shard, []).append(name)
    with_copies = {other.shard for _, other in seen.copies}
    for shard, names in by_shard.items():
        (folder / shard).parent.mkdir(parents=True, exist_ok=True)
        changed = {name: plan.changed[name] for name in names if name in plan.changed}
        if changed or shard in with_copies or any(name in seen.renamed for name in names):
            _rewrite(seen, names, changed, folder / shard)
        else:
            shutil.copyfile(seen.path / shard, folder / shard)
    if plan.added:
        _save(folder / _NEW_SHARD, plan.added)
    return sorted({*by_shard, *([_NEW_SHARD] if plan.added else ())})


def _rewrite(
    seen: Survey, names: list[str], changed: Mapping[str, Callable[[], Tensor]], target: Path
) -> None:
    """A shard anew, tensor by tensor, in the order of its bytes; a changed tensor has the dtype and
    shape it had."""
    ordered = sorted(names, key=lambda name: seen.tensors[name].offset)
    header, _ = encode_header([seen.tensors[name] for name in ordered])
    with target.open("wb") as file:
        file.write(header)
        for name in ordered:
            _append(
                file, changed[name]() if name in changed else seen.shards.read(seen.tensors[name])
            )


def _save(target: Path, added: list[Added]) -> None:
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
