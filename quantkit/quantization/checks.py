"""Validation of the source before the first weight is read."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibrate.embed_and_head import EmbedAndHead
from quantkit.calibrate.source_model import ParameterReader
from quantkit.checkpoint.aux_files import JSON_AUX_FILES, read_aux_files
from quantkit.checkpoint.check import CACHE_SCALES
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json
from quantkit.grids.base import Grid
from quantkit.models import check_missing, is_known
from quantkit.models import tensor_names as by_name_models
from quantkit.models.hf_traced.architecture import TracedArchitecture
from quantkit.models.hf_traced.module_tree import read_tree
from quantkit.models.stored_parameters import check_stored, read_model
from quantkit.models.table import Parameter
from quantkit.quantization.fitting import GROUP_SIZES
from quantkit.tokenizer.chat import ChatTokenizer

DROPPED = {
    r".*\.rotary_emb\.inv_freq": "computed from config.json",
    r"lm_head\.weight": "the embedding once more, to which config.json ties it",
    CACHE_SCALES.pattern: "a scale of a quantized cache; this scheme's cache is 16-bit",
    r".*\.(input_scale|activation_scale)": "a static activation scale of the source's own "
    "quantization",
}
"""Tensors that a source may hold in addition to the parameters, by pattern, and why they are
dropped."""


_NAMED = 6
"""Kinds of tensors listed."""


@dataclass(frozen=True)
class Coverage:
    """share: of the weights outside embeddings and heads, those quantized. left: number of
    unquantized weights, by tensor name with N for numbers, the most first. quantized: number of
    quantized ones."""

    share: float
    left: dict[str, int]
    quantized: int = 0

    def __str__(self) -> str:
        names = [
            f"{name} ({count / 1e6:.3g} M)" for name, count in list(self.left.items())[:_NAMED]
        ]
        more = f" and {len(self.left) - _NAMED} more" if len(self.left) > _NAMED else ""
        count = self.quantized + sum(self.left.values())
        digits = ",.0f" if count >= 10**8 else ".3g"
        return (
            f"{self.quantized / 1e6:{digits}} of {count / 1e6:{digits}} M weights, "
            f"{self.quantized / max(count, 1):.0%}; left at 16 bits: "
            f"{', '.join(names) or 'none'}{more}"
        )


def coverage(
    rows: Iterable[Parameter], quantized: Collection[str], config: dict[str, Any]
) -> Coverage:
    """quantized: modules that the output holds packed. config: config.json, whose vocab_size
    identifies embeddings and heads."""
    vocab = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    total, taken, left = 0, 0, Counter[str]()
    for row in rows:
        count = math.prod(row.shape)
        if len(row.shape) < 2:
            continue
        if row.module in quantized:
            taken += count
        else:
            left[re.sub(r"\.\d+(?=\.|$)", ".N", row.name)] += count
        total += count if row.shape[0] != vocab or row.module in quantized else 0
    return Coverage(taken / total if total else 0.0, dict(left.most_common()), taken)


@dataclass(frozen=True)
class Inventory:
    """The source compared with its architecture's table. described: config.json of the output,
    apart from its quantization. rows: resolved parameters. dropped: tensor -> reason. note: a
    remark for the user: how linears were identified without a table, or which layers of config.json
    are not stored. cut: the source with stacked experts split into single tensors, if it has
    any."""

    architecture: Any
    config: Any
    described: Mapping[str, Any]
    rows: list[Parameter]
    dropped: dict[str, str]
    note: str = ""
    cut: Checkpoint | None = None

    @property
    def by_name(self) -> bool:
        """Whether quantkit has no file for this architecture."""
        return self.architecture is by_name_models or isinstance(
            self.architecture, TracedArchitecture
        )

    def embed_and_head(self, source: ParameterReader) -> EmbedAndHead | None:
        """Embedding and head, if the table does not define them."""
        if not isinstance(self.architecture, TracedArchitecture):
            return None
        return self.architecture.embed_and_head(source.checkpoint.read, source.device)


def take_inventory(checkpoint: Checkpoint, *, calibrated: bool = True) -> Inventory:
    """Check that every tensor of the source is a parameter of the right shape, or dropped for a
    known reason. Raises QuantkitError otherwise.

    An architecture without a file in quantkit is computed by transformers' modules; a run without
    calibration only needs its linears, identified by these modules or by name.
    """
    rounded = QuantkitError(
        f"{checkpoint.path} is already quantized ({checkpoint.format.name}, by its config.json)",
        "quantize the model it was made from, not a rounded copy",
    )
    if not checkpoint.is_source:
        raise rounded
    check_missing(checkpoint.config, checkpoint.tensors)
    if not is_known(checkpoint.config):
        return _watched_inventory(checkpoint) if calibrated else _inventory_by_name(checkpoint)
    model = read_model(checkpoint)
    check_stored(checkpoint, model.rows)
    packed = (row for row in model.rows if row.module in checkpoint.linears)
    if not checkpoint.format.is_source and any(row.expert is None for row in packed):
        raise rounded
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
    """Check the tokenizer and auxiliary files: after hours of work an output without a tokenizer
    would be useless.

    calibrated: a tokenizer must be there.
    """
    read_aux_files(path)
    for name in JSON_AUX_FILES:
        if is_there(path / name):
            read_json(path / name, LARGEST)
    if calibrated or is_there(path / "tokenizer.json"):
        ChatTokenizer(path)


def check_length(inventory: Inventory, seq_len: int) -> None:
    """Raise QuantkitError if the calibration sequences are too long: some layers can only be
    calibrated on short ones, and some models have a maximum length."""
    if isinstance(inventory.architecture, TracedArchitecture):
        inventory.architecture.skeleton.check_length(seq_len)
    longest = inventory.config.max_independent_tokens
    if longest is not None and seq_len > longest:
        note = (
            f"sequences of {seq_len} tokens are requested, and layers that share an indexer can be "
            f"calibrated on {longest} at most"
        )
        raise QuantkitError(
            note,
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
    """Of every tensor except scales of packed ones, by name."""
    packed = {name for module in checkpoint.linears for name in checkpoint.parts(module)}
    shapes = {f"{module}.weight": tuple(checkpoint.shape(module)) for module in checkpoint.linears}
    return shapes | {
        name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in packed
    }


def _inventory_by_name(checkpoint: Checkpoint) -> Inventory:
    tree = read_tree(checkpoint.config)
    cut = checkpoint.split_stacks(tree.stacks)
    note = (
        "linears are identified by name, and those whose inputs 32 divides are quantized: "
        f"{tree.why}"
        if tree.linears is None
        else "linears are identified by transformers' modules"
    )
    rows = by_name_models.parameters(_logical_shapes(cut), tree.linears)
    return Inventory(
        by_name_models, by_name_models.Config(), checkpoint.config, rows, {}, note, cut
    )


def _reason(name: str) -> str:
    return next((reason for pattern, reason in DROPPED.items() if re.fullmatch(pattern, name)), "")


def check_given_groups(rows: Sequence[Parameter], grids: Mapping[str, Grid]) -> None:
    """Raise QuantkitError if a group size that the user chose does not divide the inputs of a
    linear of `rows`."""
    for row in rows:
        size = grids[row.module].group_size
        if size is None or row.shape[1] % size == 0:
            continue
        smaller = (
            one for one in GROUP_SIZES if one < size and all(r.shape[1] % one == 0 for r in rows)
        )
        fault = (
            f"group size {size} does not divide the {row.shape[1]} input channels of {row.module}"
        )
        advice = next((f"give --group-size {one}, or leave it out" for one in smaller), None)
        raise QuantkitError(
            fault,
            advice
            or "leave --group-size out, or the recipe's: every linear then gets what fits it",
        )
