"""What an engine loaded, as its loader told it (`pieces.py`), held against what quantkit reads from
the same checkpoint.

Codes and zero points must be equal, and so must scales and plain tensors after our value is cast to
the dtype that the engine holds. A rank's piece must be that rank's share: by the model's table, or
the whole tensor where the engine keeps it whole.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.e2m1 import E2M1_VALUES
from quantkit.grids.int_groups import IntWeight
from quantkit.grids.nvfp4 import Nvfp4Weight
from quantkit.models import find_architecture
from quantkit.models.cache_scales import cache_scale_specs, supports_cache_scales

Pieces = dict[str, Tensor]


@dataclass(frozen=True)
class Rank:
    number: int
    of: int


def faults(path, pieces, rank, unread):
    """One line for each tensor of the checkpoint that the engine lacks or holds differently, each
    that no parameter took, and each piece
    beyond them. unread: tensors that were written nowhere by name; those of a weight that came out
    right were joined with another's.
    """
    checkpoint = Checkpoint.open(path)
    architecture = find_architecture(checkpoint.config)
    config = architecture.Config.from_dict(checkpoint.config)
    rows = architecture.parameters(config)
    found = []
    known = set()
    right = set()
    for name, stored in (
        cache_scale_specs(config.cache, rows).items() if supports_cache_scales(config.cache) else ()
    ):
        piece = f"{stored[0].name.removesuffix('scale')[:-1]}|scale"
        if checkpoint.has(stored[0].name):
            known.add(piece)
            fault = _different_steps(checkpoint.read(stored[0].name), pieces.get(piece), rank)
            found += [f"{name}: {fault}"] if fault else []
            right |= set() if fault else {spec.name for spec in stored}
    for row in rows:
        if row.role == "ngram_table":  # engines keep it in host memory, by readers of its own
            unread = [name for name in unread if name != row.name]
            continue
        names = [name for name in (row.name, row.other_name) if name is not None]
        stored = (
            checkpoint.parts(row.module)
            if row.module in checkpoint.linears
            else [name for name in names if checkpoint.has(name)]
        )
        modules = [name.removesuffix(".weight") for name in names]
        named = next(
            (name for name in modules if any(f"{name}|{kind}" in pieces for kind in KINDS)), None
        )
        held = {kind: pieces[f"{named}|{kind}"] for kind in KINDS if f"{named}|{kind}" in pieces}
        known |= {f"{named}|{kind}" for kind in held}
        if held:
            wrong = list(_different(checkpoint, row, held, rank))
        else:  # the MTP layer's copies of embedding and head are the model's own in every engine
            wrong = (
                ["nowhere in the engine"]
                if stored and not (row.mtp and row.role in ("embedding", "head"))
                else []
            )
        found += [f"{row.name}: {fault}" for fault in wrong]
        right |= set() if wrong else set(stored)
    found += [f"{name}: no parameter takes it" for name in unread if name not in right]
    return found + [
        f"{name} is in the engine and not in the checkpoint" for name in sorted(set(pieces) - known)
    ]


def _different_steps(ours, theirs, rank):
    """ours: a step, or those of all heads' channels, of which a rank holds its heads'."""
    if theirs is None:
        return "steps of the cache are nowhere in the engine"
    whole, size = ours.flatten(), theirs.numel()
    parts = whole.numel() // size
    own = whole.narrow(0, rank.number * parts // rank.of * size, size)
    return (
        None
        if _equal(own, theirs.flatten())
        else f"steps {tuple(theirs.shape)} of the cache are not rank {rank.number}'s"
    )


KINDS = ("value", "codes", "zero", "scale", "global", "scale_bias")


def _different(checkpoint, row, held, rank):
    if row.module not in checkpoint.linears:
        name = row.name if checkpoint.has(row.name) else row.other_name
        ours = {"value": checkpoint.read(name)}
    else:
        weight = checkpoint.weight(row.module)
        if isinstance(weight, Tensor):
            ours = {"value": weight}
        elif isinstance(weight, IntWeight) and set(held) == {"value"} and row.role == "kv_b":
            scale = weight.scale.to(held["value"].dtype).float()  # as the engine holds it
            ours = {"value": replace(weight, scale=scale).dequantize(torch.float32)}
        elif isinstance(weight, IntWeight):
            ours = {"codes": weight.codes, "scale": weight.scale}
            if weight.zero_point is not None:
                ours["zero"] = weight.zero_point
        else:
            assert isinstance(weight, Nvfp4Weight), type(weight)
            decoded = torch.tensor(E2M1_VALUES)[weight.codes.long()]
            ours = {"codes": decoded, "scale": weight.scale.float(), "global": weight.global_scale}
    if set(ours) != set(held) - {"scale_bias"}:
        yield f"the engine has {', '.join(held)}; the checkpoint {', '.join(ours)}"
        return
    if "global" in held:
        held = held | {"global": held["global"].reshape(())}
    for kind, tensor in ours.items():
        if not _equal(_share(tensor, held[kind], row, rank), held[kind]):
            yield (
                f"{kind} {tuple(held[kind].shape)} is not rank {rank.number}'s of "
                f"{tuple(tensor.shape)}"
            )
    if "scale_bias" in held:
        sums = (
            _share(ours["codes"], held["codes"], row, rank).sum(1, keepdim=True, dtype=torch.int32)
            * held["scale"]
        )
        if not torch.allclose(8 * sums, held["scale_bias"], rtol=1e-5, atol=1e-4):
            yield "scale_bias is not 8 times the sum of codes and scale"


def _equal(ours, theirs):
    return ours.shape == theirs.shape and torch.equal(ours.to(theirs.dtype), theirs)


def _share(whole, piece, row, rank):
    """The part of `whole` that the rank should hold, cut as large as the piece is. Fewer parts than
    ranks: neighbours share one."""
    table = row.role in (
        "embedding",
        "head",
    )  # by rows in every engine, whatever our own executor does
    for axis, cut in ((0, table or row.split == "column"), (1, row.split == "row")):
        if (
            cut
            and whole.dim() > axis
            and piece.dim() == whole.dim()
            and whole.shape[axis] != piece.shape[axis]
        ):
            size = piece.shape[axis]
            parts = whole.shape[axis] // max(size, 1)
            return (
                whole.narrow(axis, rank.number * parts // rank.of * size, size) if parts else whole
            )
    return whole
