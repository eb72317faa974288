"""What keeps an engine from loading a checkpoint, or loses something: headers and config.json
compared with the engine's profile."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from quantkit.checkpoint.formats import FORMATS
from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.cache_scales import check_cache, check_fp8_cache
from quantkit.engines.profiles import (
    Device,
    EngineProfile,
    LoadProblem,
    LoadRule,
    MixtureRule,
    Part,
    find_engine,
    part_of,
)
from quantkit.grids.base import Grid
from quantkit.models import is_known
from quantkit.models.stored_parameters import read_model
from quantkit.models.table import Parameter


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
                    f"quantize with --engine {engine}",
                )
            ]
        reason = profile.reason(format.name, format.variant, grid, device)
        target = _format_with_reader(profile, checkpoint, device)
        remedy = f"quantize the source again with --engine {engine}"
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
            *_RuleCheck(engine, rule, checkpoint, rows).problems(),
        ]
        for rule in rules
    ]
    return min(
        found, key=lambda problems: [problem.severity for problem in problems].count("error")
    )


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
                "give --format with one of these, or use another engine",
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
                "add them: two releases of this architecture name the same numbers differently, "
                "and config.json may have both names",
            )
        )
    grids = dict.fromkeys(linear.grid for linear in checkpoint.linears.values() if linear.grid)
    return faults + [
        LoadProblem.error(problem, "quantize with another --group-size")
        for problem in dict.fromkeys(map(profile.unsupported_group_size, grids))
        if problem
    ]


def _check_drafts(profile: EngineProfile, checkpoint: Checkpoint) -> list[LoadProblem]:
    model_type, format = checkpoint.config.get("model_type"), checkpoint.format.name
    if profile.loads_drafts(model_type, format):
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


class _RuleCheck:
    """A checkpoint checked against one rule of an engine's profile."""

    def __init__(
        self,
        engine: str,
        rule: LoadRule | MixtureRule,
        checkpoint: Checkpoint,
        rows: list[Parameter],
    ) -> None:
        self.engine, self.rule, self.checkpoint, self.rows = engine, rule, checkpoint, rows
        self.linears = [
            row
            for row in rows
            if part_of(row) is not None
            and (row.module in checkpoint.linears or checkpoint.has(row.name))
        ]
        self.ignored = checkpoint.format.ignored(checkpoint.config, checkpoint.side)
        self.block: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
        self.requantize = f"quantize with --engine {engine}"

    def problems(self) -> Iterator[LoadProblem]:
        rule = self.rule
        if isinstance(rule, MixtureRule):
            yield from self._check_grids(rule)
            yield from self._check_siblings()
            yield from self._check_tied_head()
        else:
            yield from self._check_other_formats()
            yield from self._check_parts(rule)
            yield from self._check_siblings()
            yield from self._check_unquantized_siblings(rule)
            yield from self._check_mtp(rule)
            yield from self._check_tied_head()
            yield from self._check_keys(rule)
        if isinstance(rule, MixtureRule) or not rule.rotates_inputs:
            yield from self._check_rotations()

    def _is_quantized(self, row: Parameter) -> bool:
        """Whether it is in the checkpoint's own format, the only one that an engine knows."""
        linear = self.checkpoint.linears.get(row.module)
        return linear is not None and linear.format is self.checkpoint.format

    def _grid(self, row: Parameter) -> Grid | None:
        linear = self.checkpoint.linears.get(row.module)
        return None if linear is None else linear.grid

    def _check_other_formats(self) -> Iterator[LoadProblem]:
        """Linears declared unquantized that are stored in another format, which the engine would
        read as unquantized."""
        linears, found = self.checkpoint.linears, dict[bool, str]()
        for row in self.linears:
            if row.module in linears and not self._is_quantized(row):
                found.setdefault(row.mtp, row.module)
        for mtp, module in sorted(found.items()):
            problem = (
                f"{self.engine} reads {module} as unquantized, and it is "
                f"{linears[module].format.name}"
            )
            remedy = "quantkit convert to another format, which decodes it to BF16"
            yield (
                LoadProblem.warning(problem, f"run it without speculative decoding, or {remedy}")
                if mtp
                else LoadProblem.error(problem, remedy)
            )

    def _check_rotations(self) -> Iterator[LoadProblem]:
        """Inputs to rotate as the model runs, which the engine does not."""
        rotated = (row.module for row in self.linears if self.checkpoint.input_rotation(row.module))
        if module := next(rotated, None):
            yield LoadProblem.error(
                f"{self.engine} does not rotate the inputs of {module}, as transform_config asks",
                "quantize without down in rotation",
            )

    def _check_grids(self, rule: MixtureRule) -> Iterator[LoadProblem]:
        """Every linear must be on a grid that the engine accepts for it, and all routed experts of
        a layer on one grid."""
        checked: set[tuple[Part | None, Grid]] = set()
        experts: dict[int | None, set[Grid | None]] = {}
        for row in self.linears:
            grid, part = self._grid(row), part_of(row)
            if row.block == "expert":
                experts.setdefault(row.layer, set()).add(grid)
            if grid is None or (part, grid) in checked:
                continue
            checked.add((part, grid))
            if part not in rule.parts_on(grid):
                yield LoadProblem.error(
                    f"{self.engine} does not take {part} in {grid.engine_name}, as {row.module} is",
                    self.requantize,
                )
            for key in rule.quantization_keys if grid.kind == "int4" else ():
                if self.block.get(key) != getattr(grid, key):
                    yield LoadProblem.error(
                        f"{self.engine} reads {key} at the top of quantization_config, where it is "
                        f"{self.block.get(key)}, and {row.module} has {getattr(grid, key)}",
                        self.requantize,
                    )
        for layer, grids in experts.items():
            if len(grids) > 1:
                yield LoadProblem.error(
                    f"the routed experts of layer {layer} are on {len(grids)} grids, and "
                    f"{self.engine} fuses them",
                    self.requantize,
                )

    def _check_parts(self, rule: LoadRule) -> Iterator[LoadProblem]:
        quantized: dict[Part | None, str] = {}
        unquantized: dict[Part | None, str] = {}
        for row in self.linears:
            parts = quantized if self._is_quantized(row) else unquantized
            parts.setdefault(part_of(row), row.module)
        for part, module in quantized.items():
            if part not in rule.may:
                yield LoadProblem.error(
                    f"{self.engine} does not take {part} quantized in {rule.format} "
                    f"{rule.variant}, as {module} is",
                    f"{self.requantize}, which keeps it in BF16",
                )
        for row in self.linears if rule.four_bits else ():
            if part_of(row) in rule.four_bits or not self._is_quantized(row):
                continue
            if (grid := self._grid(row)) is not None and grid.kind == "int4":
                yield LoadProblem.error(
                    f"{self.engine} takes int4 in {' and '.join(rule.four_bits)} only, and "
                    f"{row.module} is",
                    self.requantize,
                )
                break
        for part, module in unquantized.items():
            if part in rule.must:
                yield LoadProblem.error(
                    f"{self.engine} expects every {part} linear quantized, and {module} is not",
                    self.requantize,
                )

    @cached_property
    def _fused(self) -> list[list[Parameter]]:
        fused: dict[str, list[Parameter]] = {}
        for row in self.linears:
            if row.fused is not None:
                fused.setdefault(row.fused, []).append(row)
        return list(fused.values())

    def _check_siblings(self) -> Iterator[LoadProblem]:
        """Linears that an engine fuses must be all quantized or all unquantized, and in FP4 share
        their global scale. Only the first fault is reported."""
        linears = self.checkpoint.linears
        for rows in self._fused:
            problem = f"{' and '.join(row.module for row in rows)} are fused by {self.engine}, and "
            if len({self._is_quantized(row) for row in rows}) > 1:
                yield LoadProblem.error(
                    f"{problem}only some are quantized", "quantize all of them or none"
                )
                return
            if len({linears[row.module].grid for row in rows if row.module in linears}) > 1:
                yield LoadProblem.error(
                    f"{problem}on several grids", "quantize them on the same grid"
                )
                return
        if self.rule.fp4_siblings is None:
            return
        if not self.checkpoint.has_weights:
            yield LoadProblem.warning(
                "global scales were not compared: only headers were read",
                "download the checkpoint and check it there",
            )
            return
        different = [
            rows for rows in self._fused if len({self._global_scale(row) for row in rows}) > 1
        ]
        if different:
            problem = (
                f"{len(different)} groups of fused linears have different FP4 global scales, such "
                f"as {' and '.join(row.module for row in different[0])}; {self.engine} "
            )
            remedy = "quantize the source with quantkit, which shares them"
            yield (
                LoadProblem.error(f"{problem}refuses that", remedy)
                if self.rule.fp4_siblings == "error"
                else LoadProblem.warning(
                    f"{problem}uses one of them for all, which costs accuracy", remedy
                )
            )

    def _global_scale(self, row: Parameter) -> float | None:
        """The FP4 global scale as stored, under any format's name; None if the linear is
        unquantized."""
        for suffix in (".weight_scale_2", ".weight_global_scale"):
            if self.checkpoint.has(row.module + suffix):
                return float(self.checkpoint.read(row.module + suffix))
        return None

    def _check_unquantized_siblings(self, rule: LoadRule) -> Iterator[LoadProblem]:
        """Unquantized fused linears that the engine looks up by the name of the fused module."""
        ignored = self.ignored
        if (
            rule.finds_unquantized is None
            or ignored is None
            or self.checkpoint.config.get("model_type") in rule.finds_unquantized
        ):
            return
        for row in self.linears:
            if row.fused is None or row.expert is not None or row.mtp or self._is_quantized(row):
                continue
            if part_of(row) != "qkv_a" and not ignored(row.fused):
                yield LoadProblem.error(
                    f"{self.engine} looks for {row.fused} in the list of unquantized modules, "
                    f"which has {row.module}",
                    f"add the former to that list in config.json, or {self.requantize}",
                )
                return

    def _check_mtp(self, rule: LoadRule) -> Iterator[LoadProblem]:
        """Only the first fault is reported."""
        rows = [row for row in self.linears if row.mtp]
        quantized = [row for row in rows if self._is_quantized(row) and row.role == "linear"]
        unquantized = [
            row for row in rows if not self._is_quantized(row) and part_of(row) in rule.may
        ]
        remedy = f"run it without speculative decoding, or {self.requantize}"
        if rule.mtp == "plain" and quantized:
            yield LoadProblem.warning(
                f"{self.engine} runs the MTP layer unquantized, and {quantized[0].module} is "
                "quantized",
                remedy,
            )
        elif rule.mtp == "quantized" and any(row.role == "linear" for row in unquantized):
            yield LoadProblem.warning(
                f"{self.engine} expects the MTP layer quantized, and {unquantized[0].module} is not",
                remedy,
            )
        elif rule.mtp_prefix is not None and (ignored := self.ignored) is not None:
            for row in rows:
                name = f"{rule.mtp_prefix}.{row.within_layer}"
                if ignored(row.module) != ignored(name):
                    yield LoadProblem.warning(
                        f"{self.engine} calls {row.module} {name}, which the list of unquantized "
                        "modules does not cover",
                        f"list it by its ending, {remedy}",
                    )
                    return

    def _check_tied_head(self) -> Iterator[LoadProblem]:
        """A head without a tensor of its own: the engine builds a linear for it, which must be
        listed as unquantized."""
        tied = not any(row.role == "head" and not row.mtp for row in self.rows)
        listed = self.ignored is not None and self.ignored(HEAD)
        if self.rule.tied_head is not None and tied and not listed:
            yield LoadProblem.error(
                f"{self.engine} quantizes {HEAD}, which is tied to the embedding and not listed as "
                "unquantized",
                self.rule.tied_head,
            )

    def _check_keys(self, rule: LoadRule) -> Iterator[LoadProblem]:
        grid = self.checkpoint.grid
        for key in rule.quantization_keys:
            value = getattr(grid, key)
            if self.block.get(key) != value:
                yield LoadProblem.error(
                    f"{self.engine} reads {key} at the top of quantization_config, where it is "
                    f"{self.block.get(key)}",
                    f'add "{key}": {value} to that block of config.json',
                )
        opt_file = self.checkpoint.side.get("hf_quant_config.json", {})
        algorithm = opt_file.get("quantization", {}).get("quant_algo")
        if rule.side_algorithms and not self.block and algorithm not in rule.side_algorithms:
            yield LoadProblem.error(
                f"{self.engine} takes quant_algo {algorithm} from quantization_config in "
                "config.json only, which is not there",
                "quantkit convert --format compressed-tensors, which loses nothing",
            )
        gates = (row for row in self.linears if row.expert is not None and row.projection == "gate")
        width = next((row.shape[0] for row in gates), None)
        group = getattr(grid, "group_size", None)
        if rule.narrow_experts_wrong and width and group and width <= group:
            yield LoadProblem.warning(
                f"{self.engine} mixes up scales of gate_proj and up_proj: {width} columns of an "
                f"expert per GPU are not more than group_size {group}",
                "quantize with a smaller --group-size, or use a layout with experts over all devices",
            )
