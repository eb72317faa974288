"""What is in a checkpoint, from its headers alone."""

from collections import Counter
from typing import Any

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models import is_known
from quantkit.models.stored import check_listed, is_stored, read_model, stored_shape
from quantkit.models.table import Parameter


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """A JSON-ready account: format, scheme, tensors, bytes; bytes by dtype and by part of the model; what is missing or unknown.

    `missing`, `misshapen` and `unknown` compare the stored tensors with the architecture's table; without a known architecture they are
    None. Raises QuantkitError where config.json has no such table.
    `left_as` counts the linears that are in another format than the rest, by format.
    """
    tensors = checkpoint.tensors.values()
    by_dtype = Counter[str]()
    for tensor in tensors:
        by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    left = Counter(linear.format.name for linear in checkpoint.linears.values() if linear.format is not checkpoint.format)
    about: dict[str, Any] = {
        "path": str(checkpoint.path),
        "architecture": checkpoint.config.get("model_type"),
        "format": checkpoint.format.name,
        "variant": checkpoint.format.variant,
        "scheme": checkpoint.scheme.name if checkpoint.scheme else None,
        "tensors": len(tensors),
        "bytes": sum(by_dtype.values()),
        "shards": len({tensor.shard for tensor in tensors}),
        "quantized_linears": len(checkpoint.linears),
        "left_as": dict(left),
        "bytes_by_dtype": dict(by_dtype.most_common()),
    }
    return about | _against_table(checkpoint)


def _against_table(checkpoint: Checkpoint) -> dict[str, Any]:
    if not is_known(checkpoint.config):
        check_listed(checkpoint, [])
        return {"missing": None, "misshapen": None, "unknown": None}
    model = read_model(checkpoint)
    by_part, owned, missing, misshapen = Counter[str](), set[str](), [], []
    for row in model.rows:
        stored = _stored(checkpoint, row)
        if not stored:
            missing.append(row.name)
        elif stored_shape(checkpoint, row) != row.shape:
            misshapen.append(row.name)
        owned.update(stored)
        by_part[row.part] += sum(checkpoint.tensors[name].nbytes for name in stored)
    return {
        "parameters": sum(_count(row) for row in model.rows),
        "bytes_by_part": dict(by_part.most_common()),
        "mtp_layers": model.config.num_nextn_predict_layers,
        "missing": missing,
        "misshapen": misshapen,
        "unknown": sorted(set(checkpoint.tensors) - owned),
    }


def _stored(checkpoint: Checkpoint, row: Parameter) -> tuple[str, ...]:
    if not is_stored(checkpoint, row):
        return ()
    return checkpoint.parts(row.module) if row.module in checkpoint.linears else (row.name,)


def _count(row: Parameter) -> int:
    count = 1
    for size in row.shape:
        count *= size
    return count
