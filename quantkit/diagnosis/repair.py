"""What has one cure, cured in a copy: names, index, description, lists, zero points, global scales,
and what the source can give back.

repaired.py writes the copy.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.linear_solver import Solver
from quantkit.calibrate.recipe import load_recipe
from quantkit.checkpoint.aux_files import AUX_FILES
from quantkit.checkpoint.formats.base import SLIM_FILES
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.hub import find_local
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_file
from quantkit.diagnosis.description import OPT_FILE
from quantkit.diagnosis.diagnose import Diagnosis, Patient
from quantkit.diagnosis.engine_keys import missing_keys
from quantkit.diagnosis.repaired import Added, Repair, write
from quantkit.diagnosis.survey import Survey
from quantkit.grids.weights import dequantize
from quantkit.models.table import Parameter


def check_new(out: Path) -> None:
    """Raises QuantkitError where the copy has no place."""
    if out.exists():
        raise QuantkitError(f"{out} exists", "choose another --repair")


def repair(
    diagnosis: Diagnosis, out: Path, source: str | None = None, engine: str | None = None
) -> list[str]:
    """Write the corrected checkpoint to `out`; returns what was changed, in words. Raises
    QuantkitError where nothing can be cured.

    engine: config.json and the list of unquantized modules also have what this engine reads there.
    """
    patient = diagnosis.patient
    seen = patient.survey
    if not seen.has_weights:
        raise QuantkitError(
            f"{seen.path} is not on this machine", "download it, and repair the copy"
        )
    check_new(out)
    if diagnosis.findings.has("shard-missing", "shard-damaged", "config-unreadable"):
        raise QuantkitError(
            f"{seen.path} lacks files that nothing can replace", "download them first"
        )
    if diagnosis.findings.has("tensor-twice"):
        raise QuantkitError(
            f"two shards of {seen.path} hold a tensor of one name, and no index says which counts",
            "remove one of them",
        )
    files, unreadable = _files(seen)
    plan = Repair(dict(seen.config), files)
    origin = (
        Checkpoint.open(path)
        if source is not None and (path := find_local(source)) is not None
        else None
    )
    _plan(diagnosis, plan, origin)
    if engine is not None:
        _set_engine_keys(engine, patient, plan)
    if not plan.changes:
        raise QuantkitError(
            f"nothing that was found in {seen.path} has one cure",
            "see the remedies of the findings",
        )
    plan.changes += [
        f"{name} was left out: {fault}"
        for name, fault in unreadable.items()
        if name not in plan.files
    ]
    write(patient.survey, plan, out)
    return plan.changes


def _files(seen: Survey) -> tuple[dict[str, bytes], dict[str, QuantkitError]]:
    """What lies beside the weights, and why some of it cannot be read."""
    found, unreadable = dict[str, bytes](), dict[str, QuantkitError]()
    for name in (*AUX_FILES, *seen.side):
        if name in seen.names:
            try:
                found[name] = read_file(seen.path / name)
            except QuantkitError as fault:
                unreadable[name] = fault
    return found, unreadable


def _plan(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint | None) -> None:
    patient, has = diagnosis.patient, diagnosis.findings.has
    if has("names-wrong"):
        plan.changes.append(
            f"{len(patient.survey.renamed)} tensors were given the names that engines look for"
        )
    if has("index-wrong", "index-missing"):
        plan.changes.append("the index was written anew, from the shards")
    if has("shards-disagree"):
        dropped = sorted({other.shard for _, other in patient.survey.copies})
        plan.changes.append(
            f"of tensors that two shards hold, {', '.join(dropped)} lost those that the index says "
            "are in another"
        )
    if has("description-old-key"):
        plan.changes.append("the description in config.json is under quantization_config alone")
    if has("group-size-wrong"):
        _set_group_size(patient, plan)
    if has("listed-but-quantized", "plain-not-listed", "list-matches-nothing"):
        fresh = _set_lists(patient, plan)
        if has("listed-but-quantized"):
            _set_targets(plan, fresh)
    if has("zero-points-off"):
        _mend_zero_points(patient, plan)
    if has("global-scale-inverted"):
        _invert_global_scales(patient, plan)
    if has("mtp-not-announced"):
        _announce_mtp(patient, plan)
    if origin is not None:
        _take_settings(diagnosis, plan, origin)
        _take_tensors(diagnosis, plan, origin)


def _set_group_size(patient: Patient, plan: Repair) -> None:
    block, size = _block(plan), patient.described.cures["group_size"]
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


def _block(plan: Repair) -> dict[str, Any]:
    """A copy of the description, which may be changed."""
    plan.config["quantization_config"] = json.loads(
        json.dumps(plan.config.get("quantization_config") or {})
    )
    found: dict[str, Any] = plan.config["quantization_config"]
    return found


def _set_lists(patient: Patient, plan: Repair) -> dict[str, Any]:
    """The list of unquantized modules as the format writes it for what is stored; returns the whole
    description as it writes it."""
    described, seen = patient.described, patient.survey
    assert described.format is not None
    quantized = {
        module: linear.grid
        for module, linear in described.linears.items()
        if linear.format is described.format
    }
    parts = {name for linear in described.linears.values() for name in linear.tensors}
    plain: list[TensorSpec] = [tensor for name, tensor in seen.tensors.items() if name not in parts]
    fresh = described.format.config_block(described.grid, quantized, plain)
    for key in ("ignore", "modules_to_not_convert", "dynamic"):
        if key in fresh and seen.config.get("quantization_config"):
            _block(plan)[key] = fresh[key]
        elif key in (seen.config.get("quantization_config") or {}):
            del _block(plan)[key]
    for name, content in described.format.extra_files(described.grid, quantized, plain).items():
        if name in seen.side:
            plan.files[name] = content
    if fresh or seen.side:
        plan.changes.append("the list of unquantized modules was written anew, from what is stored")
    return fresh


def _set_targets(plan: Repair, fresh: dict[str, Any]) -> None:
    """A single group is for all linears but those of the list, which was written anew; of several
    it is not known which one is for what."""
    groups, whole = (
        (plan.config.get("quantization_config") or {}).get("config_groups"),
        fresh.get("config_groups"),
    )
    if not isinstance(groups, dict) or whole is None or len(groups) != 1 or len(whole) != 1:
        return
    (number,), (wanted,) = groups, whole.values()
    if groups[number].get("targets") != wanted["targets"]:
        _block(plan)["config_groups"][number]["targets"] = wanted["targets"]
        plan.changes.append(f"{number} in config.json is for {', '.join(wanted['targets'])}")


def _mend_zero_points(patient: Patient, plan: Repair) -> None:
    """GPTQ's two versions differ by what is said alone; elsewhere the stored zero points move."""
    described, offsets = patient.described, patient.offsets
    format = described.format
    said_second = isinstance(format, Gptq) and format.checkpoint_format == "gptq_v2"
    every = len(offsets) * 2 > len(described.linears) and all(
        (offset > 0) == said_second for offset in offsets.values()
    )
    if isinstance(format, Gptq) and every:
        said = _block(plan)["checkpoint_format"] = "gptq" if said_second else "gptq_v2"
        plan.changes.append(
            f"checkpoint_format in config.json is {said}: zero points are stored so"
        )
        return
    for module, offset in offsets.items():
        name = next(
            (
                name
                for name in described.linears[module].tensors
                if name.endswith((".qzeros", ".weight_zero_point"))
            ),
            None,
        )
        if name is not None:
            plan.changed[name] = _shifted(patient.survey, name, 1 if offset > 0 else -1)
    if plan.changed:
        plan.changes.append(f"zero points of {len(plan.changed)} linears were moved by one")


def _shifted(seen: Survey, name: str, sign: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        words = seen.shards.read(seen.tensors[name])
        nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], -1)
        moved = (nibbles.long() + sign) % 16
        packed = sum(moved[..., place] << (4 * place) for place in range(8))
        assert isinstance(packed, Tensor)
        return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

    return make


def _invert_global_scales(patient: Patient, plan: Repair) -> None:
    seen = patient.survey
    names = [
        name
        for module in patient.inverted
        for name in patient.described.linears[module].tensors
        if name.endswith((".weight_scale_2", ".weight_global_scale"))
    ]
    for name in names:
        plan.changed[name] = _reciprocal(seen, name)
    plan.changes.append(f"global scales of {len(names)} linears were inverted")


def _reciprocal(seen: Survey, name: str) -> Callable[[], Tensor]:
    return lambda: seen.shards.read(seen.tensors[name]).reciprocal()


def _announce_mtp(patient: Patient, plan: Repair) -> None:
    layers = plan.config["num_hidden_layers"]
    numbers = {
        int(name.split(".")[2])
        for name in patient.survey.tensors
        if name.startswith("model.layers.")
    }
    plan.config["num_nextn_predict_layers"] = max(numbers) + 1 - layers
    plan.changes.append(
        f"num_nextn_predict_layers in config.json is {plan.config['num_nextn_predict_layers']}"
    )


def _set_engine_keys(engine: str, patient: Patient, plan: Repair) -> None:
    """Of the checkpoint as the plan makes it: shapes and names are those of today's tensors."""
    seen = patient.survey
    side = {
        name: json.loads(plan.files[name]) if name in plan.files else value
        for name, value in seen.side.items()
    }
    found = missing_keys(
        engine, Checkpoint(seen.path, copy.deepcopy(plan.config), side, seen.tensors)
    )
    plan.config |= found.config
    if found.block:
        _block(plan).update(found.block)
    if found.listed:
        _list_more(patient, plan, found.listed, [])
    plan.changes += [f"for {engine}, {told}" for told in found.told]


# --- from the source
# -------------------------------------------------------------------------------------------------------------


def _take_settings(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint) -> None:
    has = diagnosis.findings.has
    if has("config-differs"):
        kept = (
            "quantization_config",
            "torch_dtype",
            "dtype",
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "transformers_version",
        )
        own = {key: plan.config[key] for key in kept if key in plan.config}
        plan.config = {key: value for key, value in origin.config.items() if key not in kept} | own
        plan.changes.append(
            "config.json is the source's, with its own quantization_config and dtype"
        )
    if has("class-wrong", "class-missing") and origin.config.get("architectures"):
        plan.config["architectures"] = origin.config["architectures"]
        plan.changes.append("architectures in config.json is the source's")
    if has("tokenizer-broken", "tokenizer-missing", "tokenizer-differs", "tokenizer-too-large", "template-missing", "template-broken",
           "template-differs", "template-foreign", "eos-outside", "eos-lost", "eos-differs", "token-outside", "sampling-wrong",
           "sampling-differs", "special-token-unknown", "text-cut"):  # fmt: skip
        taken = [name for name in AUX_FILES if (origin.path / name).is_file() and name != "LICENSE"]
        if has(
            "template-broken", "template-differs", "template-foreign"
        ):  # a file of its own hides tokenizer_config.json's
            plan.files = {
                name: content
                for name, content in plan.files.items()
                if not name.startswith("chat_template.")
            }
        plan.files |= {name: read_file(origin.path / name) for name in taken}
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if key in origin.config:
                plan.config[key] = origin.config[key]
        plan.changes.append(
            f"{', '.join(taken)} and the ends of a text in config.json are the source's"
        )


def _take_tensors(diagnosis: Diagnosis, plan: Repair, origin: Checkpoint) -> None:
    """The head and MTP layers that are not stored: the source's, in BF16 where they were packed
    there, and listed as unquantized."""
    patient, has = diagnosis.patient, diagnosis.findings.has
    stored = set(patient.survey.tensors) | {
        f"{module}.weight" for module in patient.described.linears
    }
    theirs = (
        [row for row in diagnosis.source.structure.rows if row.name not in stored]
        if diagnosis.source is not None
        else []
    )
    untied = patient.survey.config.get("tie_word_embeddings") and not plan.config.get(
        "tie_word_embeddings"
    )
    among = patient.structure.lost if has("head-missing") else theirs if untied else []
    wanted = [row for row in among if row.role == "head" and not row.mtp]
    if has("mtp-missing", "mtp-incomplete"):
        wanted += [row for row in theirs if row.mtp]
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            if key in origin.config:
                plan.config[key] = origin.config[key]
    wanted = [row for row in wanted if origin.has(row.name) or row.module in origin.linears]
    quantized = _quantized_alike(patient, wanted)
    plain = [row for row in wanted if row.module not in quantized]
    plan.added += [Added([_plain_spec(origin, row)], _taken(origin, row)) for row in plain]
    plan.added += [
        _rounded(patient, origin, rows)
        for rows in _together([row for row in wanted if row.module in quantized])
    ]
    if wanted:
        _list_more(
            patient, plan, [row.module for row in plain if len(row.shape) == 2], sorted(quantized)
        )
        plan.changes.append(
            f"{len(wanted)} tensors are the source's, such as {wanted[0].name}; {len(quantized)} "
            "of them rounded as the others are"
        )


def _quantized_alike(patient: Patient, wanted: list[Parameter]) -> set[str]:
    """Modules of which the main layers have the like quantized, in a format that may hold them and
    needs no calibration."""
    described = patient.described
    format = described.format
    kinds = {
        (row.projection, row.block)
        for row in patient.structure.rows
        if row.module in described.linears and not row.mtp
    }
    if format is None or described.grid is None or format.activation_bits == 4:
        return set()
    return {
        row.module
        for row in wanted
        if row.role == "linear"
        and (row.projection, row.block) in kinds
        and format.quantizes(row.module, row.role, mtp=row.mtp)
    }


def _together(rows: list[Parameter]) -> list[list[Parameter]]:
    """Fused siblings share an FP4 global scale, and are rounded together."""
    groups: dict[str, list[Parameter]] = {}
    for row in rows:
        groups.setdefault(row.fused or row.module, []).append(row)
    return list(groups.values())


def _plain_spec(origin: Checkpoint, row: Parameter) -> TensorSpec:
    dtype = torch.bfloat16 if row.module in origin.linears else origin.tensors[row.name].dtype
    return TensorSpec(row.name, dtype, row.shape)


def _taken(origin: Checkpoint, row: Parameter) -> Callable[[], dict[str, Tensor]]:
    packed = row.module in origin.linears
    return lambda: {
        row.name: dequantize(origin.weight(row.module), torch.bfloat16)
        if packed
        else origin.read(row.name)
    }


def _rounded(patient: Patient, origin: Checkpoint, rows: list[Parameter]) -> Added:
    """Rounded to nearest on the grid that the rest is on."""
    format, grid = patient.described.format, patient.described.grid
    assert format is not None
    assert grid is not None
    solver = Solver(grid, format.scale_dtype, load_recipe("rtn-w4a16"), (), format.activation_bits)

    def make() -> dict[str, Tensor]:
        weights = {row.module: dequantize(origin.weight(row.module)) for row in rows}
        solved = solver.nearest(weights, {row.module: row.fused for row in rows if row.fused})
        return {
            name: tensor
            for module, one in solved.items()
            for name, tensor in format.pack(module, one.weight).items()
        }

    return Added(
        [
            spec
            for row in rows
            for spec in format.specs(row.module, (row.shape[0], row.shape[1]), grid)
        ],
        make,
    )


def _list_more(patient: Patient, plan: Repair, modules: list[str], quantized: list[str]) -> None:
    """Add modules to the list of unquantized ones, where there is one; ModelSlim lists all."""
    block = _block(plan) if plan.config.get("quantization_config") else {}
    for key in ("ignore", "modules_to_not_convert"):
        if isinstance(block.get(key), list):
            block[key] += [module for module in modules if module not in block[key]]
    if OPT_FILE in plan.files:
        beside = json.loads(plan.files[OPT_FILE])
        listed = beside.get("quantization", {}).setdefault("exclude_modules", [])
        listed += [module for module in modules if module not in listed]
        plan.files[OPT_FILE] = json.dumps(beside, indent=2).encode() + b"\n"
    slim = next((name for name in SLIM_FILES if name in plan.files), None)
    if slim is not None:
        told = json.loads(plan.files[slim]) | {f"{module}.weight": "FLOAT" for module in modules}
        kind = told.get("model_quant_type")
        told |= {
            f"{module}{suffix}": kind
            for module in quantized
            for suffix in (".weight", ".weight_scale", ".weight_offset")
        }
        plan.files[slim] = json.dumps(told, indent=2).encode() + b"\n"
