"""A checkpoint compared with one rule of an engine's profile: which linears it may and must have
quantized, what the engine fuses, how it names and lists what is not quantized."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from quantkit.checkpoint.formats.base import HEAD
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.profiles import LoadProblem, LoadRule, MixtureRule, Part, part_of
from quantkit.grids.base import Grid
from quantkit.models.table import Parameter


def check_rotations(
    engine: str, rule: LoadRule | MixtureRule, checkpoint: Checkpoint, rows: Iterable[Parameter]
) -> Iterator[LoadProblem]:
    """Inputs to rotate as the model runs, which the engine does outside of routed experts or not
    at all. Only the first is reported."""
    outside = not isinstance(rule, MixtureRule) and rule.rotates_inputs
    rotated = (
        row.module
        for row in rows
        if checkpoint.input_rotation(row.module) and not (outside and row.block != "expert")
    )
    if module := next(rotated, None):
        yield LoadProblem.error(
            f"{engine} does not rotate the inputs of {module} as the model runs, which "
            "rotation: [down] (transform_config) needs",
            "quantize without down in rotation",
        )


class RuleCheck:
    """rows: the model's table, as the checkpoint spells it."""

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
        yield from check_rotations(self.engine, rule, self.checkpoint, self.linears)

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
