"""What keeps an engine from loading a checkpoint, or loses something: headers and config.json
compared with the engine's profile."""

from collections.abc import Iterator

from quantkit.checkpoint.formats import FORMATS
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.cache_scales import check_cache, check_fp8_cache
from quantkit.engines.profiles import (
    Device,
    EngineProfile,
    LoadProblem,
    LoadRule,
    MixtureRule,
    find_choice,
    find_engine,
    part_of,
    scheme_option,
)
from quantkit.engines.rule_check import RuleCheck
from quantkit.grids.schemes import SCHEMES, Scheme
from quantkit.models import is_known
from quantkit.models.mtp import DSPARK
from quantkit.models.pangu_ultra_moe import OTHER_RELEASE_NAMES
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter

_PUBLISHED_BITS = 8
"""Width of which a scheme is named for a checkpoint without one grid: FP8, or several."""


def check_checkpoint(
    engine: str, checkpoint: Checkpoint, *, device: Device | None = None
) -> list[LoadProblem]:
    """Problems of the engine with the checkpoint; empty if none were found.

    Reads headers only, and for FP4 the global scales. Without `device`, the device with the fewest
    errors counts.
    """
    profile, format = find_engine(engine), checkpoint.format
    rules = _matching_rules(profile, checkpoint, device)
    if not rules:
        grid, where = _stored_grid(checkpoint), f" on {device}" if device else ""
        what = f"{engine} does not load {format.name} {format.variant}"
        if is_mixture(checkpoint):
            return [
                LoadProblem.error(
                    f"{what}{where}: it loads one grid per checkpoint in that format",
                    _quantize_again(engine, checkpoint, device),
                )
            ]
        reason = profile.reason(format.name, format.variant, grid, device)
        target = _format_with_reader(profile, checkpoint, device)
        remedy = _quantize_again(engine, checkpoint, device)
        if target is not None:
            remedy = f"quantkit convert {checkpoint.path} OUT --format {target}"
        return [LoadProblem.error(f"{what} of {grid}{where}: {reason}", remedy)]
    general = check_model(profile, checkpoint, format.name, format.variant)
    general += _check_drafts(profile, checkpoint)
    general += check_cache(profile, checkpoint, format.cache_codes(checkpoint.side))
    general += check_fp8_cache(profile, checkpoint)
    if any(problem.severity == "error" for problem in general):
        return general
    rows = read_model(checkpoint).rows
    found = [
        [
            *general,
            *check_shapes(engine, checkpoint, rule.devices, rows),
            *RuleCheck(engine, rule, checkpoint, rows).problems(),
        ]
        for rule in rules
    ]
    return min(
        found, key=lambda problems: [problem.severity for problem in problems].count("error")
    )


def _quantize_again(engine: str, checkpoint: Checkpoint, device: Device | None = None) -> str:
    """The command that writes what the engine loads of the checkpoint's model."""
    bits = checkpoint.grid.bits if checkpoint.grid is not None else _PUBLISHED_BITS
    only = find_engine(engine).formats.get(str(checkpoint.config.get("model_type")), ())
    for format in (None, *dict.fromkeys(one.split()[0] for one in only)):
        if schemes := loaded_schemes(engine, checkpoint, device, format):
            named = f" --format {format}" if format else ""
            return f"quantkit quantize SRC --engine {engine} {scheme_option(schemes, bits)}{named}"
    return "use another engine"


def loaded_schemes(
    engine: str, checkpoint: Checkpoint, device: Device | None = None, format: str | None = None
) -> list[Scheme]:
    """Schemes in which the engine loads the checkpoint's model, with some of it quantized, in the
    format that it prefers for each, or in `format`."""
    profile, model_type = find_engine(engine), checkpoint.config.get("model_type")
    if model_type not in profile.architectures or not is_known(checkpoint.config):
        return []
    formats, rows = profile.formats.get(str(model_type)), read_model(checkpoint).rows
    found = []
    for scheme in SCHEMES.values():
        choice = find_choice(engine, scheme, device=device, format=format)
        if (
            choice is None
            or (scheme.cache is not None and model_type not in profile.caches[scheme.cache])
            or (scheme.outside is not None and all(row.expert is None for row in rows))
        ):
            continue
        named = {choice.format, f"{choice.format} {choice.rule.variant}"}
        own = choice.of_model(model_type)
        if (formats is None or named & {*formats}) and any(own.quantizes(row) for row in rows):
            found.append(scheme)
    return found


def find_load(
    engine: str, checkpoint: Checkpoint, device: Device | None = None
) -> LoadRule | MixtureRule | None:
    """The rule by which the engine loads the checkpoint's format, if it does."""
    return next(iter(_matching_rules(find_engine(engine), checkpoint, device)), None)


def _matching_rules(
    profile: EngineProfile, checkpoint: Checkpoint, device: Device | None
) -> list[LoadRule | MixtureRule]:
    format, stored = checkpoint.format, _stored_grid(checkpoint)
    rules: list[LoadRule | MixtureRule] = (
        [*profile.mixtures]
        if is_mixture(checkpoint)
        else [rule for rule in profile.loads if stored in rule.grids]
    )
    return [
        profile.of_model(rule, checkpoint.config.get("model_type"))
        for rule in rules
        if (rule.format, rule.variant) == (format.name, format.variant)
        and (device is None or device in rule.devices)
    ]


def _format_with_reader(
    profile: EngineProfile, checkpoint: Checkpoint, device: Device | None
) -> str | None:
    """A format in which the engine reads the checkpoint's weights as they are; None if none."""
    grid = checkpoint.grid
    if grid is None:
        return None
    parts = {
        part_of(row) for row in read_model(checkpoint).rows if row.module in checkpoint.linears
    }
    for rule in profile.loads:
        holds = any(
            (one.name, one.variant) == (rule.format, rule.variant) and one.holds(grid)
            for one in FORMATS
        )
        own = profile.of_model(rule, checkpoint.config.get("model_type"))
        reads = grid.engine_name in rule.grids and parts <= {*own.may}
        if holds and reads and (device is None or device in rule.devices):
            return rule.format
    return None


def is_mixture(checkpoint: Checkpoint) -> bool:
    """Whether config.json declares a grid for each module."""
    return checkpoint.format.declared_grids(checkpoint.config) is not None


def _stored_grid(checkpoint: Checkpoint) -> str:
    if checkpoint.grid is not None:
        return checkpoint.grid.engine_name
    return "fp8" if checkpoint.linears else "dense"


def check_model(
    profile: EngineProfile, checkpoint: Checkpoint, format: str, variant: str
) -> list[LoadProblem]:
    """What keeps the engine from running the model with weights in that variant of `format`: the
    architecture, and keys of config.json."""
    engine, config = profile.engine, checkpoint.config
    model_type = config.get("model_type")
    if model_type not in profile.architectures or not is_known(config):
        known = ", ".join(profile.architectures)
        return [
            LoadProblem.error(
                f"{engine} is not known to run {model_type}", f"its profile has {known}"
            )
        ]
    formats = profile.formats.get(model_type)
    if formats is not None and not {format, f"{format} {variant}"} & {*formats}:
        return [
            LoadProblem.error(
                f"{engine} loads {model_type} in {' and '.join(formats)} only, not {format}",
                _quantize_again(engine, checkpoint),
            )
        ]
    fields = {**config, **(config.get("text_config") or {})}
    faults = [
        LoadProblem.error(
            f"config.json has {key} = {fields.get(key)!r}",
            f"set it to {value!r}: {engine} reads it",
        )
        for key, value in profile.config.get(model_type, {}).items()
        if fields.get(key) != value
    ]
    missing = [key for key in profile.reads.get(model_type, ()) if key not in fields]
    if missing:
        faults.append(
            LoadProblem.error(
                f"{engine} reads {', '.join(missing)} in config.json, which it lacks",
                f"quantkit check {checkpoint.path} --engine {engine} --repair OUT writes a copy "
                "with both names of these numbers, which two releases name differently"
                if all(OTHER_RELEASE_NAMES.get(key) in config for key in missing)
                else "use the config.json of the release that it reads",
            )
        )
    grids = dict.fromkeys(linear.grid for linear in checkpoint.linears.values() if linear.grid)
    return faults + [
        LoadProblem.error(problem, "quantize with another --group-size")
        for problem in dict.fromkeys(map(profile.unsupported_group_size, grids))
        if problem
    ]


def _check_drafts(profile: EngineProfile, checkpoint: Checkpoint) -> list[LoadProblem]:
    model_type, stored = checkpoint.config.get("model_type"), checkpoint.format
    format, block = stored.name, checkpoint.has(DSPARK)
    if profile.loads_drafts(model_type, format, stored.variant, block):
        return []
    if not any(row.mtp and checkpoint.has(row.name) for row in read_model(checkpoint).rows):
        return []
    problem = f"{profile.engine} does not load the layers of {model_type} that draft in {format}"
    return [LoadProblem.warning(problem, "run it without speculative decoding")]


def check_shapes(
    engine: str,
    checkpoint: Checkpoint,
    devices: tuple[Device, ...],
    rows: list[Parameter],
    ranks: int = 1,
) -> Iterator[LoadProblem]:
    """Linears whose inputs on one of `ranks` tensor-parallel ranks the engine's kernels do not
    take, the first of each kernel; experts have kernels of their own."""
    profile, named = find_engine(engine), set[str]()
    for row in rows:
        linear = None if row.expert is not None else checkpoint.linears.get(row.module)
        if linear is None or linear.grid is None:
            continue
        inputs = row.shape[1] // (ranks if row.split == "row" else 1)
        for device in devices:
            for rule in profile.shape_rules(checkpoint.format.name, linear.grid, device):
                if inputs % rule.inputs == 0 or rule.kernel in named:
                    continue
                named.add(rule.kernel)
                of_ranks = f", {inputs} inputs on a rank," if inputs < row.shape[1] else ""
                problem = (
                    f"{engine} computes {row.module} {list(row.shape)}{of_ranks} by {rule.kernel}, "
                    f"which takes multiples of {rule.inputs} inputs"
                )
                yield (
                    LoadProblem(
                        "warning", problem, f"start it with {' '.join(rule.launch)}", rule.launch
                    )
                    if rule.launch
                    else LoadProblem.error(
                        problem, "quantkit convert --format awq, or quantize --engine"
                    )
                )
