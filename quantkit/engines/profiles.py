"""Which engine loads what, as data read from the engines' own sources: recipes/engines/*.yaml.

An engine has a list of loads: a format on one weight grid, the devices it runs on there, and the parts of a model that may or
must be quantized in it. Quantizing for an engine picks a load; checking a checkpoint compares its headers with one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.assets import asset
from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.models import ARCHITECTURES
from quantkit.models.stored import read_model
from quantkit.models.table import Parameter
from quantkit.schemes import Fp4Grid, Grid, IntGrid, Scheme

Device = Literal["cuda", "npu", "cpu"]
Part = Literal["qkv_a", "attention", "kv_b", "mlp", "shared_experts", "experts"]
"""Parts of a model an engine treats as one. qkv_a: q_a_proj and kv_a_proj_with_mqa, which every engine fuses."""

GridName = Literal["int4-asymmetric", "int4-symmetric", "int4-channel", "int8", "nvfp4", "fp8", "dense"]


class LoadRule(BaseModel):
    """One thing an engine loads. `notes` is for people; `run` is the command of the repository that shows it, if one does, and `run_on`
    says where it was run if not on a CPU by `release`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str
    variant: str
    grids: tuple[GridName, ...]
    devices: tuple[Device, ...]
    may: tuple[Part, ...]
    must: tuple[Part, ...] = ()
    # Of `may`, those that may be int4 where the rest is int8; empty where a checkpoint is on one grid.
    four_bits: tuple[Part, ...] = ()
    # Linears of a multi-token-prediction layer: quantized like the rest, left plain, or either.
    mtp: Literal["any", "quantized", "plain"] = "any"
    # What the engine calls the MTP layer when it looks a module up in the list of unquantized ones.
    mtp_prefix: str | None = None
    # Fused siblings whose FP4 global scales differ.
    fp4_siblings: Literal["error", "warn"] | None = None
    # The quant_algo that may stand in hf_quant_config.json alone; empty where the engine takes any there.
    side_algorithms: tuple[str, ...] = ()
    # What to add to a checkpoint so that the engine leaves a head in 16 bits that is tied to the embedding; None where it always does.
    tied_head: str | None = None
    # Keys at the top of quantization_config that must repeat the grid's own value.
    quantization_keys: tuple[Literal["group_size"], ...] = ()
    launch: tuple[str, ...] = ()
    notes: str = ""
    # Whether int4 experts whose intermediate size on one GPU is not above group_size come out wrong.
    narrow_experts_wrong: bool = False
    sources: tuple[str, ...]
    run: str | None = None
    run_on: str | None = None


class Refusal(BaseModel):
    """Why an engine does not load something; a list that is empty stands for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    formats: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    grids: tuple[GridName, ...] = ()
    devices: tuple[Device, ...] = ()
    reason: str


class EngineProfile(BaseModel):
    """A profile. `release` is the version or commit whose sources were read.

    By model_type, of config.json: `config`, keys that must have this value; `reads`, keys that must be there by this name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    release: str
    summary: str
    architectures: tuple[str, ...]
    config: dict[str, dict[str, Any]] = {}
    reads: dict[str, tuple[str, ...]] = {}
    loads: tuple[LoadRule, ...]
    refuses: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class FormatChoice:
    """What to write so that an engine loads a scheme: the format, the grid it takes there, and the parts to quantize.

    `quantization_config` holds keys to add to that block of config.json. `launch` are options of the engine's command line.
    """

    engine: str
    format: str
    variant: str
    grid: Grid
    parts: tuple[Part, ...]
    mtp: bool
    quantization_config: dict[str, Any]
    launch: tuple[str, ...]
    notes: str

    def quantizes(self, row: Parameter) -> bool:
        """Whether the tensor is to be quantized for this engine."""
        return part_of(row) in self.parts and (self.mtp or not row.mtp)


@dataclass(frozen=True)
class LoadProblem:
    """Why an engine will not load a checkpoint ("error"), or will lose accuracy or a feature ("warning"), and what to do."""

    severity: Literal["error", "warning"]
    problem: str
    remedy: str


@cache
def find_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises QuantkitError listing those there are."""
    names = engine_names()
    if name not in names:
        raise QuantkitError(f"engine {name!r} is not known", f"choose one of {', '.join(names)}")
    path = asset("recipes", "engines", f"{name}.yaml")
    try:
        return EngineProfile.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        raise QuantkitError(f"{path} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}", "restore that file") from None


def engine_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in asset("recipes", "engines").glob("*.yaml")))


def grid_name(grid: Grid) -> GridName:
    """What profiles call a grid, whatever its group size."""
    match grid:
        case Fp4Grid():
            return "nvfp4"
        case IntGrid(bits=8):
            return "int8"
        case IntGrid(group_size=None):
            return "int4-channel"
        case IntGrid(symmetric=symmetric):
            return "int4-symmetric" if symmetric else "int4-asymmetric"


def part_of(row: Parameter) -> Part | None:
    """The part of the model a tensor belongs to; None for what no engine takes quantized."""
    if row.role == "kv_b":
        return "kv_b"
    if row.role != "linear":
        return None
    if row.expert is not None:
        return "experts"
    if ".shared_experts." in row.name:
        return "shared_experts"
    if ".self_attn." not in row.name:
        return "mlp"
    return "qkv_a" if row.fused is not None and row.fused.endswith("qkv_a_proj") else "attention"


def choose(engine: str, scheme: Scheme, *, device: Device | None = None, format: str | None = None) -> FormatChoice:
    """The engine's first load that holds the scheme, on `device` and in `format` where those are given.

    An asymmetric int4 grid becomes symmetric where the engine has only that. Raises QuantkitError with the engine's reason.
    """
    profile = find_engine(engine)
    wanted = grid_name(scheme.weight)
    grids = {wanted: scheme.weight}
    if isinstance(scheme.weight, IntGrid) and wanted == "int4-asymmetric":
        grids["int4-symmetric"] = replace(scheme.weight, symmetric=True)
    for load in profile.loads:
        asked = (format is None or load.format == format) and (device is None or device in load.devices)
        held = [grid for name, grid in grids.items() if name in load.grids]
        if asked and held and load.format in scheme.formats:
            return _choice(profile.engine, load, held[0])
    reason = _reason(profile, format, None, wanted, device)
    loads = sorted({f"{load.format} ({grid})" for load in profile.loads for grid in load.grids if device is None or device in load.devices})
    raise QuantkitError(f"{engine} does not load {scheme.name}{_in(format)}{_on(device)}: {reason}", f"it loads {', '.join(loads)}")


def check_checkpoint(engine: str, checkpoint: Checkpoint, *, device: Device | None = None) -> list[LoadProblem]:
    """What keeps the engine from loading the checkpoint, or loses something; empty where nothing was found.

    Reads headers only, and for FP4 the global scales. Without `device`, the device with the fewest faults counts.
    """
    profile = find_engine(engine)
    loads = _loads(profile, checkpoint, device)
    if not loads:
        reason = _reason(profile, checkpoint.format.name, checkpoint.format.variant, _stored_grid(checkpoint), device)
        said = f"{engine} does not load {checkpoint.format.name} {checkpoint.format.variant} of {_stored_grid(checkpoint)}{_on(device)}"
        return [LoadProblem("error", f"{said}: {reason}", f"quantkit convert, or quantize --engine {engine}")]
    general = _check_model(profile, checkpoint)
    if any(problem.severity == "error" for problem in general):
        return general
    rows = read_model(checkpoint).rows
    found = [general + _check_load(engine, load, checkpoint, rows) for load in loads]
    return min(found, key=lambda problems: [problem.severity for problem in problems].count("error"))


def find_load(engine: str, checkpoint: Checkpoint, device: Device | None = None) -> LoadRule | None:
    """The rule by which the engine loads the checkpoint's format, if it does."""
    return next(iter(_loads(find_engine(engine), checkpoint, device)), None)


def _loads(profile: EngineProfile, checkpoint: Checkpoint, device: Device | None) -> list[LoadRule]:
    stored = _stored_grid(checkpoint)
    return [
        load
        for load in profile.loads
        if (load.format, load.variant) == (checkpoint.format.name, checkpoint.format.variant)
        and stored in load.grids
        and (device is None or device in load.devices)
    ]


def _stored_grid(checkpoint: Checkpoint) -> GridName:
    if checkpoint.grid is not None:
        return grid_name(checkpoint.grid)
    return "fp8" if checkpoint.linears else "dense"


def _choice(engine: str, load: LoadRule, grid: Grid) -> FormatChoice:
    keys: dict[str, Any] = {key: getattr(grid, key) for key in load.quantization_keys}
    # Formats never take kv_b_proj: it is absorbed at decoding, and Ascend engines and vLLM on CPU need it plain.
    parts = tuple(part for part in load.may if part != "kv_b")
    return FormatChoice(engine, load.format, load.variant, grid, parts, load.mtp != "plain", keys, load.launch, load.notes)


def _reason(profile: EngineProfile, format: str | None, variant: str | None, grid: GridName, device: Device | None) -> str:
    def covers(listed: tuple[str, ...], value: str | None) -> bool:
        return not listed or value in listed

    for refusal in profile.refuses:
        asked = covers(refusal.formats, format) and covers(refusal.variants, variant)
        if asked and covers(refusal.grids, grid) and covers(refusal.devices, device):
            return refusal.reason
    devices = sorted({device for load in profile.loads for device in load.devices})
    if device is not None and device not in devices:
        return f"it runs on {' and '.join(devices)}"
    return "it has no reader for that"


def _in(format: str | None) -> str:
    return f" in format {format}" if format else ""


def _on(device: str | None) -> str:
    return f" on {device}" if device else ""


def _check_model(profile: EngineProfile, checkpoint: Checkpoint) -> list[LoadProblem]:
    """The architecture, and the keys of config.json that the engine cannot do without."""
    model_type = checkpoint.config.get("model_type")
    if model_type not in profile.architectures or model_type not in ARCHITECTURES:
        known = ", ".join(profile.architectures)
        return [LoadProblem("error", f"{profile.engine} is not known to run {model_type}", f"its profile has {known}")]
    told = [
        LoadProblem("error", f"config.json has {key} = {checkpoint.config.get(key)!r}", f"set it to {value!r}: {profile.engine} goes by it")
        for key, value in profile.config.get(model_type, {}).items()
        if checkpoint.config.get(key) != value
    ]
    missing = [key for key in profile.reads.get(model_type, ()) if key not in checkpoint.config]
    if missing:
        names = ", ".join(missing)
        remedy = "add them: two releases of this architecture name the same numbers differently, and both names may stand there"
        told.append(LoadProblem("error", f"{profile.engine} reads {names} in config.json, which it lacks", remedy))
    return told


def _check_load(engine: str, load: LoadRule, checkpoint: Checkpoint, rows: list[Parameter]) -> list[LoadProblem]:
    linears = [row for row in rows if part_of(row) is not None and (row.module in checkpoint.linears or checkpoint.has(row.name))]
    return [
        *_check_left(engine, checkpoint, linears),
        *_check_parts(engine, load, checkpoint, linears),
        *_check_siblings(engine, load, checkpoint, linears),
        *_check_mtp(engine, load, checkpoint, linears),
        *_check_tied_head(engine, load, checkpoint, rows),
        *_check_keys(engine, load, checkpoint),
    ]


def _check_left(engine: str, checkpoint: Checkpoint, linears: list[Parameter]) -> Iterable[LoadProblem]:
    """Linears declared unquantized that are in a format of their own: the engine takes them for plain ones."""
    left = [row for row in linears if row.module in checkpoint.linears and not _quantized(checkpoint, row)]
    for mtp in (False, True):
        first = next((row.module for row in left if row.mtp == mtp), None)
        if first is not None:
            told = f"{engine} takes {first} for unquantized, and it is {checkpoint.linears[first].format.name}"
            remedy = "quantkit convert to another format, which decodes it to BF16"
            yield (
                LoadProblem("warning", told, f"run it without speculative decoding, or {remedy}")
                if mtp
                else LoadProblem("error", told, remedy)
            )


def _four_bits(checkpoint: Checkpoint, row: Parameter) -> bool:
    return _quantized(checkpoint, row) and isinstance(grid := checkpoint.linears[row.module].grid, IntGrid) and grid.bits == 4


def _quantized(checkpoint: Checkpoint, row: Parameter) -> bool:
    """In the checkpoint's own format, which is all that an engine knows of."""
    linear = checkpoint.linears.get(row.module)
    return linear is not None and linear.format is checkpoint.format


def _check_parts(engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]) -> list[LoadProblem]:
    quantized: dict[Part, str] = {}
    plain: dict[Part, str] = {}
    for row in linears:
        part = part_of(row)
        assert part is not None, row.name
        (quantized if _quantized(checkpoint, row) else plain).setdefault(part, row.module)
    refused = f"does not take {{}} quantized in {load.format} {load.variant}, as {{}} is"
    leaves = f"quantize with --engine {engine}, which leaves it in BF16"
    told = [
        LoadProblem("error", f"{engine} {refused.format(part, name)}", leaves) for part, name in quantized.items() if part not in load.may
    ]
    beside = [row.module for row in linears if _four_bits(checkpoint, row) and part_of(row) not in load.four_bits]
    if load.four_bits and beside:
        only = f"{engine} takes int4 in {' and '.join(load.four_bits)} only, and {beside[0]} is"
        told.append(LoadProblem("error", only, f"quantize with --engine {engine}"))
    told += [
        LoadProblem("error", f"{engine} expects every {part} linear quantized, and {module} is not", f"quantize with --engine {engine}")
        for part, module in plain.items()
        if part in load.must
    ]
    return told


def _check_siblings(engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]) -> list[LoadProblem]:
    """Linears an engine fuses must all be quantized or all plain, and in FP4 share their global scale."""
    fused: dict[str, list[Parameter]] = {}
    for row in linears:
        if row.fused is not None:
            fused.setdefault(row.fused, []).append(row)
    for rows in fused.values():
        if len({_quantized(checkpoint, row) for row in rows}) > 1:
            names = " and ".join(row.module for row in rows)
            return [LoadProblem("error", f"{names} are fused by {engine}, and only some are quantized", "quantize all of them or none")]
    if load.fp4_siblings is None:
        return []
    different = [rows for rows in fused.values() if len({_global_scale(checkpoint, row.module) for row in rows}) > 1]
    if not different:
        return []
    names = " and ".join(row.module for row in different[0])
    refused = load.fp4_siblings == "error"
    told = f"{len(different)} groups of fused linears have different FP4 global scales, such as {names}; {engine} "
    told += "refuses that" if refused else "uses one of them for all, which costs accuracy"
    return [LoadProblem("error" if refused else "warning", told, "quantize the source with quantkit, which shares them")]


def _global_scale(checkpoint: Checkpoint, module: str) -> float | None:
    """The FP4 global scale as stored, by whatever name the format has for it; None where the linear is plain."""
    for suffix in (".weight_scale_2", ".weight_global_scale"):
        if checkpoint.has(module + suffix):
            return float(checkpoint.read(module + suffix))
    return None


def _check_mtp(engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]) -> list[LoadProblem]:
    mtp = [row for row in linears if row.mtp]
    quantized = [row for row in mtp if _quantized(checkpoint, row) and row.role == "linear"]
    plain = [row for row in mtp if not _quantized(checkpoint, row) and part_of(row) in load.may]
    off = "run it without speculative decoding, or quantize with --engine"
    if load.mtp == "plain" and quantized:
        return [
            LoadProblem("warning", f"{engine} runs the MTP layer unquantized, and {quantized[0].module} is quantized", f"{off} {engine}")
        ]
    if load.mtp == "quantized" and any(row.role == "linear" for row in plain):
        return [LoadProblem("warning", f"{engine} expects the MTP layer quantized, and {plain[0].module} is not", f"{off} {engine}")]
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.mtp_prefix is None or ignored is None:
        return []
    for row in mtp:
        called = f"{load.mtp_prefix}.{row.module.split('.', 3)[3]}"
        if ignored(row.module) != ignored(called):
            told = f"{engine} calls {row.module} {called}, which the list of unquantized modules does not cover"
            return [LoadProblem("warning", told, f"list it by its ending, {off} {engine}")]
    return []


def _check_tied_head(engine: str, load: LoadRule, checkpoint: Checkpoint, rows: list[Parameter]) -> Iterable[LoadProblem]:
    """A head without a tensor of its own: the engine makes a linear of it, which it must be told not to quantize."""
    tied = not any(row.role == "head" and not row.mtp for row in rows)
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.tied_head is not None and tied and not (ignored is not None and ignored(HEAD)):
        yield LoadProblem(
            "error", f"{engine} quantizes {HEAD}, which is tied to the embedding and not listed as unquantized", load.tied_head
        )


def _check_keys(engine: str, load: LoadRule, checkpoint: Checkpoint) -> Iterable[LoadProblem]:
    block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    for key in load.quantization_keys:
        value = getattr(checkpoint.grid, key)
        if block.get(key) != value:
            told = f"{engine} reads {key} at the top of quantization_config, where it is {block.get(key)}"
            yield LoadProblem("error", told, f'add "{key}": {value} to that block of config.json')
    said: Mapping[str, Any] = checkpoint.side.get("hf_quant_config.json", {}).get("quantization", {})
    if load.side_algorithms and not block and said.get("quant_algo") not in load.side_algorithms:
        told = f"{engine} takes quant_algo {said.get('quant_algo')} from quantization_config in config.json only, which is not there"
        yield LoadProblem("error", told, "quantkit convert --format compressed-tensors, which loses nothing")
    width, group = checkpoint.config.get("moe_intermediate_size"), getattr(checkpoint.grid, "group_size", None)
    if load.narrow_experts_wrong and width and group and width <= group:
        told = (
            f"{engine} mixes up scales of gate_proj and up_proj: a GPU's {width} columns of an expert are not more than group_size {group}"
        )
        yield LoadProblem("warning", told, "quantize with a smaller group_size (recipe), and share the experts out whole")
