"""What keeps an engine from loading a checkpoint, or loses something: headers and config.json
compared with the engine's profile."""

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
    """Problems of the engine with the checkpoint; empty if none were found.

    Reads headers only, and for FP4 the global scales. Without `device`, the device with the fewest
    errors counts.
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
                    (
                        f"{engine} does not load {what}{where}: it loads one grid per checkpoint in "
                        "that format"
                    ),
                    remedy,
                )
            ]
    if not loads:
        reason = profile.reason(
            checkpoint.format.name, checkpoint.format.variant, _stored_grid(checkpoint), device
        )
        opt_quantization = (
            f"{engine} does not load {checkpoint.format.name} {checkpoint.format.variant} of "
            f"{_stored_grid(checkpoint)}"
        )
        where = f" on {device}" if device else ""
        return [
            LoadProblem(
                "error",
                f"{opt_quantization}{where}: {reason}",
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
    """Whether config.json declares a grid for each module."""
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
    """What keeps the engine from running the model with weights in `format`: the architecture, and
    keys of config.json."""
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
            f"set it to {value!r}: {profile.engine} reads it",
        )
        for key, value in profile.config.get(model_type, {}).items()
        if checkpoint.config.get(key) != value
    ]
    missing = [key for key in profile.reads.get(model_type, ()) if key not in checkpoint.config]
    if missing:
        names = ", ".join(missing)
        remedy = (
            "add them: two releases of this architecture name the same numbers "
            "differently, and config.json may have both names"
        )
        faults.append(
            LoadProblem(
                "error", f"{profile.engine} reads {names} in config.json, which it lacks", remedy
            )
        )
    group_faults = {
        profile.unsupported_group_size(linear.grid): None
        for linear in checkpoint.linears.values()
        if linear.grid is not None
    }
    return [
        *faults,
        *(
            LoadProblem("error", problem, "quantize with another --group-size")
            for problem in group_faults
            if problem
        ),
    ]


def check_cache(
    profile: EngineProfile, checkpoint: Checkpoint, codes: CacheCodes | None
) -> list[LoadProblem]:
    """What keeps the engine from an 8-bit cache of this model with scales from the checkpoint."""
    supported = () if codes is None else profile.caches.get(codes, ())
    if codes is None or checkpoint.config.get("model_type") in supported:
        return []
    problem = (
        f"{profile.engine} reads no scales of an {codes} cache of "
        f"{checkpoint.config.get('model_type')}"
    )
    return [
        LoadProblem(
            "error",
            problem,
            f"quantize to int8-a8w8c16; it reads them for {', '.join(supported)}"
            if supported
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
        *_check_other_formats(engine, checkpoint, linears),
        *_check_parts(engine, load, checkpoint, linears),
        *_check_siblings(engine, load, checkpoint, linears),
        *_check_unquantized_siblings(engine, load, checkpoint, linears),
        *_check_mtp(engine, load, checkpoint, linears),
        *_check_tied_head(engine, load, checkpoint, rows),
        *_check_keys(engine, load, checkpoint, linears),
    ]


def _check_other_formats(
    engine: str, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Linears declared unquantized that are stored in another format, which the engine would read
    as unquantized."""
    other_format = [
        row
        for row in linears
        if row.module in checkpoint.linears and not _is_quantized(checkpoint, row)
    ]
    for mtp in (False, True):
        first = next((row.module for row in other_format if row.mtp == mtp), None)
        if first is not None:
            problem = (
                f"{engine} reads {first} as unquantized, and it is "
                f"{checkpoint.linears[first].format.name}"
            )
            remedy = "quantkit convert to another format, which decodes it to BF16"
            yield (
                LoadProblem("warning", problem, f"run it without speculative decoding, or {remedy}")
                if mtp
                else LoadProblem("error", problem, remedy)
            )


def _is_int4(checkpoint: Checkpoint, row: Parameter) -> bool:
    return (
        _is_quantized(checkpoint, row)
        and (grid := checkpoint.linears[row.module].grid) is not None
        and grid.kind == "int4"
    )


def _is_quantized(checkpoint: Checkpoint, row: Parameter) -> bool:
    """Whether it is in the checkpoint's own format, the only one that an engine knows."""
    linear = checkpoint.linears.get(row.module)
    return linear is not None and linear.format is checkpoint.format


def _check_grids(
    engine: str, load: MixtureRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Every linear must be on a grid that the engine accepts for it, and all routed experts of a
    layer on one grid."""
    remedy = f"quantize with --engine {engine}"
    checked: set[tuple[Part | None, Grid]] = set()
    experts: dict[int | None, set[Grid | None]] = {}
    block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    for row in linears:
        linear = checkpoint.linears.get(row.module)
        grid = None if linear is None else linear.grid
        if row.block == "expert":
            experts.setdefault(row.layer, set()).add(grid)
        if grid is None or (part_of(row), grid) in checked:
            continue
        checked.add((part_of(row), grid))
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
                    f"{block.get(key)}, and {row.module} has {getattr(grid, key)}"
                )
                yield LoadProblem("error", problem, remedy)
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
    unquantized: dict[Part, str] = {}
    for row in linears:
        part = part_of(row)
        assert part is not None, row.name
        (quantized if _is_quantized(checkpoint, row) else unquantized).setdefault(part, row.module)
    is_error = f"does not take {{}} quantized in {load.format} {load.variant}, as {{}} is"
    remedy = f"quantize with --engine {engine}, which keeps it in BF16"
    problem = [
        LoadProblem("error", f"{engine} {is_error.format(part, name)}", remedy)
        for part, name in quantized.items()
        if part not in load.may
    ]
    int4_elsewhere = [
        row.module
        for row in linears
        if _is_int4(checkpoint, row) and part_of(row) not in load.four_bits
    ]
    if load.four_bits and int4_elsewhere:
        evidence = f"{engine} takes int4 in {' and '.join(load.four_bits)} only, and {int4_elsewhere[0]} is"
        problem.append(LoadProblem("error", evidence, f"quantize with --engine {engine}"))
    problem += [
        LoadProblem(
            "error",
            f"{engine} expects every {part} linear quantized, and {module} is not",
            f"quantize with --engine {engine}",
        )
        for part, module in unquantized.items()
        if part in load.must
    ]
    return problem


def _check_siblings(
    engine: str, load: LoadRule | MixtureRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> list[LoadProblem]:
    """Linears that an engine fuses must be all quantized or all unquantized, and in FP4 share their
    global scale."""
    fused: dict[str, list[Parameter]] = {}
    for row in linears:
        if row.fused is not None:
            fused.setdefault(row.fused, []).append(row)
    for rows in fused.values():
        names = " and ".join(row.module for row in rows)
        if len({_is_quantized(checkpoint, row) for row in rows}) > 1:
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
                    "quantize them on the same grid",
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
    is_error = load.fp4_siblings == "error"
    problem = (
        f"{len(different)} groups of fused linears have different FP4 global scales, such as "
        f"{names}; {engine} "
    )
    problem += "refuses that" if is_error else "uses one of them for all, which costs accuracy"
    return [
        LoadProblem(
            "error" if is_error else "warning",
            problem,
            "quantize the source with quantkit, which shares them",
        )
    ]


def _check_unquantized_siblings(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    """Unquantized fused linears that the engine looks up by the name of the fused module."""
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if (
        load.finds_plain is None
        or ignored is None
        or checkpoint.config.get("model_type") in load.finds_plain
    ):
        return
    unquantized = [
        row
        for row in linears
        if row.fused and row.expert is None and not row.mtp and not _is_quantized(checkpoint, row)
    ]
    unlisted = next(
        (row for row in unquantized if part_of(row) != "qkv_a" and not ignored(str(row.fused))),
        None,
    )
    if unlisted is not None:
        problem = (
            f"{engine} looks for {unlisted.fused} in the list of unquantized modules, which has "
            f"{unlisted.module}"
        )
        yield LoadProblem(
            "error",
            problem,
            f"add the former to that list in config.json, or quantize with --engine {engine}",
        )


def _global_scale(checkpoint: Checkpoint, module: str) -> float | None:
    """The FP4 global scale as stored, under any format's name; None if the linear is
    unquantized."""
    for suffix in (".weight_scale_2", ".weight_global_scale"):
        if checkpoint.has(module + suffix):
            return float(checkpoint.read(module + suffix))
    return None


def _check_mtp(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> list[LoadProblem]:
    mtp = [row for row in linears if row.mtp]
    quantized = [row for row in mtp if _is_quantized(checkpoint, row) and row.role == "linear"]
    unquantized = [
        row for row in mtp if not _is_quantized(checkpoint, row) and part_of(row) in load.may
    ]
    workaround = "run it without speculative decoding, or quantize with --engine"
    if load.mtp == "plain" and quantized:
        return [
            LoadProblem(
                "warning",
                f"{engine} runs the MTP layer unquantized, and {quantized[0].module} is quantized",
                f"{workaround} {engine}",
            )
        ]
    if load.mtp == "quantized" and any(row.role == "linear" for row in unquantized):
        return [
            LoadProblem(
                "warning",
                f"{engine} expects the MTP layer quantized, and {unquantized[0].module} is not",
                f"{workaround} {engine}",
            )
        ]
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.mtp_prefix is None or ignored is None:
        return []
    for row in mtp:
        engine_name = f"{load.mtp_prefix}.{row.within_layer}"
        if ignored(row.module) != ignored(engine_name):
            problem = (
                f"{engine} calls {row.module} {engine_name}, which the list of unquantized modules "
                "does not cover"
            )
            return [
                LoadProblem("warning", problem, f"list it by its ending, {workaround} {engine}")
            ]
    return []


def _check_tied_head(
    engine: str, load: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: list[Parameter]
) -> Iterable[LoadProblem]:
    """A head without a tensor of its own: the engine builds a linear for it, which must be listed
    as unquantized."""
    tied = not any(row.role == "head" and not row.mtp for row in rows)
    ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
    if load.tied_head is not None and tied and not (ignored is not None and ignored(HEAD)):
        yield LoadProblem(
            "error",
            (
                f"{engine} quantizes {HEAD}, which is tied to the embedding and not listed as "
                "unquantized"
            ),
            load.tied_head,
        )


def _check_keys(
    engine: str, load: LoadRule, checkpoint: Checkpoint, linears: list[Parameter]
) -> Iterable[LoadProblem]:
    block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    for key in load.quantization_keys:
        value = getattr(checkpoint.grid, key)
        if block.get(key) != value:
            problem = (
                f"{engine} reads {key} at the top of quantization_config, where it is "
                f"{block.get(key)}"
            )
            yield LoadProblem(
                "error", problem, f'add "{key}": {value} to that block of config.json'
            )
    opt_quantization: Mapping[str, Any] = checkpoint.side.get("hf_quant_config.json", {}).get(
        "quantization", {}
    )
    if (
        load.side_algorithms
        and not block
        and opt_quantization.get("quant_algo") not in load.side_algorithms
    ):
        problem = (
            f"{engine} takes quant_algo {opt_quantization.get('quant_algo')} from quantization_config in "
            "config.json only, which is not there"
        )
        yield LoadProblem(
            "error", problem, "quantkit convert --format compressed-tensors, which loses nothing"
        )
    width = next(
        (row.shape[0] for row in linears if row.expert is not None and row.projection == "gate"),
        None,
    )
    group = getattr(checkpoint.grid, "group_size", None)
    if load.narrow_experts_wrong and width and group and width <= group:
        problem = (
            f"{engine} mixes up scales of gate_proj and up_proj: {width} columns of an "
            f"expert per GPU are not more than group_size {group}"
        )
        yield LoadProblem(
            "warning",
            problem,
            "quantize with a smaller group_size (recipe), or use expert parallelism",
        )
