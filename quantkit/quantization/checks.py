"""Everything that can be known to be wrong before the first weight is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibrate.embed_and_head import EmbedAndHead
from quantkit.calibrate.source_model import ParameterReader
from quantkit.checkpoint.aux_files import JSON_AUX_FILES, read_aux_files
from quantkit.checkpoint.check import CACHE_SCALES
from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json
from quantkit.grids.base import Grid
from quantkit.grids.schemes import Scheme
from quantkit.models import check_missing, is_known
from quantkit.models import tensor_names as by_name_models
from quantkit.models.hf_traced.architecture import TracedArchitecture
from quantkit.models.module_tree import read_tree
from quantkit.models.stored_parameters import check_stored, read_model
from quantkit.models.table import Parameter
from quantkit.tokenizer.chat import ChatTokenizer

DROPPED = {
    r".*\.rotary_emb\.inv_freq": "computed from config.json",
    r"lm_head\.weight": "the embedding once more, to which config.json ties it",
    CACHE_SCALES.pattern: "a scale of a quantized cache; this scheme's cache is 16-bit",
    r".*\.(input_scale|activation_scale)": "a static activation scale of the source's own "
    "quantization",
}
"""Tensors that a source may hold beside the parameters, by pattern, and why the output does not
have them."""


@dataclass(frozen=True)
class Inventory:
    """The source against its architecture's table. described: config.json as the output has it, but
    for its quantization. rows: resolved
    parameters. dropped: tensor -> reason. told: what to say of it: how linears were told where
    there is no table, or which layers that config.json promises are not stored. cut: the source
    with stacked experts as tensors of their own, where it has such."""

    architecture: Any
    config: Any
    described: Mapping[str, Any]
    rows: list[Parameter]
    dropped: dict[str, str]
    told: str = ""
    cut: Checkpoint | None = None

    @property
    def by_name(self) -> bool:
        """Of an architecture that quantkit has no file for."""
        return self.architecture is by_name_models or isinstance(
            self.architecture, TracedArchitecture
        )

    def embed_and_head(self, source: ParameterReader) -> EmbedAndHead | None:
        """What is around the layers, where the table does not say it."""
        if not isinstance(self.architecture, TracedArchitecture):
            return None
        return self.architecture.embed_and_head(source.checkpoint.read, source.device)


def take_inventory(checkpoint: Checkpoint, *, calibrated: bool = True) -> Inventory:
    """Every tensor of the source is a parameter of the right shape, or dropped for a known reason.
    Raises QuantkitError otherwise.

    An architecture that quantkit has no file for is computed by transformers' modules; for a run
    that is not `calibrated` it is enough to know its linears, by these modules or by name.
    """
    if not checkpoint.format.is_source:
        raise QuantkitError(
            f"{checkpoint.path} is already quantized ({checkpoint.format.name}, by its config.json)",
            "quantize the model it was made from, not a rounded copy",
        )
    if not is_known(checkpoint.config):
        check_missing(checkpoint.config, checkpoint.tensors)
        return _watched_inventory(checkpoint) if calibrated else _inventory_by_name(checkpoint)
    model = read_model(checkpoint)
    check_stored(checkpoint, model.rows)
    owned = {
        name
        for row in model.rows
        for name in (
            checkpoint.parts(row.module) if row.module in checkpoint.linears else (row.name,)
        )
    }
    dropped = {name: _reason(name) for name in checkpoint.tensors if name not in owned}
    unknown = sorted(name for name, reason in dropped.items() if not reason)
    if unknown:
        raise QuantkitError(
            f"{checkpoint.path} holds {len(unknown)} tensors that its config.json has no place "
            f"for, such as {unknown[0]}",
            "the model may be a variant that quantkit does not compute: use a supported one",
        )
    return Inventory(
        model.architecture, model.config, model.effective_config, model.rows, dropped, model.warning
    )


def check_companions(path: Path, *, calibrated: bool) -> None:
    """The files that go with the weights are what their names say: hours later an output without a
    tokenizer would be of no use.

    calibrated: a tokenizer must be there.
    """
    read_aux_files(path)
    for name in JSON_AUX_FILES:
        if is_there(path / name):
            read_json(path / name, LARGEST)
    if calibrated or is_there(path / "tokenizer.json"):
        ChatTokenizer(path)


def check_length(inventory: Inventory, seq_len: int) -> None:
    """Layers are calibrated one by one, which some can be on short texts only; and some models have
    no places for longer ones."""
    if isinstance(inventory.architecture, TracedArchitecture):
        inventory.architecture.skeleton.check_length(seq_len)
    longest = inventory.config.max_independent_tokens
    if longest is not None and seq_len > longest:
        told = (
            f"texts of {seq_len} tokens are asked for, and layers that share an indexer can be "
            f"calibrated on {longest} at most"
        )
        raise QuantkitError(
            told,
            f"use --seq-len {longest} or less, or --scheme rtn-w4a16, which needs no calibration",
        )


def _watched_inventory(checkpoint: Checkpoint) -> Inventory:
    try:
        architecture = TracedArchitecture(checkpoint.config)
        cut = checkpoint.split_stacks(architecture.stacks)
        rows = architecture.parameters(_logical_shapes(cut))
    except QuantkitError as fault:
        raise QuantkitError(
            f"{checkpoint.path / 'config.json'}: {fault.problem}", fault.remedy
        ) from fault
    return Inventory(
        architecture, architecture.config, checkpoint.config, rows, {}, architecture.summary, cut
    )


def _logical_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Of every tensor but the scales of packed ones, by name."""
    packed = {name for module in checkpoint.linears for name in checkpoint.parts(module)}
    shapes = {f"{module}.weight": tuple(checkpoint.shape(module)) for module in checkpoint.linears}
    return shapes | {
        name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in packed
    }


def _inventory_by_name(checkpoint: Checkpoint) -> Inventory:
    tree = read_tree(checkpoint.config)
    cut = checkpoint.split_stacks(tree.stacks)
    told = (
        f"linears are told by their names alone, and are those whose inputs 128 divides: {tree.why}"
        if tree.linears is None
        else "linears are told by transformers' modules"
    )
    rows = by_name_models.parameters(_logical_shapes(cut), tree.linears)
    return Inventory(
        by_name_models, by_name_models.Config(), checkpoint.config, rows, {}, told, cut
    )


def _reason(name: str) -> str:
    return next((reason for pattern, reason in DROPPED.items() if re.fullmatch(pattern, name)), "")


GROUP_SIZES = (128, 64, 32)
"""Of int4, that engines have kernels for."""


def in_whole_groups(linears: list[Parameter], scheme: Scheme) -> list[Parameter]:
    """Linears of an architecture without a table, less those that the scheme's groups do not
    divide: experts all or none, for engines hold them in one tensor."""
    odd = [
        row
        for row in linears
        if not _divides(scheme.grid(expert=row.expert is not None, mtp=row.mtp), row)
    ]
    without_experts = any(row.expert is not None for row in odd)
    left = {row.name for row in odd}
    return [
        row
        for row in linears
        if row.name not in left and not (without_experts and row.expert is not None)
    ]


def finer_group(rows: list[Parameter], scheme: Scheme) -> int | None:
    """The largest group size below the scheme's that divides every linear; None where there is
    none, or no linear needs it."""
    grid = scheme.weight
    linears = [row for row in rows if row.role in ("linear", "kv_b")]
    if (
        grid.group_size is None
        or grid.with_group_size(grid.group_size) is None
        or all(_divides(grid, row) for row in linears)
    ):
        return None
    finer = (grid.with_group_size(size) for size in GROUP_SIZES if size < grid.group_size)
    return next(
        (
            one.group_size
            for one in finer
            if one is not None and all(_divides(one, row) for row in linears)
        ),
        None,
    )


def _divides(grid: Grid, row: Parameter) -> bool:
    return grid.group_size is None or row.shape[1] % grid.group_size == 0


def check_groups(
    rows: list[Parameter], scheme: Scheme, grids: Mapping[str, Grid], format: Format
) -> None:
    """The group size divides the input channels of every linear that will be quantized, and the
    format can hold its shape."""
    if scheme.outside is not None and all(row.expert is None for row in rows):
        raise QuantkitError(
            f"{scheme.name} is for routed experts, and the model has none",
            "use int8-a8w8c16, or a scheme of 4 bits for all",
        )
    for row in rows:
        if row.module not in grids:
            continue
        grid = grids[row.module]
        if not _divides(grid, row):
            smaller = finer_group(rows, scheme)
            fault = (
                f"group size {grid.group_size} does not divide the {row.shape[1]} input "
                f"channels of {row.module}"
            )
            raise QuantkitError(
                fault,
                f"give --group-size {smaller}"
                if smaller
                else "use --scheme int8-a8w8c16, which has no groups",
            )
        format.specs(row.module, (row.shape[0], row.shape[1]), grid)
        if told := format.split_fault(row.module, grid, row_parallel=row.split == "row"):
            raise QuantkitError(
                f"{format.name} cannot hold {row.module} for engines: {told}",
                "choose another format or scheme",
            )
