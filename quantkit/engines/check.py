"""What keeps an engine from loading a checkpoint, or loses something: its headers and config.json
against the engine's profile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.profiles import (
    Device,
    EngineProfile,
    LoadRule,
    MixtureRule,
    Part,
    find_engine,
    part_of,
)
from quantkit.grids.base import Grid
from quantkit.grids.names import CacheCodes
from quantkit.models import is_known
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter


@dataclass(frozen=True)
class LoadProblem:
    """Why an engine will not load a checkpoint ("error"), or will lose accuracy or a feature
    ("warning"), and what to do."""

    severity: Literal["error", "warning"]
    problem: str
    remedy: str


def check_checkpoint(
    engine: str, checkpoint: Checkpoint, *, device: Device | None = None
) -> list[LoadProblem]:
    """What keeps the engine from loading the checkpoint, or loses something; empty where nothing
    was found.

    Reads headers only, and for FP4 the global scales. Without `device`, the device with the fewest
    faults counts.
    """
    profile = find_engine(engine)
    loads: Sequence[LoadRule | MixtureRule] = _loads(profile, checkpoint, device)
    if is_mixture(checkpoint):
        loads = _mixtures(profile, checkpoint, device)
        if not loads:
            where, what = (
                f" on {device}" if device else "",
                f"{checkpoint.format.name} {checkpoint.format.variant}",
            )
            remedy = f"quantize with --engine {engine}"
            return [
                LoadProblem(
                    "error",
                    f"{engine} does not load {what}{where}: it loads one grid a checkpoint in that "
                    "format",
                    remedy,
                )
            ]
    if not loads:
        reason = profile.reason(
            checkpoint.format.name, checkpoint.format.variant, _stored_grid(checkpoint), device
        )
        said = (
            f"{engine} does not load {checkpoint.format.name} {checkpoint.format.variant} of "
            f"{_stored_grid(checkpoint)}"
        )
        where = f" on {device}" if device else ""
        return [
            LoadProblem(
                "error",
                f"{said}{where}: {reason}",
                f"quantkit convert, or quantize --engine {engine}",
            )
        ]
    general = check_model(profile, checkpoint, checkpoint.format.name)
    general += check_cache(profile, checkpoint, checkpoint.format.cache_codes(checkpoint.side))
    if any(problem.severity == "error" for problem in general):
        return general
    rows = read_model(checkpoint).rows
    found = [general + _check_load(engine, load, checkpoint, rows) for load in loads]
    return min(
        found, key=lambda problems: [problem.severity for problem in problems].count("error")
    )


def find_load(
    engine: str, checkpoint: Checkpoint, device: Device | None = None
) -> LoadRule | MixtureRule | None:
    """The rule by which the engine loads the checkpoint's format, if it does."""
    profile = find_engine(engine)
    found: Sequence[LoadRule | MixtureRule] = _loads(profile, checkpoint, device)
    if is_mixture(checkpoint):
        found = _mixtures(profile, checkpoint, device)
    return next(iter(found), None)


def _loads(profile: EngineProfile, checkpoint: Checkpoint, device: Device | None) -> list[LoadRule]:
    stored = _stored_grid(checkpoint)
    return [
        load
        for load in profile.loads
        if (load.format, load.variant) == (checkpoint.format.name, checkpoint.format.variant)
        and stored in load.grids
        and (device is None or device in load.devices)
    ]


def is_mixture(checkpoint: Checkpoint) -> bool:
    """Whether config.json declares a grid module by module."""
    return checkpoint.format.declared_grids(checkpoint.config) is not None


def _mixtures(
    profile: EngineProfile, checkpoint: Checkpoint, device: Device | None
) -> list[MixtureRule]:
    return [
        rule
        for rule in profile.mixtures
        if (rule.format, rule.variant) == (checkpoint.format.name, checkpoint.format.variant)
        and (device is None or device in rule.devices)
    ]


def _stored_grid(checkpoint: Checkpoint) -> str:
    if checkpoint.grid is not None:
        return checkpoint.grid.engine_name
    return "fp8" if checkpoint.linears else "dense"


def check_model(profile: EngineProfile, checkpoint: Checkpoint, format: str) -> list[LoadProblem]:
    """What keeps the engine from running the model, whose weights are in `format`: the
    architecture, and keys of config.json."""
    model_type = checkpoint.config.get("model_type")
    if model_type not in profile.architectures or not is_known(checkpoint.config):
        known = ", ".join(profile.architectures)
        return [
            LoadProblem(
                "error",
                f"{profile.engine} is not known to run {model_type}",
                f"its profile has {known}",
            )
        ]
    formats = profile.formats.get(model_type)
    if formats is not None and format not in formats:
        return [
            LoadProblem(
                "error",
                f"{profile.engine} loads {model_type} in {' and '.join(formats)} only, not {format}",
                "use another engine",
            )
        ]
    faults = [
        LoadProblem(
            "error",
            f"config.json has {key} = {checkpoint.config.get(key)!r}",
            f"set it to {value!r}: {profile.engine} goes by it",
        )
        for key, value in profile.config.get(model_type, {}).items()
        if checkpoint.config.get(key) != value
    ]
    missing = [key for key in profile.reads.get(model_type, ()) if key not in checkpoint.config]
    if missing:
        names = ", ".join(missing)
        remedy = (
            "add them: two releases of this architecture name the same numbers differently, "
            "and both names may stand there"
        )
        faults.append(
            LoadProblem(
                "error", f"{profile.engine} reads {names} in config.json, which it lacks", remedy
            )
        )
    unread = {
        profile.unread(linear.grid): None
        for linear in checkpoint.linears.values()
        if linear.grid is not None
    }
    return [
        *faults,
        *(
            LoadProblem("error", told, "quantize with another --group-size")
            for told in unread
            if told
        ),
    ]


def check_cache(
    profile: EngineProfile, checkpoint: Checkpoint, codes: CacheCodes | None
) -> list[LoadProblem]:
    """What keeps the engine from a cache in 8 bits of this model, by steps of a checkpoint."""
    able = () if codes is None else profile.caches.get(codes, ())
    if codes is None or checkpoint.config.get("model_type") in able:
        return []
    told = (
        f"{profile.engine} reads no steps of an {codes} cache of "
        f"{checkpoint.config.get('model_type')}"
    )
    return [
        LoadProblem(
            "error",
            told,
            f"quantize to int8-a8w8c16; it reads them of {', '.join(able)}"
            if able
            else "use another engine",
        )
    ]


def _check_load(
    engine: str, load: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: list[Parameter]
) -> list[LoadProblem]:
    linears = [
        row
        for row in rows
        if part_of(row) is not None
        and (row.module in checkpoint.linears or checkpoint.has(row.name))
    ]
    if isinstance(load, MixtureRule):
        return [
            *_check_grids(engine, load, checkpoint, linears),
            *_check_siblings(engine, load, checkpoint, linears),
            *_check_tied_head(engine, load, checkpoint, rows),
        ]
    return [
        *_check_left(engine, checkpoint, linears),
        *_check_parts(engine, load, checkpoint, linears),
        *_check_siblings(engine, load, checkpoint, linears),
        *_check_plain_siblings(engine, load, checkpoint, linears),
        *_check_mtp(engine, load, checkpoint, linears),
        *_check_tied_head(engine, load, checkpoint, rows),
        *_check_keys(engine, load, checkpoint, linears),
    ]


def _check_left(
    engine: str, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Linears declared unquantized that are in a format of their own: the engine takes them for
    plain ones."""
    left = [
        row
        for row in linears
        if row.module in checkpoint.linears and not _quantized(checkpoint, row)
    ]
    for mtp in (False, True):
        first = next((row.module for row in left if row.mtp == mtp), None)
        if first is not None:
            told = (
                f"{engine} takes {first} for unquantized, and it is "
                f"{checkpoint.linears[first].format.name}"
            )
            remedy = "quantkit convert to another format, which decodes it to BF16"
            yield (
                LoadProblem("warning", told, f"run it without speculative decoding, or {remedy}")
                if mtp
                else LoadProblem("error", told, remedy)
            )


def _four_bits(checkpoint: Checkpoint, row: Parameter) -> bool:
    return (
        _quantized(checkpoint, row)
        and (grid := checkpoint.linears[row.module].grid) is not None
        and grid.kind == "int4"
    )


def _quantized(checkpoint: Checkpoint, row: Parameter) -> bool:
    """In the checkpoint's own format, which is all that an engine knows of."""
    linear = checkpoint.linears.get(row.module)
    return linear is not None and linear.format is checkpoint.format


def _check_grids(
    engine: str, load: MixtureRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Every linear on a grid that the engine takes there, and all routed experts of a layer on
    one."""
    remedy, told, experts = (
        f"quantize with --engine {engine}",
        set[tuple[Part | None, Grid]](),
        dict[int | None, set[Grid | None]](),
    )
    block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    for row in linears:
        linear = checkpoint.linears.get(row.module)
        grid = None if linear is None else linear.grid
        if row.block == "expert":
            experts.setdefault(row.layer, set()).add(grid)
        if grid is None or (part_of(row), grid) in told:
            continue
        told.add((part_of(row), grid))
        if part_of(row) not in load.parts_on(grid):
            yield LoadProblem(
                "error",
                f"{engine} does not take {part_of(row)} in {grid.engine_name}, as {row.module} is",
                remedy,
            )
        for key in load.quantization_keys if grid.kind == "int4" else ():
            if block.get(key) != getattr(grid, key):
                problem = (
                    f"{engine} reads {key} at the top of quantization_config, where it is "
                    f"{block.get(key)}, and {row.module} has "
                )
                yield LoadProblem("error", f"{problem}{getattr(grid, key)}", remedy)
    for layer, grids in experts.items():
        if len(grids) > 1:
            yield LoadProblem(
                "error",
                f"the routed experts of layer {layer} are on {len(grids)} grids, and {engine} "
                "fuses them",
                remedy,
            )


def _check_parts(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> list[LoadProblem]:
    quantized: dict[Part, str] = {}
    plain: dict[Part, str] = {}
    for row in linears:
        part = part_of(row)
        assert part is not None, row.name
        (quantized if _quantized(checkpoint, row) else plain).setdefault(part, row.module)
    refused = f"does not take {{}} quantized in {load.format} {load.variant}, as {{}} is"
    leaves = f"quantize with --engine {engine}, which leaves it in BF16"
    told = [
        LoadProblem("error", f"{engine} {refused.format(part, name)}", leaves)
        for part, name in quantized.items()
        if part not in load.may
    ]
    beside = [
        row.module
        for row in linears
        if _four_bits(checkpoint, row) and part_of(row) not in load.four_bits
    ]
    if load.four_bits and beside:
        only = f"{engine} takes int4 in {' and '.join(load.four_bits)} only, and {beside[0]} is"
        told.append(LoadProblem("error", only, f"quantize with --engine {engine}"))
    told += [
        LoadProblem(
            "error",
            f"{engine} expects every {part} linear quantized, and {module} is not",
            f"quantize with --engine {engine}",
        )
        for part, module in plain.items()
        if part in load.must
    ]
    return told


def _check_siblings(
    engine: str, load: LoadRule | MixtureRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> list[LoadProblem]:
    """Linears an engine fuses must all be quantized or all plain, and in FP4 share their global
    scale."""
    fused: dict[str, list[Parameter]] = {}
    for row in linears:
        if row.fused is not None:
            fused.setdefault(row.fused, []).append(row)
    for rows in fused.values():
        names = " and ".join(row.module for row in rows)
        if len({_quantized(checkpoint, row) for row in rows}) > 1:
            return [
                LoadProblem(
                    "error",
                    f"{names} are fused by {engine}, and only some are quantized",
                    "quantize all of them or none",
                )
            ]
        if (
            len(
                {
                    checkpoint.linears[row.module].grid
                    for row in rows
                    if row.module in checkpoint.linears
                }
            )
            > 1
        ):
            return [
                LoadProblem(
                    "error",
                    f"{names} are fused by {engine}, and on several grids",
                    "quantize them alike",
                )
            ]
    if load.fp4_siblings is None:
        return []
    if not checkpoint.has_weights:
        remedy = "download the checkpoint and check it there"
        return [
            LoadProblem(
                "warning", "global scales were not compared: only headers were read", remedy
            )
        ]
    different = [
        rows
        for rows in fused.values()
        if len({_global_scale(checkpoint, row.module) for row in rows}) > 1
    ]
    if not different:
        return []
    names = " and ".join(row.module for row in different[0])
    refused = load.fp4_siblings == "error"
    told = (
        f"{len(different)} groups of fused linears have different FP4 global scales, such as "
        f"{names}; {engine} "
    )
    told += "refuses that" if refused else "uses one of them for all, which costs accuracy"
    return [
        LoadProblem(
            "error" if refused else "warning",
            told,
            "quantize the source with quantkit, which shares them",
        )
    ]


def _check_plain_siblings(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Plain linears that the engine fuses and looks for by the fused module's name."""
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if (
        load.finds_plain is None
        or ignored is None
        or checkpoint.config.get("model_type") in load.finds_plain
    ):
        return
    plain = [
        row
        for row in linears
        if row.fused and row.expert is None and not row.mtp and not _quantized(checkpoint, row)
    ]
    lost = next(
        (row for row in plain if part_of(row) != "qkv_a" and not ignored(str(row.fused))), None
    )
    if lost is not None:
        told = (
            f"{engine} looks for {lost.fused} in the list of unquantized modules, which has "
            f"{lost.module}"
        )
        yield LoadProblem(
            "error",
            told,
            f"add the former to that list in config.json, or quantize with --engine {engine}",
        )


def _global_scale(checkpoint: Checkpoint, module: str) -> float | None:
    """The FP4 global scale as stored, by whatever name the format has for it; None where the linear
    is plain."""
    for suffix in (".weight_scale_2", ".weight_global_scale"):
        if checkpoint.has(module + suffix):
            return float(checkpoint.read(module + suffix))
    return None


def _check_mtp(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> list[LoadProblem]:
    mtp = [row for row in linears if row.mtp]
    quantized = [row for row in mtp if _quantized(checkpoint, row) and row.role == "linear"]
    plain = [row for row in mtp if not _quantized(checkpoint, row) and part_of(row) in load.may]
    off = "run it without speculative decoding, or quantize with --engine"
    if load.mtp == "plain" and quantized:
        return [
            LoadProblem(
                "warning",
                f"{engine} runs the MTP layer unquantized, and {quantized[0].module} is quantized",
                f"{off} {engine}",
            )
        ]
    if load.mtp == "quantized" and any(row.role == "linear" for row in plain):
        return [
            LoadProblem(
                "warning",
                f"{engine} expects the MTP layer quantized, and {plain[0].module} is not",
                f"{off} {engine}",
            )
        ]
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.mtp_prefix is None or ignored is None:
        return []
    for row in mtp:
        called = f"{load.mtp_prefix}.{row.within_layer}"
        if ignored(row.module) != ignored(called):
            told = (
                f"{engine} calls {row.module} {called}, which the list of unquantized modules "
                "does not cover"
            )
            return [LoadProblem("warning", told, f"list it by its ending, {off} {engine}")]
    return []


def _check_tied_head(
    engine: str, load: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: list[Parameter]
) -> Iterable[LoadProblem]:
    """A head without a tensor of its own: the engine makes a linear of it, which it must be told
    not to quantize."""
    tied = not any(row.role == "head" and not row.mtp for row in rows)
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.tied_head is not None and tied and not (ignored is not None and ignored(HEAD)):
        yield LoadProblem(
            "error",
            f"{engine} quantizes {HEAD}, which is tied to the embedding and not listed as "
            "unquantized",
            load.tied_head,
        )


def _check_keys(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    for key in load.quantization_keys:
        value = getattr(checkpoint.grid, key)
        if block.get(key) != value:
            told = (
                f"{engine} reads {key} at the top of quantization_config, where it is "
                f"{block.get(key)}"
            )
            yield LoadProblem("error", told, f'add "{key}": {value} to that block of config.json')
    said: Mapping[str, Any] = checkpoint.side.get("hf_quant_config.json", {}).get(
        "quantization", {}
    )
    if load.side_algorithms and not block and said.get("quant_algo") not in load.side_algorithms:
        told = (
            f"{engine} takes quant_algo {said.get('quant_algo')} from quantization_config in "
            "config.json only, which is not there"
        )
        yield LoadProblem(
            "error", told, "quantkit convert --format compressed-tensors, which loses nothing"
        )
    width = next(
        (row.shape[0] for row in linears if row.expert is not None and row.projection == "gate"),
        None,
    )
    group = getattr(checkpoint.grid, "group_size", None)
    if load.narrow_experts_wrong and width and group and width <= group:
        told = (
            f"{engine} mixes up scales of gate_proj and up_proj: a GPU's {width} columns of an "
            f"expert are not more than group_size {group}"
        )
        yield LoadProblem(
            "warning",
            told,
            "quantize with a smaller group_size (recipe), and share the experts out whole",
        )
