"""The tensor depth of a check: every stored byte is streamed, and each tensor is checked by itself
and against others of its kind.

One linear is in memory at a time, and survey.BLOCK bytes of unquantized tensors.
"""

import itertools
from collections.abc import Container, Mapping
from dataclasses import replace
from statistics import median, median_low

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.gptq import Gptq, in_order
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis import Findings
from quantkit.diagnosis.description import Description
from quantkit.diagnosis.measures import (
    CONSTANT_SHARE,
    LARGEST_GAIN,
    Measures,
    code_faults,
    fp8_at_end,
    measure,
    not_finite,
    outlier_block,
    outlier_group,
)
from quantkit.diagnosis.sampled_rows import SampledRows, read_parts, sample_rows
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.unquantized import (
    IS_ACTIVATION_SCALE,
    ActivationScaleCheck,
    UnquantizedCheck,
)

_ABSURD = 1e3
"""Factor by which the size of a linear, or of a row, differs from its kind."""
_SMALL = 1 / 32
"""Fraction of the usual size of its kind below which a linear has almost no effect."""
_COMMON_SCALE, _USUAL_COMMON_SCALE = 0.9, 0.5
"""Share of the most common scale in a linear that is suspicious, and the largest usual share of its
kind."""
_RELATIVE_FINDINGS = (
    "codes-constant",
    "scales-absurd",
    "linears-equal",
    "gate-up-exchanged",
    "zero-points-off",
    "codes-shifted",
    "codes-saturated",
)
"""Findings by comparison with what is usual: not faults if the source is the same."""
_FP8_AT_END = 0.04
"""Share of FP8 codes at the end of the range; a block or a row of 64 has one."""
_FP8_SCALES = (".weight_scale", ".weight_scale_inv")
_RUN = 512
"""Bytes of codes that are not all zero by chance."""


class TensorCheck:
    """Collects faults of tensors: call unquantized() or linear() for each, then finish()."""

    def __init__(
        self, survey: Survey, structure: Structure, description: Description, findings: Findings
    ) -> None:
        self.survey, self.description, self.findings = survey, description, findings
        self.expert = {
            row.module: (row.layer, row.expert) for row in structure.rows if row.expert is not None
        }
        ups = {
            (row.layer, row.expert): row.module for row in structure.rows if row.projection == "up"
        }
        self.up_of = {
            row.module: ups.get((row.layer, row.expert))
            for row in structure.rows
            if row.expert is not None and row.projection == "gate"
        }
        self.chained: dict[str, str] = {}
        for group in structure.scale_groups:
            if not group.producer_is_norm and len(group.consumers) == 1:
                self.chained |= {
                    group.producer: group.consumers[0],
                    group.consumers[0]: group.producer,
                }
        self.fused = {row.module: row.fused for row in structure.rows if row.fused is not None}
        self.global_scales: dict[str, dict[str, float]] = {}
        self.measures: dict[str, Measures] = {}
        self.offsets: dict[str, float] = {}
        self.inverted: list[str] = []
        self.recorded: dict[str, list[tuple[str, str]]] = {}
        block = survey.config.get("quantization_config") if description.linears else None
        self.says_symmetric = isinstance(block, dict) and block.get("sym") is True
        self.unquantized_check = UnquantizedCheck(survey, structure, findings)
        self.activation_scales = ActivationScaleCheck()

    def record(self, name: str, module: str, evidence: str) -> None:
        """Findings of one name are reported together, with the evidence of the first."""
        self.recorded.setdefault(name, []).append((module, evidence))

    def finish(self, matching: Container[str] = ()) -> None:
        """Report the faults. matching: modules that equal the source, where unusual values are not
        faults."""
        self._compare()
        self.unquantized_check.finish(matching)
        self.activation_scales.finish(self.findings)
        for name in self.recorded.keys() & set(_RELATIVE_FINDINGS):
            entries = self.recorded[name]
            self.recorded[name] = [entry for entry in entries if entry[0] not in matching]
        self.findings.add_groups(self.recorded)
        self.recorded.clear()

    def unquantized(self, name: str) -> None:
        """Check a tensor that is not part of a quantized linear."""
        if not self.survey.tensors[name].dtype.is_floating_point:
            return
        bad = 0
        for part in self.survey.blocks(self.survey.tensors[name]):
            bad += not_finite(part)
            if IS_ACTIVATION_SCALE.fullmatch(name) and not bad:
                self.activation_scales.add(name, part)
            elif not bad:
                self.unquantized_check.add(name, part)
        if bad:
            self.record("values-not-finite", name, f"{bad} values are NaN or infinite")
        self.unquantized_check.end_tensor(name)

    def linear(self, module: str, linear: QuantizedLinear) -> SampledRows | None:
        """Check the parts of a quantized linear and its sampled rows. None if they cannot be
        decoded."""
        tensors = read_parts(self.survey, linear)
        if not self._are_finite(tensors):
            return None  # what they measure follows from that
        self._check_index(module, linear, tensors)
        try:
            rows = sample_rows(module, linear, tensors)
        except QuantkitError as fault:
            self.record("codes-unreadable", module, fault.problem)
            return None
        live = rows.live
        found = measure(live, tensors)
        codes = tensors[linear.format.main_tensor(module, tensors)]
        if live.codes is None and (share := fp8_at_end(codes)) > _FP8_AT_END:
            self.record("codes-saturated", module, f"{share:.1%} of its codes are the largest")
        if self._are_lost(module, linear, rows, tensors):
            return rows
        zero_rows = float((rows.values == 0).all(1).float().mean()) if live.codes is None else 0.0
        self.measures[module] = found = replace(found, zero_rows=zero_rows)
        padding = 1 - live.values.numel() / rows.values.numel()
        self._check_scales(module, linear, live, tensors)
        if self._is_filled(module, linear, tensors, padding if found.rms else 1.0):
            for name, evidence in code_faults(linear, live, found, symmetric=self.says_symmetric):
                self.record(name, module, evidence)
        return rows

    def _are_lost(
        self,
        module: str,
        linear: QuantizedLinear,
        rows: SampledRows,
        tensors: Mapping[str, Tensor],
    ) -> bool:
        """Weights are lost where a scale is zero and its codes are not; whether most are, from
        which all that they measure follows. FP4's smallest scales may be zero."""
        if rows.scale is None or rows.codes is None or rows.of_group is None:
            scales = [one for name, one in tensors.items() if name.endswith(_FP8_SCALES)]
            lost = bool(scales) and not any(bool(one.any()) for one in scales)
            if lost:
                self.record("scales-zero", module, "all its scales are zero")
            return lost
        held = rows.group_means((rows.centred(rows.codes) != 0).float()) > 0
        share = float((held & (rows.scale == 0)).float().mean())
        if share > (1e-4 if linear.grid is not None and linear.grid.is_integer else 0.05):
            evidence = f"{share:.2%} of its scales are zero, and their codes are not"
            self.record("scales-zero", module, evidence)
        return share > 0.5

    def _are_finite(self, tensors: dict[str, Tensor]) -> bool:
        floats = {name: one for name, one in tensors.items() if one.dtype.is_floating_point}
        bad = {name: count for name, one in floats.items() if (count := not_finite(one))}
        for name, count in bad.items():
            self.record("values-not-finite", name, f"{count} values are NaN or infinite")
        for name in floats.keys() - bad.keys():
            if IS_ACTIVATION_SCALE.fullmatch(name):
                self.activation_scales.add(name, tensors[name])
        return not bad

    def _is_filled(
        self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor], padding: float
    ) -> bool:
        """Bytes that were never written are zeros, a run of lowest codes in packed words; and the
        stored shape. padding: share of weights that are zero, whose codes may be."""
        shape = tensors.get(f"{module}.weight_shape")
        if shape is not None and tuple(shape.tolist()) != linear.shape:
            self.record(
                "part-malformed",
                f"{module}.weight_shape",
                f"it says {shape.tolist()}, and the codes have {list(linear.shape)}",
            )
        codes = tensors.get(linear.format.main_tensor(module, tensors))
        if codes is None or codes.dtype != torch.int32:
            return True
        flat = codes.contiguous().view(-1).view(torch.uint8)
        runs = int(
            (flat[: len(flat) // _RUN * _RUN].view(torch.int64).view(-1, _RUN // 8) == 0)
            .all(1)
            .sum()
        )
        # The share is that of sampled rows.
        filled = runs * _RUN <= (padding + 0.1 if padding else 0.0) * len(flat)
        if not filled:
            self.record(
                "codes-constant",
                module,
                f"{runs * _RUN:,} bytes of its codes in runs of {_RUN} are zero: they were "
                "never written",
            )
        return filled

    def _check_index(
        self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]
    ) -> None:
        """GPTQ's groups of inputs: all of one size, and in order unless the description says
        otherwise."""
        g_idx = tensors.get(f"{module}.g_idx")
        format = linear.format.member(module)
        if g_idx is None or not isinstance(format, Gptq):
            return
        count = tensors[f"{module}.scales"].shape[0]
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= count:
            self.record(
                "act-order-wrong",
                f"{module}.g_idx",
                f"it names group {int(g_idx.max())}, and there are {count}",
            )
            return
        members = torch.bincount(g_idx.long(), minlength=count)
        if not in_order(g_idx, count) and not format.desc_act:
            self.record(
                "act-order-wrong",
                f"{module}.g_idx",
                "inputs are not in the order of their groups, and desc_act is false",
            )
        elif int(members.max()) != int(members.min()) and (format.desc_act or bool(g_idx.any())):
            evidence = f"a group has {int(members.max())} inputs and another {int(members.min())}"
            self.record("act-order-wrong", f"{module}.g_idx", evidence)
        elif format.desc_act and count > 1 and not bool(g_idx.any()):
            self.record(
                "act-order-wrong", f"{module}.g_idx", "it is all zeros, and desc_act is true"
            )

    def _check_scales(
        self, module: str, linear: QuantizedLinear, rows: SampledRows, tensors: dict[str, Tensor]
    ) -> None:
        found = self.measures[module]
        inverse = _global_scale(module, tensors)
        if inverse is not None and module in self.fused:
            self.global_scales.setdefault(self.fused[module], {})[module] = inverse[1]
        if inverse is not None and found.rms > 100:
            evidence = (
                f"values have a root mean square of {found.rms:.1e}; with the inverse of "
                f"{inverse[0]} = {inverse[1]:.3g} "
            )
            evidence += f"{inverse[2] * found.rms:.1e}"
            self.inverted.append(module)
            self.record("global-scale-inverted", module, evidence)
            return
        blocks = tensors.get(f"{module}.weight_scale_inv")
        if (
            evidence := outlier_block(blocks)
            if blocks is not None and blocks.dim() == 2
            else outlier_group(rows)
        ):
            self.record("scales-absurd", module, evidence)
        if rows.scale is None or rows.codes is None or rows.of_group is None:
            return
        integer = linear.grid is not None and linear.grid.is_integer
        negative = float((rows.scale < 0).float().mean())
        if negative and not integer:
            self.record(
                "scales-absurd",
                module,
                f"{negative:.2%} of its scales are negative, and FP4 scales have no sign",
            )
        are_ones = rows.scale.numel() > 1 and bool((rows.scale == 1).all())
        if integer and are_ones and found.rms > 0:
            self.record("scales-absurd", module, "all its scales are 1: they were not written")
        size = rows.scale.abs()
        usual = float(size.median())
        if usual > 0 and float(size.max()) > _ABSURD * usual:
            self.record(
                "scales-absurd",
                module,
                f"a scale is {float(size.max()) / usual:.0f} times the median scale",
            )

    def _compare(self) -> None:
        self._compare_sizes()
        self._compare_zeros()
        self._compare_scales()
        self._compare_offsets()
        self._find_equal()
        self._compare_gates()
        self._compare_global_scales()

    def _kinds(self) -> dict[tuple[str, bool], list[str]]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for module in self.measures:
            kinds.setdefault((module.rpartition(".")[2], module in self.expert), []).append(module)
        return kinds

    def _compare_sizes(self) -> None:
        inactive: dict[tuple[int | None, int | None], list[str]] = {}
        sizes: dict[str, float] = {}
        least = _SMALL**2 if self.unquantized_check.rotated else _SMALL  # gains of norms differ
        for modules in self._kinds().values():
            usual = median(self.measures[module].rms for module in modules)
            if len(modules) > 2 and usual > 0:
                sizes |= {module: self.measures[module].rms / usual for module in modules}
        for module, found in self.measures.items():
            if module in self.inverted:
                continue
            size = sizes.get(module, 1.0)
            # What scales moved from one linear to the next, both have together.
            if least < size * sizes.get(self.chained.get(module, ""), 1.0) < 1 / least:
                size = 1.0
            if size < _SMALL and module in self.expert:
                inactive.setdefault(self.expert[module], []).append(module)
            elif evidence := self._size_fault(module, found, size):
                self.record("scales-absurd", module, evidence)
        for expert, modules in inactive.items():
            self._report_inactive(
                modules, len([one for one in self.measures if self.expert.get(one) == expert])
            )

    def _compare_zeros(self) -> None:
        """Inputs and outputs that are padding are so in all layers."""
        for modules, what in itertools.product(self._kinds().values(), ("columns", "rows")):
            shares = {one: getattr(self.measures[one], f"zero_{what}") for one in modules}
            usual = median_low(shares.values())
            for module, zeros in shares.items():
                if usual + CONSTANT_SHARE < zeros < 1:
                    evidence = f"{zeros:.1%} of its {what} are zeros, and {usual:.1%} of others'"
                    self.record("codes-constant", module, evidence)

    def _size_fault(self, module: str, found: Measures, size: float) -> str:
        """size: relative to the usual one of its kind, 1 if that is unknown."""
        if found.rms == 0:
            self.record("codes-constant", module, "all its values are zero")
            return ""
        if not _SMALL < size < 1 / _SMALL:
            return f"its values are {size:.3g} times the size of others of its kind"
        if (
            found.rms < 1e-9
            or found.rms * max(self.description.linears[module].shape[1], 1) ** 0.5 > LARGEST_GAIN
        ):
            return f"its values have a root mean square of {found.rms:.1e}"
        return (
            f"a row is {found.outlier:.0f} times the median row" if found.outlier > _ABSURD else ""
        )

    def _report_inactive(self, modules: list[str], of: int) -> None:
        """Experts that hardly any token is routed to may have tiny weights: then all their linears
        do, and were written."""
        first = self.measures[modules[0]]
        if len(modules) == of and not any(self.measures[module].unwritten for module in modules):
            self.findings.add(
                "expert-silent",
                modules,
                f"its values have a root mean square of {first.rms:.1e}: it has almost no effect",
            )
            return
        for module in modules:
            found = self.measures[module]
            name = "scales-absurd" if found.rms else "codes-constant"
            self.record(
                name,
                module,
                f"its values have a root mean square of {found.rms:.1e}, unlike others of its kind",
            )

    def _compare_scales(self) -> None:
        """Scales of groups vary as the weights do; scales of rows may be equal if the writer uses
        one per linear."""
        for modules in self._kinds().values():
            usual = median(self.measures[module].common_scale for module in modules)
            for module in modules:
                grid = self.description.linears[module].grid
                grouped = grid is not None and grid.group_size is not None and not grid.power_scales
                common_scale = self.measures[module].common_scale
                if (
                    common_scale > _COMMON_SCALE
                    and (grouped or usual < _USUAL_COMMON_SCALE)
                    and self.measures[module].commonest < 0.98
                ):
                    self.record(
                        "scales-absurd", module, (f"{common_scale:.0%} of its scales are one value")
                    )

    def _compare_offsets(self) -> None:
        """Weights have a mean near zero, and so has code minus zero point unless zero points are
        off by one."""
        off: dict[int, list[str]] = {1: [], -1: []}
        for module, found in self.measures.items():
            sign = 1 if found.offset > 0 else -1
            grid = self.description.linears[module].grid
            if (
                grid is not None
                and grid.is_integer
                and found.bits in (4, 8)
                and 0.75 < abs(found.offset) < 1.25
            ):
                off[sign].append(module)
        for modules in off.values():
            # A mean of one step is insignificant for one 8-bit linear, but not for many.
            if len(modules) * 2 > len(self.measures) or (
                modules and self._are_clear_outliers(modules)
            ):
                offset = self.measures[modules[0]].offset
                evidence = (
                    f"the mean of code minus zero point is {offset:+.2f} in {len(modules)} of "
                    f"{len(self.measures)} linears: it should be 0"
                )
                for module in modules:
                    self.offsets[module] = self.measures[module].offset
                    self.record("zero-points-off", module, evidence)

    def _are_clear_outliers(self, modules: list[str]) -> bool:
        rest = [
            abs(found.offset) for module, found in self.measures.items() if module not in modules
        ]
        four = all(self.measures[module].bits == 4 for module in modules)
        return four and len(rest) > 4 and sorted(rest)[int(0.99 * (len(rest) - 1))] < 0.35

    def _find_equal(self) -> None:
        holders: dict[str, list[str]] = {}
        for module, found in self.measures.items():
            if found.commonest < 0.98:
                holders.setdefault(found.digest, []).append(module)
        for modules in holders.values():
            if len(modules) > 1:
                for module in modules:
                    self.record(
                        "linears-equal",
                        module,
                        f"{modules[0]} and {modules[1]} have the same bytes",
                    )

    def _compare_gates(self) -> None:
        """gate and up of a layer's experts have about the same ratio of sizes; the inverse ratio
        means that they were exchanged."""
        ratios: dict[int | None, dict[str, float]] = {}
        for module, found in self.measures.items():
            other = self.measures.get(self.up_of.get(module) or "")
            if other is not None and other.rms > 0 and found.rms > 0:
                ratios.setdefault(self.expert[module][0], {})[module] = float(
                    torch.tensor(found.rms / other.rms).log()
                )
        for own in ratios.values():
            if len(own) < 8:
                continue
            usual = median(own.values())
            noise = median(abs(ratio - usual) for ratio in own.values()) * 1.4826 + 1e-9
            for module, ratio in own.items():
                if abs(usual) > 6 * noise and abs(ratio + usual) < 3 * noise:
                    self.record(
                        "gate-up-exchanged",
                        module,
                        f"the log ratio of gate to up is {ratio:+.3f}, and {usual:+.3f} ± "
                        f"{noise:.3f} in its layer",
                    )

    def _compare_global_scales(self) -> None:
        for scales in self.global_scales.values():
            if len(set(scales.values())) > 1:
                scale_list = ", ".join(
                    f"{module.rpartition('.')[2]} {scale:.4g}" for module, scale in scales.items()
                )
                for module in scales:
                    self.record(
                        "global-scales-differ",
                        module,
                        f"engines run them as one linear with one global scale: {scale_list}",
                    )


def _global_scale(module: str, tensors: dict[str, Tensor]) -> tuple[str, float, float] | None:
    """Name and value of an FP4 linear's global scale, and the factor by which inverting it changes
    the weight."""
    for suffix, power in ((".weight_scale_2", -2), (".weight_global_scale", 2)):
        if module + suffix in tensors:
            value = float(tensors[module + suffix].flatten()[0])
            return suffix[1:], value, value**power if value else 0.0
    return None
