"""The changes that a repaired copy has: names, index, description, lists, zero points, global
scales, what can be restored from the source, and entries that an engine needs in addition.

The latter are rules of the engine's profile (recipes/engines): keys with a fixed value, keys under
the names of another release, keys that the loader reads at the top of the description, and modules
under the engine's own names.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.linear_solver import LinearSolver
from quantkit.calibrate.recipe import load_recipe
from quantkit.checkpoint.aux_files import AUX_FILES
from quantkit.checkpoint.formats.base import HEAD, SLIM_FILES
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.model_files import read_file
from quantkit.common.result import JsonObject
from quantkit.diagnosis.description import OPT_FILE
from quantkit.diagnosis.diagnose import Diagnosis, ExaminedCheckpoint
from quantkit.diagnosis.survey import Survey
from quantkit.engines.check import find_load
from quantkit.engines.profiles import LoadRule, MixtureRule, find_engine
from quantkit.grids.base import Grid, dequantize
from quantkit.models.pangu_ultra_moe import OTHER_RELEASE_NAMES
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter


@dataclass(frozen=True)
class AddedTensors:
    """Tensors that the checkpoint lacks. make: all of `specs`, by name."""

    specs: list[TensorSpec]
    make: Callable[[], dict[str, Tensor]]


@dataclass
class Repair:
    """changes: as text. config, files: new contents. changed: tensors with new values of the same
    shape and dtype."""

    config: JsonObject
    files: dict[str, bytes]
    changes: list[str] = field(default_factory=list)
    changed: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    added: list[AddedTensors] = field(default_factory=list)


def plan_changes(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint | None) -> None:
    examined, has = diagnosis.examined, diagnosis.findings.has
    if has("names-wrong"):
        plan.changes.append(
            f"{len(examined.survey.renamed)} tensors were renamed to what engines expect"
        )
    if has("index-wrong", "index-missing"):
        plan.changes.append("the index was rewritten from the shards")
    if has("shards-disagree"):
        dropped = sorted({other.shard for _, other in examined.survey.copies})
        plan.changes.append(
            f"tensors that two shards hold were removed from {', '.join(dropped)}: the "
            "index names the other shard"
        )
    if has("description-old-key"):
        plan.changes.append("the description in config.json is under quantization_config only")
    if has("group-size-wrong"):
        _set_group_size(examined, plan)
    if has("listed-but-quantized", "plain-not-listed", "list-matches-nothing"):
        rewritten = _set_lists(examined, plan)
        if has("listed-but-quantized"):
            _set_targets(plan, rewritten)
    if has("zero-points-off"):
        _fix_zero_points(examined, plan)
    if has("global-scale-inverted"):
        _invert_global_scales(examined, plan)
    if has("mtp-not-announced"):
        _announce_mtp(examined, plan)
    if origin is not None:
        _restore_settings(diagnosis, plan, origin)
        _restore_tensors(diagnosis, plan, origin)


def _set_group_size(examined: ExaminedCheckpoint, plan: Repair) -> None:
    block, size = _block(plan), examined.description.corrections["group_size"]
    groups = [
        one["weights"]
        for one in (block.get("config_groups") or {}).values()
        if isinstance(one, dict) and one.get("weights")
    ]
    for holder in groups or [block]:
        holder["group_size"] = size
        if holder.get("strategy") == "channel":
            holder["strategy"] = "group"
    plan.changes.append(f"group_size in config.json is {size}")


def _block(plan: Repair) -> JsonObject:
    """A mutable copy of quantization_config."""
    found: JsonObject = copy.deepcopy(plan.config.get("quantization_config") or {})
    plan.config["quantization_config"] = found
    return found


def _set_lists(examined: ExaminedCheckpoint, plan: Repair) -> JsonObject:
    """Write the list of unquantized modules for what is stored, in the format's own form; returns
    the whole description that the format would write."""
    description, survey = examined.description, examined.survey
    assert description.format is not None
    quantized = {
        module: linear.grid
        for module, linear in description.linears.items()
        if linear.format is description.format
    }
    parts = {name for linear in description.linears.values() for name in linear.tensors}
    unquantized: list[TensorSpec] = [
        tensor for name, tensor in survey.tensors.items() if name not in parts
    ]
    rewritten = description.format.config_block(description.grid, quantized, unquantized)
    for key in ("ignore", "modules_to_not_convert", "dynamic"):
        if key in rewritten and survey.config.get("quantization_config"):
            _block(plan)[key] = rewritten[key]
        elif key in (survey.config.get("quantization_config") or {}):
            del _block(plan)[key]
    for name, content in description.format.extra_files(
        description.grid, quantized, unquantized
    ).items():
        if name in survey.side:
            plan.files[name] = content
    if rewritten or survey.side:
        plan.changes.append("the list of unquantized modules was rewritten from what is stored")
    return rewritten


def _set_targets(plan: Repair, rewritten: JsonObject) -> None:
    """A single group targets all linears except the listed ones; with several groups the targets
    are unknown."""
    groups = (plan.config.get("quantization_config") or {}).get("config_groups")
    whole = rewritten.get("config_groups")
    if not isinstance(groups, dict) or whole is None or len(groups) != 1 or len(whole) != 1:
        return
    (number,), (wanted,) = groups, whole.values()
    if groups[number].get("targets") != wanted["targets"]:
        _block(plan)["config_groups"][number]["targets"] = wanted["targets"]
        plan.changes.append(f"{number} in config.json targets {', '.join(wanted['targets'])}")


def _fix_zero_points(examined: ExaminedCheckpoint, plan: Repair) -> None:
    """GPTQ's two versions differ only in the description; in other formats the stored zero points
    are changed."""
    description, offsets = examined.description, examined.offsets
    format = description.format
    says_v2 = isinstance(format, Gptq) and format.checkpoint_format == "gptq_v2"
    every = len(offsets) * 2 > len(description.linears) and all(
        (offset > 0) == says_v2 for offset in offsets.values()
    )
    if isinstance(format, Gptq) and every:
        version = _block(plan)["checkpoint_format"] = "gptq" if says_v2 else "gptq_v2"
        plan.changes.append(
            f"checkpoint_format in config.json is {version}, as the zero points are stored"
        )
        return
    for name, module in _parts(examined, offsets, ".qzeros", ".weight_zero_point").items():
        grid, step = description.linears[module].grid, 1 if offsets[module] > 0 else -1
        assert grid is not None
        plan.changed[name] = partial(_shifted, examined.survey, name, step, grid.bits)
    if plan.changed:
        plan.changes.append(f"zero points of {len(plan.changed)} linears were shifted by one")


def _parts(examined: ExaminedCheckpoint, modules: Iterable[str], *endings: str) -> dict[str, str]:
    """The modules' tensors with one of these endings, each with its module."""
    linears = examined.description.linears
    named = ((name, module) for module in modules for name in linears[module].tensors)
    return {name: module for name, module in named if name.endswith(endings)}


def _shifted(survey: Survey, name: str, step: int, bits: int) -> Tensor:
    """Packed zero points of so many bits, each `step` more."""
    words, places = survey.shards.read(survey.tensors[name]).long(), range(0, 32, bits)
    moved = [((words >> place) + step) % 2**bits << place for place in places]
    packed = torch.stack(moved).sum(0)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _invert_global_scales(examined: ExaminedCheckpoint, plan: Repair) -> None:
    names = _parts(examined, examined.inverted, ".weight_scale_2", ".weight_global_scale")
    for name in names:
        plan.changed[name] = partial(_reciprocal, examined.survey, name)
    plan.changes.append(f"global scales of {len(names)} linears were inverted")


def _reciprocal(survey: Survey, name: str) -> Tensor:
    return survey.shards.read(survey.tensors[name]).reciprocal()


def _announce_mtp(examined: ExaminedCheckpoint, plan: Repair) -> None:
    layers = plan.config["num_hidden_layers"]
    numbers = {
        int(name.split(".")[2])
        for name in examined.survey.tensors
        if name.startswith("model.layers.")
    }
    plan.config["num_nextn_predict_layers"] = max(numbers) + 1 - layers
    plan.changes.append(
        f"num_nextn_predict_layers in config.json is {plan.config['num_nextn_predict_layers']}"
    )


def set_engine_keys(engine: str, examined: ExaminedCheckpoint, plan: Repair) -> None:
    """For the checkpoint after the planned changes: shapes and names are those of the current
    tensors."""
    survey = examined.survey
    side = {
        name: json.loads(plan.files[name]) if name in plan.files else value
        for name, value in survey.side.items()
    }
    found = missing_keys(
        engine, Checkpoint(survey.path, copy.deepcopy(plan.config), side, survey.tensors)
    )
    plan.config |= found.config
    if found.block:
        _block(plan).update(found.block)
    if found.listed:
        _extend_lists(examined, plan, found.listed, [])
    plan.changes += [f"for {engine}, {change}" for change in found.changes]


def _restore_settings(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint) -> None:
    has = diagnosis.cured_by_source
    if has("config-differs"):
        own_keys = (
            "quantization_config",
            "torch_dtype",
            "dtype",
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "transformers_version",
        )
        own = {key: plan.config[key] for key in own_keys if key in plan.config}
        plan.config = {
            key: value for key, value in origin.config.items() if key not in own_keys
        } | own
        plan.changes.append(
            "config.json is the source's, with its own quantization_config and dtype"
        )
    if has("class-wrong", "class-missing") and origin.config.get("architectures"):
        plan.config["architectures"] = origin.config["architectures"]
        plan.changes.append("architectures in config.json is the source's")
    if has("tokenizer-broken", "tokenizer-missing", "tokenizer-differs", "tokenizer-too-large", "template-missing", "template-broken",
           "template-differs", "template-foreign", "eos-outside", "eos-lost", "eos-differs", "token-outside", "sampling-wrong",
           "sampling-differs", "special-token-unknown", "text-cut"):  # fmt: skip
        restored = [
            name for name in AUX_FILES if (origin.path / name).is_file() and name != "LICENSE"
        ]
        if has(
            "template-broken", "template-differs", "template-foreign"
        ):  # a separate template file takes precedence over tokenizer_config.json
            plan.files = {
                name: content
                for name, content in plan.files.items()
                if not name.startswith("chat_template.")
            }
        plan.files |= {name: read_file(origin.path / name) for name in restored}
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if key in origin.config:
                plan.config[key] = origin.config[key]
        plan.changes.append(
            f"{', '.join([*restored, 'the end-of-text tokens in config.json'])} are the source's"
        )


def _restore_tensors(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint) -> None:
    """Add a missing head and missing MTP layers from the source, in BF16 if they are quantized
    there, and list them as unquantized."""
    examined, has = diagnosis.examined, diagnosis.findings.has
    stored = set(examined.survey.tensors) | {
        f"{module}.weight" for module in examined.description.linears
    }
    source_rows = (
        [row for row in diagnosis.source.structure.rows if row.name not in stored]
        if diagnosis.source is not None
        else []
    )
    untied = examined.survey.config.get("tie_word_embeddings") and not plan.config.get(
        "tie_word_embeddings"
    )
    among = examined.structure.missing if has("head-missing") else source_rows if untied else []
    wanted = [row for row in among if row.role == "head" and not row.mtp]
    if has("mtp-missing", "mtp-incomplete"):
        wanted += [row for row in source_rows if row.mtp]
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            if key in origin.config:
                plan.config[key] = origin.config[key]
    wanted = [row for row in wanted if origin.has(row.name) or row.module in origin.linears]
    quantized = _modules_to_quantize(examined, wanted)
    unquantized = [row for row in wanted if row.module not in quantized]
    plan.added += [_unquantized(origin, row) for row in unquantized]
    fused: dict[str, list[Parameter]] = {}  # siblings share an FP4 global scale
    for row in wanted:
        if row.module in quantized:
            fused.setdefault(row.fused or row.module, []).append(row)
    plan.added += [_round_to_nearest(examined, origin, rows) for rows in fused.values()]
    if wanted:
        _extend_lists(
            examined,
            plan,
            [row.module for row in unquantized if len(row.shape) == 2],
            sorted(quantized),
        )
        plan.changes.append(
            f"{len(wanted)} tensors are the source's, such as {wanted[0].name}; "
            f"{len(quantized)} of them were quantized as the others are"
        )


def _modules_to_quantize(examined: ExaminedCheckpoint, wanted: list[Parameter]) -> set[str]:
    """Modules whose counterparts in the main layers are quantized, if the format supports that
    without calibration."""
    description = examined.description
    format = description.format
    kinds = {
        (row.projection, row.block)
        for row in examined.structure.rows
        if row.module in description.linears and not row.mtp
    }
    if format is None or description.grid is None or description.grid.has_input_scales:
        return set()
    return {
        row.module
        for row in wanted
        if row.role == "linear"
        and (row.projection, row.block) in kinds
        and format.quantizes(row.module, row.role, mtp=row.mtp)
    }


def _unquantized(origin: Checkpoint, row: Parameter) -> AddedTensors:
    packed = row.module in origin.linears
    dtype = torch.bfloat16 if packed else origin.tensors[row.name].dtype

    def make() -> dict[str, Tensor]:
        stored = dequantize(origin.weight(row.module), dtype) if packed else origin.read(row.name)
        return {row.name: stored}

    return AddedTensors([TensorSpec(row.name, dtype, row.shape)], make)


def _round_to_nearest(
    examined: ExaminedCheckpoint, origin: Checkpoint, rows: list[Parameter]
) -> AddedTensors:
    """Rounded to nearest on the grid of the other linears."""
    format, grid = examined.description.format, examined.description.grid
    assert format is not None
    assert grid is not None
    solver = LinearSolver(
        grid, format.scale_dtype, load_recipe("rtn-w4a16"), (), format.activation_bits
    )

    def make() -> dict[str, Tensor]:
        weights = {row.module: dequantize(origin.weight(row.module)) for row in rows}
        solved = solver.solve_rtn(weights, {row.module: row.fused for row in rows if row.fused})
        return {
            name: tensor
            for module, one in solved.items()
            for name, tensor in format.pack(module, one.weight).items()
        }

    return AddedTensors(
        [
            spec
            for row in rows
            for spec in format.specs(row.module, (row.shape[0], row.shape[1]), grid)
        ],
        make,
    )


def _extend_lists(
    examined: ExaminedCheckpoint, plan: Repair, modules: list[str], quantized: list[str]
) -> None:
    """Add modules to the list of unquantized ones, if there is one; ModelSlim lists all modules."""
    block = _block(plan) if plan.config.get("quantization_config") else {}
    for key in ("ignore", "modules_to_not_convert"):
        if isinstance(block.get(key), list):
            block[key] += [module for module in modules if module not in block[key]]
    if OPT_FILE in plan.files:
        opt = json.loads(plan.files[OPT_FILE])
        listed = opt.get("quantization", {}).setdefault("exclude_modules", [])
        listed += [module for module in modules if module not in listed]
        plan.files[OPT_FILE] = json.dumps(opt, indent=2).encode() + b"\n"
    slim = next((name for name in SLIM_FILES if name in plan.files), None)
    if slim is not None:
        types = json.loads(plan.files[slim]) | {f"{module}.weight": "FLOAT" for module in modules}
        kind = types.get("model_quant_type")
        types |= {
            f"{module}{suffix}": kind
            for module in quantized
            for suffix in (".weight", ".weight_scale", ".weight_offset")
        }
        plan.files[slim] = json.dumps(types, indent=2).encode() + b"\n"


@dataclass
class EngineKeys:
    """config: keys to set in config.json; block: in its quantization_config; listed: modules to
    list as unquantized."""

    config: JsonObject = field(default_factory=dict)
    block: JsonObject = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)

    @property
    def changes(self) -> list[str]:
        """Each change as text."""
        found = [f"{key} in config.json is {value!r}" for key, value in self.config.items()]
        found += [
            f"{key} at the top of quantization_config is {value!r}"
            for key, value in self.block.items()
        ]
        return found + ([f"{', '.join(self.listed)} listed as unquantized"] if self.listed else [])


def missing_keys(engine: str, checkpoint: Checkpoint) -> EngineKeys:
    """Entries that the checkpoint lacks for the engine. Raises QuantkitError for an unknown engine,
    or a checkpoint of an unknown architecture."""
    profile, config, found = find_engine(engine), checkpoint.config, EngineKeys()
    model_type = str(config.get("model_type"))
    found.config = {
        key: value
        for key, value in profile.config.get(model_type, {}).items()
        if config.get(key) != value
    }
    for key in profile.reads.get(model_type, ()):
        if key not in config and (other := OTHER_RELEASE_NAMES.get(key)) in config:
            found.config[key] = config[other]
    load = find_load(engine, checkpoint)
    if load is None:
        return found
    block: Mapping[str, Any] = config.get("quantization_config") or {}
    grid = _int4_grid(checkpoint)
    for key in load.quantization_keys if grid is not None and block else ():
        if block.get(key) != getattr(grid, key):
            found.block[key] = getattr(grid, key)
    found.listed = _unlisted_modules(load, checkpoint, read_model(checkpoint).rows)
    return found


def _int4_grid(checkpoint: Checkpoint) -> Grid | None:
    """The grid of the 4-bit linears; None if there is none, or more than one."""
    grids = {
        linear.grid
        for linear in checkpoint.linears.values()
        if linear.grid is not None and linear.grid.kind == "int4"
    }
    return next(iter(grids)) if len(grids) == 1 else None


def _unlisted_modules(
    load: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: list[Parameter]
) -> list[str]:
    """A tied head, and linears of an MTP layer that the engine has another name for."""
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if ignored is None:
        return []
    tied = not any(row.role == "head" and not row.mtp for row in rows)
    names = (
        [HEAD]
        if getattr(load, "tied_head", None) is not None and tied and not ignored(HEAD)
        else []
    )
    prefix = getattr(load, "mtp_prefix", None)
    unquantized = [
        row
        for row in rows
        if row.mtp
        and row.role in ("linear", "kv_b", "mtp_proj", "head")
        and row.module not in checkpoint.linears
    ]
    renamed = [
        f"{prefix}.{row.within_layer}"
        for row in unquantized
        if prefix is not None and ignored(row.module)
    ]
    return names + [name for name in renamed if not ignored(name)]
