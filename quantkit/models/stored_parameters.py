"""A model's parameter table compared with the tensors in a checkpoint's headers."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.models import find_architecture, find_block_head
from quantkit.models.architecture import Architecture, ModelConfig
from quantkit.models.mtp import DSPARK
from quantkit.models.table import Parameter, resolve
from quantkit.models.tensor_names import has_linear_suffix

_SMALL_TABLE = 10_000
"""Tables up to this size are built whatever the headers hold, so that missing tensors of a small
checkpoint can be listed."""
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
"""config.json's names of the number of MTP layers."""
_WRAPPERS = (
    r"(?:(?:module|_orig_mod|base_model|transformer|language_model|text_model|thinker|llm|backbone|"
    r"decoder|model)\.)*"
)
"""Modules that writers put around a decoder, in any order and number."""
_OTHER_NAMES: tuple[tuple[str, str], ...] = (
    (rf"^{_WRAPPERS}(?=layers\.|embed_tokens\.|norm\.)", "model."),
    (rf"^{_WRAPPERS}(?=lm_head\.)", ""),
    (r"\.base_layer\.", "."),
    (r"\._orig_mod\.", "."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.attention\.", ".self_attn."),
)
"""Tensor name spellings of other writers, and the published ones."""

_OTHER_NAME = re.compile("|".join(pattern for pattern, _ in _OTHER_NAMES))


@dataclass(frozen=True)
class Model:
    """A checkpoint's architecture, its Config, and its parameters as the checkpoint spells them.

    effective_config: config.json with the number of MTP layers that are stored. warning: where
    config.json has more of them, or fewer layers than are stored; else empty.
    """

    architecture: Architecture[ModelConfig]
    config: ModelConfig
    rows: list[Parameter]
    effective_config: dict[str, Any] = field(repr=False)
    warning: str = ""


def read_model(checkpoint: Checkpoint) -> Model:
    """The table of a checkpoint, without MTP layers of which no tensor is stored: transformers
    keeps their number in config.json and drops their weights. Raises QuantkitError naming
    config.json where a field is wrong, or describes a far larger model than is stored; and where a
    linear is unquantized and not listed so (`check_listed`)."""
    effective_config = checkpoint.config
    warnings: list[str] = []
    try:
        architecture = find_architecture(checkpoint.config)
        config = architecture.Config.from_dict(checkpoint.config)
        check_size(config, len(checkpoint.tensors))
    except QuantkitError as fault:
        file = str(checkpoint.path / "config.json")
        raise QuantkitError(
            fault.problem.replace("config.json", file, 1)
            if "config.json" in fault.problem
            else f"{file}: {fault.problem}",
            fault.remedy,
        ) from fault
    rows = resolve(architecture.parameters(config), checkpoint.tensors)
    if not config.copied_prefixes and (missing := _missing_mtp_layers(checkpoint, rows)):
        stored = config.num_nextn_predict_layers - len(missing)
        counts = {name: stored for name in _MTP_COUNTS if name in effective_config}
        effective_config = effective_config | counts
        config = architecture.Config.from_dict(effective_config)
        rows = [row for row in rows if row.layer not in missing]
        warnings.append(
            f"config.json of {checkpoint.path} promises MTP {_layers(missing)}, of which no tensor "
            "is stored: left out"
        )
    if extra := _extra_layers(checkpoint, rows):
        warnings.append(
            f"{checkpoint.path} stores {_layers(extra)}, and its config.json has "
            f"{config.num_hidden_layers} layers and {config.num_nextn_predict_layers} for MTP: the "
            "others are left out"
        )
    if config.copied_prefixes:
        rows = _without_other_drafts(checkpoint, rows, config.copied_prefixes)
        head = block_head_rows(checkpoint.config, config, checkpoint.tensors)
        if all(is_stored(checkpoint, row) for row in head):  # copied with what it lacks
            rows += head
        rows += _copied_rows(checkpoint, config.copied_prefixes, {row.name for row in rows})
    check_listed(checkpoint, rows)
    return Model(architecture, config, rows, effective_config, "; ".join(warnings))


def _missing_mtp_layers(checkpoint: Checkpoint, rows: list[Parameter]) -> list[int]:
    """The last MTP layers, of which no tensor is stored. If a later layer is stored, a shard is
    missing instead; models whose MTP layers may be of another kind use `_without_other_drafts`."""
    own = {row.layer: _prefix(row) for row in rows if row.mtp and row.layer is not None}
    stored = {
        layer
        for layer, prefix in own.items()
        if any(name.startswith(prefix) for name in checkpoint.tensors)
    }
    return [layer for layer in sorted(own) if layer > max(stored, default=-1)]


def _prefix(row: Parameter) -> str:
    """Prefix of the names of all tensors of a row's layer."""
    return row.module.removesuffix(row.within_layer)


def _extra_layers(checkpoint: Checkpoint, rows: list[Parameter]) -> list[int]:
    """Stored layers without a row, recognized by the layer numbers in tensor names."""
    own = {row.layer: _prefix(row) for row in rows if row.layer is not None}
    stems = tuple(
        {
            prefix.removesuffix(f"{layer}.")
            for layer, prefix in own.items()
            if prefix.endswith(f".{layer}.")
        }
    )
    found: set[int] = set()
    for name in checkpoint.tensors:
        if stem := next((stem for stem in stems if name.startswith(stem)), ""):
            number = name[len(stem) :].partition(".")[0]
            if number.isdecimal() and int(number) not in own:
                found.add(int(number))
    return sorted(found)


def _layers(numbers: list[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]}"


def _without_other_drafts(
    checkpoint: Checkpoint, rows: list[Parameter], prefixes: tuple[str, ...]
) -> list[Parameter]:
    """The rows without MTP layers that may be missing, and are: transformers writes none, others
    publish draft models of another kind."""
    own = {row.layer for row in rows if row.role == "mtp_proj" and is_stored(checkpoint, row)}
    return [
        row for row in rows if not row.mtp or not row.name.startswith(prefixes) or row.layer in own
    ]


def _copied_rows(
    checkpoint: Checkpoint, prefixes: tuple[str, ...], known: set[str]
) -> list[Parameter]:
    """Rows of another model in the checkpoint, whose tensors have one of the prefixes and are not
    in the table. A packed linear is one row, and is copied dequantized."""
    packed = {name for linear in checkpoint.linears.values() for name in linear.tensors}
    found = [
        Parameter(one.name, one.shape, "copied")
        for one in checkpoint.tensors.values()
        if one.name not in packed
    ]
    found += [
        Parameter(f"{module}.weight", linear.shape, "copied")
        for module, linear in checkpoint.linears.items()
    ]
    return [row for row in found if row.name.startswith(prefixes) and row.name not in known]


def check_listed(checkpoint: Checkpoint, rows: Iterable[Parameter]) -> None:
    """Raise QuantkitError where a linear is stored unquantized but missing from the checkpoint's
    list of unquantized modules: engines trust the list and would load garbage. A tensor without a
    row is judged by its name."""
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if ignored is None:
        return
    by_module = {row.module: row for row in rows}
    for name in checkpoint.tensors:
        module = name.removesuffix(".weight")
        row = by_module.get(module)
        is_linear = (
            has_linear_suffix(name) if row is None else row.role in ("linear", "kv_b", "indexer")
        )
        if is_linear and module not in checkpoint.linears and not ignored(module):
            raise QuantkitError(
                f"{module} is unquantized, but {checkpoint.description_file} does not list it so",
                "add it to the list",
            )


def check_size(config: ModelConfig, stored: int) -> None:
    """Raise QuantkitError, before the table is built, where config.json describes a far larger
    model than `stored` tensors: a table has several rows per layer, and three per expert."""
    layers, routing = config.num_hidden_layers + config.num_nextn_predict_layers, config.routing
    experts = routing.n_routed_experts if routing else 0
    with_experts = sum(config.is_moe(layer) for layer in range(layers)) if experts else 0
    if layers + with_experts * experts > max(stored, _SMALL_TABLE):
        sizes = (
            f"num_hidden_layers = {config.num_hidden_layers}, num_nextn_predict_layers = "
            f"{config.num_nextn_predict_layers}"
        )
        sizes += f" and {experts} experts a layer" if experts else ""
        raise QuantkitError(
            f"config.json has {sizes}, and the checkpoint holds {stored} tensors",
            "use the config.json of these weights",
        )


def usual_name(name: str) -> str:
    """A tensor's name in the spelling of published checkpoints, if it has a known other one."""
    if _OTHER_NAME.search(name) is None:
        return name
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def check_stored(checkpoint: Checkpoint, rows: Iterable[Parameter]) -> None:
    """Raise QuantkitError naming the first parameter that is not stored, or has another shape than
    config.json implies."""
    for row in rows:
        if not is_stored(checkpoint, row):
            for name in checkpoint.tensors:
                is_row = usual_name(name) in (usual_name(row.name), row.other_name)
                if is_row or name.endswith(f".{row.name}"):
                    raise QuantkitError(
                        f"{checkpoint.path} has {name} where {row.name} is expected",
                        f"quantkit check {checkpoint.path} --repair OUT writes a copy with the "
                        "usual names",
                    )
            raise QuantkitError(
                f"{checkpoint.path / 'config.json'} asks for a model of which {checkpoint.path} "
                f"lacks {row.name}",
                "download the missing shard, or use the config.json of these weights",
            )
        shape = stored_shape(checkpoint, row)
        if shape != row.shape:
            tensor = (
                checkpoint.parts(row.module)[0] if row.module in checkpoint.linears else row.name
            )
            raise QuantkitError(
                f"{row.name} in {checkpoint.path / checkpoint.tensors[tensor].shard} has shape "
                f"{list(shape)}, and its config.json makes it {list(row.shape)}",
                "use the model's own config.json",
            )


def block_head_rows(
    config_json: Mapping[str, Any], config: ModelConfig, names: Container[str]
) -> list[Parameter]:
    """Tensors of a head that drafts blocks (dspark.py), of stored ones of these names; none
    without."""
    module = find_block_head(config_json) if DSPARK in names else None
    return [] if module is None else resolve(module.head_parameters(config), names)


def is_stored(checkpoint: Checkpoint, row: Parameter) -> bool:
    return row.module in checkpoint.linears or checkpoint.has(row.name)


def stored_shape(checkpoint: Checkpoint, row: Parameter) -> tuple[int, ...]:
    """The logical shape of a stored parameter, packed or not."""
    return (
        checkpoint.shape(row.module)
        if row.module in checkpoint.linears
        else checkpoint.tensors[row.name].shape
    )


def check_stored_head(checkpoint: Checkpoint, rows: Iterable[Parameter]) -> None:
    """Raises QuantkitError where a stored head, for which the table of a tied model has no row,
    differs from the embedding.

    Engines disagree on such a checkpoint: transformers computes with the stored head, vLLM with the
    embedding.
    """
    roles = {row.role: row.name for row in rows if not row.mtp}
    stored, embedding = f"{HEAD}.weight", roles.get("embedding")
    if "head" in roles or embedding is None or not checkpoint.has(stored):
        return
    if not torch.equal(checkpoint.read(stored), checkpoint.read(embedding)):
        raise QuantkitError(
            f"{stored} in {checkpoint.path} differs from {embedding}, to which config.json ties it",
            'set "tie_word_embeddings": false in config.json',
        )
