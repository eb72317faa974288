"""The second depth: every stored byte, streamed. What a tensor tells by itself, and a linear beside
others of its kind.

One linear is in memory at a time, and of plain tensors survey.BLOCK bytes.
"""

from collections.abc import Container
from statistics import median

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.gptq import Gptq, in_order
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.codes import code_faults
from quantkit.diagnosis.description import Described
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.measures import LARGEST_GAIN, Measures, measure, not_finite
from quantkit.diagnosis.scale_outliers import lone_block, lone_group
from quantkit.diagnosis.side_scales import IS_SIDE, SideScales
from quantkit.diagnosis.stored_rows import Rows, read_parts, take_rows
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.unquantized import PlainCheck
from quantkit.grids.schemes import Fp4Grid, IntGrid

_ABSURD = 1e3
"""Times that a linear's size, or a row's, is off what is usual for its kind."""
_SMALL = 1 / 32
"""Times the usual size of its kind below which a linear does next to nothing."""
_ALIKE, _USUALLY = 0.9, 0.5
"""Share of the commonest scale of a linear that was not rounded with it, and what others of its
kind have at most."""
_ODD = (
    "codes-constant",
    "scales-absurd",
    "linears-equal",
    "gate-up-exchanged",
    "zero-points-off",
    "codes-shifted",
    "codes-saturated",
)
"""Findings by what is usual: no faults where the source is so, too."""
_RUN = 512
"""Bytes of codes that are not zero by chance."""


class TensorCheck:
    """Collects what tensors tell: plain() or linear() for each, then finish()."""

    def __init__(
        self,
        survey: Survey,
        structure: Structure,
        described: Described,
        findings: DiagnosisFindings,
    ) -> None:
        self.survey, self.described, self.findings = survey, described, findings
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
        self.fused = {row.module: row.fused for row in structure.rows if row.fused is not None}
        self.global_scales: dict[str, dict[str, float]] = {}
        self.measures: dict[str, Measures] = {}
        self.offsets: dict[str, float] = {}
        self.inverted: list[str] = []
        self.told: dict[str, list[tuple[str, str]]] = {}
        block = survey.config.get("quantization_config") if described.linears else None
        self.says_symmetric = isinstance(block, dict) and block.get("sym") is True
        self.plain_check = PlainCheck(survey, structure, findings)
        self.side_scales = SideScales()

    def tell(self, name: str, module: str, evidence: str) -> None:
        """Findings of one name are told together, with the evidence of the first."""
        self.told.setdefault(name, []).append((module, evidence))

    def finish(self, agreed: Container[str] = ()) -> None:
        """Tell what was found. agreed: modules that are as the source has them, and may look
        odd."""
        self._compare()
        self.plain_check.finish(agreed)
        self.side_scales.finish(self.findings)
        for name, entries in self.told.items():
            left = [
                (module, told)
                for module, told in entries
                if name not in _ODD or module not in agreed
            ]
            if left:
                self.findings.add(name, [module for module, _ in left], left[0][1])
        self.told.clear()

    # --- by itself
    # --------------------------------------------------------------------------------------------------------

    def plain(self, name: str) -> None:
        """A tensor that is no part of a quantized linear."""
        if not self.survey.tensors[name].dtype.is_floating_point:
            return
        bad = 0
        for part in self.survey.blocks(self.survey.tensors[name]):
            bad += not_finite(part)
            if IS_SIDE.fullmatch(name) and not bad:
                self.side_scales.look(name, part)
            elif not bad:
                self.plain_check.look(name, part)
        if bad:
            self.tell("values-not-finite", name, f"{bad} values are NaN or infinite")
        self.plain_check.done(name)

    def linear(self, module: str, linear: QuantizedLinear) -> Rows | None:
        """A quantized linear: its parts, then its sampled rows. None where they cannot be
        decoded."""
        tensors = read_parts(self.survey, linear)
        self._check_parts(module, tensors)
        self._check_index(module, linear, tensors)
        try:
            rows = take_rows(module, linear, tensors)
        except QuantkitError as fault:
            self.tell("codes-unreadable", module, fault.problem)
            return None
        found = measure(rows, tensors)
        self.measures[module] = found
        self._check_filled(module, linear, tensors, found)
        self._check_scales(module, linear, rows, tensors)
        for name, evidence in code_faults(linear, rows, found, symmetric=self.says_symmetric):
            self.tell(name, module, evidence)
        return rows

    def _check_parts(self, module: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not tensor.dtype.is_floating_point:
                continue
            if bad := not_finite(tensor):
                self.tell("values-not-finite", name, f"{bad} values are NaN or infinite")
            elif IS_SIDE.fullmatch(name):
                self.side_scales.look(name, tensor)

    def _check_filled(
        self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor], found: Measures
    ) -> None:
        """Bytes that were never written read as zeros, in packed words a run of lowest codes; and
        what is said of the shape."""
        shape = tensors.get(f"{module}.weight_shape")
        if shape is not None and tuple(shape.tolist()) != linear.shape:
            self.tell(
                "part-malformed",
                f"{module}.weight_shape",
                f"it says {shape.tolist()}, and the codes are for {list(linear.shape)}",
            )
        codes = tensors.get(linear.format.main_tensor(module, tensors))
        if (
            codes is None or codes.dtype != torch.int32 or found.rms == 0
        ):  # zeros may be weights that are zero
            return
        flat = codes.contiguous().view(-1).view(torch.uint8)
        runs = int(
            (flat[: len(flat) // _RUN * _RUN].view(torch.int64).view(-1, _RUN // 8) == 0)
            .all(1)
            .sum()
        )
        if runs:
            self.tell(
                "codes-constant",
                module,
                f"{runs * _RUN:,} bytes of its codes in runs of {_RUN} are zero: they were not "
                "written",
            )

    def _check_index(
        self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]
    ) -> None:
        """GPTQ's groups of inputs: every group has as many as the others, and they are in order
        unless the description says otherwise."""
        g_idx = tensors.get(f"{module}.g_idx")
        format = linear.format.member(module)
        if g_idx is None or not isinstance(format, Gptq):
            return
        count = tensors[f"{module}.scales"].shape[0]
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= count:
            self.tell(
                "act-order-wrong",
                f"{module}.g_idx",
                f"it names group {int(g_idx.max())}, and there are {count}",
            )
            return
        members = torch.bincount(g_idx.long(), minlength=count)
        if not in_order(g_idx, count) and not format.desc_act:
            self.tell(
                "act-order-wrong",
                f"{module}.g_idx",
                "inputs are not in the order of their groups, and desc_act is false",
            )
        elif int(members.max()) != int(members.min()) and (format.desc_act or bool(g_idx.any())):
            told = f"a group has {int(members.max())} inputs and another {int(members.min())}"
            self.tell("act-order-wrong", f"{module}.g_idx", told)
        elif format.desc_act and count > 1 and not bool(g_idx.any()):
            self.tell("act-order-wrong", f"{module}.g_idx", "it is all zeros, and desc_act is true")

    def _check_scales(
        self, module: str, linear: QuantizedLinear, rows: Rows, tensors: dict[str, Tensor]
    ) -> None:
        found = self.measures[module]
        inverse = _global_scale(module, tensors)
        if inverse is not None and module in self.fused:
            self.global_scales.setdefault(self.fused[module], {})[module] = inverse[1]
        if inverse is not None and found.rms > 100:
            told = (
                f"values have a root mean square of {found.rms:.1e}; with {inverse[0]} = "
                f"{inverse[1]:.3g} the other way round "
            )
            told += f"{inverse[2] * found.rms:.1e}"
            self.inverted.append(module)
            self.tell("global-scale-inverted", module, told)
            return
        blocks = tensors.get(f"{module}.weight_scale_inv")
        if (
            told := lone_block(blocks)
            if blocks is not None and blocks.dim() == 2
            else lone_group(rows)
        ):
            self.tell("scales-absurd", module, told)
        if rows.scale is None or rows.codes is None or rows.of_group is None:
            return
        dead = rows.scale == 0
        if bool(dead.any()) and isinstance(linear.grid, IntGrid):
            share = float(dead.float().mean())
            if share > 1e-4 and bool((rows.codes * rows.by_input(dead.float())).any()):
                self.tell(
                    "scales-zero",
                    module,
                    f"{share:.2%} of its scales are zero, and their codes are not",
                )
        elif float(dead.float().mean()) > 0.05:
            self.tell(
                "scales-zero", module, f"{float(dead.float().mean()):.2%} of its scales are zero"
            )
        negative = float((rows.scale < 0).float().mean())
        if negative and not isinstance(linear.grid, IntGrid):
            self.tell(
                "scales-absurd",
                module,
                f"{negative:.2%} of its scales are negative, and FP4's have no sign",
            )
        size = rows.scale.abs()
        usual = float(size.median())
        if usual > 0 and float(size.max()) > _ABSURD * usual:
            self.tell(
                "scales-absurd",
                module,
                f"a scale is {float(size.max()) / usual:.0f} times the median scale",
            )

    # --- beside others of its kind
    # -------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        self._compare_sizes()
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
        silent: dict[tuple[int | None, int | None], list[str]] = {}
        for modules in self._kinds().values():
            usual = median(self.measures[module].rms for module in modules)
            for module in modules:
                found = self.measures[module]
                if (
                    len(modules) > 2
                    and usual > 0
                    and found.rms < _SMALL * usual
                    and module in self.expert
                ):
                    silent.setdefault(self.expert[module], []).append(module)
                elif told := self._size_fault(module, found, usual if len(modules) > 2 else 0.0):
                    self.tell("scales-absurd", module, told)
        for expert, modules in silent.items():
            self._tell_silent(
                modules, len([one for one in self.measures if self.expert.get(one) == expert])
            )

    def _size_fault(self, module: str, found: Measures, usual: float) -> str:
        """usual: size of its kind, 0 if that is not known."""
        if found.rms == 0:
            self.tell("codes-constant", module, "all its values are zero")
            return ""
        if usual > 0 and not _SMALL < found.rms / usual < 1 / _SMALL:
            return f"its values are {found.rms / usual:.3g} times the size of others of its kind"
        if (
            found.rms < 1e-9
            or found.rms * max(self.described.linears[module].shape[1], 1) ** 0.5 > LARGEST_GAIN
        ):
            return f"its values have a root mean square of {found.rms:.1e}"
        return (
            f"a row is {found.outlier:.0f} times the median row" if found.outlier > _ABSURD else ""
        )

    def _tell_silent(self, modules: list[str], of: int) -> None:
        """Experts that were hardly ever asked may be next to nothing: then all their linears are,
        and were written."""
        first = self.measures[modules[0]]
        if len(modules) == of and not any(self.measures[module].unwritten for module in modules):
            self.findings.add(
                "expert-silent",
                modules,
                f"its values have a root mean square of {first.rms:.1e}: it does next to nothing",
            )
            return
        for module in modules:
            found = self.measures[module]
            name = "scales-absurd" if found.rms else "codes-constant"
            self.tell(
                name,
                module,
                f"its values have a root mean square of {found.rms:.1e}, and others of its kind "
                "have not",
            )

    def _compare_scales(self) -> None:
        """Scales of groups are as different as the weights; those of rows may be alike where the
        writer has one for a linear."""
        for modules in self._kinds().values():
            usual = median(self.measures[module].alike for module in modules)
            for module in modules:
                grid = self.described.linears[module].grid
                grouped = isinstance(grid, Fp4Grid) or (
                    isinstance(grid, IntGrid) and grid.group_size is not None
                )
                alike = self.measures[module].alike
                if (
                    alike > _ALIKE
                    and (grouped or usual < _USUALLY)
                    and self.measures[module].commonest < 0.98
                ):
                    self.tell("scales-absurd", module, f"{alike:.0%} of its scales are one value")

    def _compare_offsets(self) -> None:
        """Weights have a mean near zero: code minus zero point has one, too, unless zero points are
        one off."""
        off: dict[int, list[str]] = {1: [], -1: []}
        for module, found in self.measures.items():
            sign = 1 if found.offset > 0 else -1
            if (
                isinstance(self.described.linears[module].grid, IntGrid)
                and found.bits in (4, 8)
                and 0.75 < abs(found.offset) < 1.25
            ):
                off[sign].append(module)
        for modules in off.values():
            # A mean of one step is nothing for 8 bits of one linear; of many linears it is.
            if len(modules) * 2 > len(self.measures) or (modules and self._are_outliers(modules)):
                offset = self.measures[modules[0]].offset
                told = (
                    f"code minus zero point is {offset:+.2f} in the mean in {len(modules)} of "
                    f"{len(self.measures)} linears: it should be 0"
                )
                for module in modules:
                    self.offsets[module] = self.measures[module].offset
                    self.tell("zero-points-off", module, told)

    def _are_outliers(self, modules: list[str]) -> bool:
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
                    self.tell(
                        "linears-equal",
                        module,
                        f"{modules[0]} and {modules[1]} have the same bytes",
                    )

    def _compare_gates(self) -> None:
        """gate and up of a layer's experts differ in size by about the same ratio: where it is the
        inverse, they were exchanged."""
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
                    self.tell(
                        "gate-up-exchanged",
                        module,
                        f"log of gate over up is {ratio:+.3f}, and {usual:+.3f} ± {noise:.3f} in "
                        "its layer",
                    )

    def _compare_global_scales(self) -> None:
        for scales in self.global_scales.values():
            if len(set(scales.values())) > 1:
                told = ", ".join(
                    f"{module.rpartition('.')[2]} {scale:.4g}" for module, scale in scales.items()
                )
                for module in scales:
                    self.tell(
                        "global-scales-differ",
                        module,
                        f"engines run them as one linear with one global scale: {told}",
                    )


def _global_scale(module: str, tensors: dict[str, Tensor]) -> tuple[str, float, float] | None:
    """Name and value of an FP4 linear's global scale, and what taking it the other way would
    multiply the weight by."""
    for suffix, power in ((".weight_scale_2", -2), (".weight_global_scale", 2)):
        if module + suffix in tensors:
            value = float(tensors[module + suffix].flatten()[0])
            return suffix[1:], value, value**power if value else 0.0
    return None
