"""The second depth: every stored byte, streamed. What a tensor tells by itself, and a linear beside others of its kind.

One linear is in memory at a time, and of plain tensors BLOCK bytes.
"""

from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.checkpoint.formats.gptq import Gptq, in_order
from quantkit.diagnosis.description import Described
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.measures import ORDERS, Measures, correlation_with_zeros, measure, reordered
from quantkit.diagnosis.plain import PlainCheck
from quantkit.diagnosis.rows import Rows, read_parts, take_rows
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.errors import QuantkitError
from quantkit.schemes import IntGrid

BLOCK = 64 << 20
_ABSURD = 1e3
"""Times that a linear's size, or a row's, is off what is usual for its kind."""
_SPREAD = 0.62
"""Of half the range: codes that are spread wider are none of one maximum. Even ones have 0.577."""
_RUN = 512
"""Bytes of codes that are not zero by chance."""
_FOLLOWS = 0.3
"""Correlation of mean codes with zero points below which they do not belong together; true ones have 0.6 and more."""

OnBytes = Callable[[int], None]


class TensorCheck:
    """Collects what tensors tell. look() at each, then compare()."""

    def __init__(self, survey: Survey, structure: Structure, described: Described, findings: DiagnosisFindings) -> None:
        self.survey, self.described, self.findings = survey, described, findings
        self.expert = {row.module: (row.layer, row.expert) for row in structure.rows if row.expert is not None}
        ups = {(row.layer, row.expert): row.module for row in structure.rows if row.projection == "up"}
        self.up_of = {
            row.module: ups.get((row.layer, row.expert)) for row in structure.rows if row.expert is not None and row.projection == "gate"
        }
        self.measures: dict[str, Measures] = {}
        self.offsets: dict[str, float] = {}
        self.inverted: list[str] = []
        self.told: dict[tuple[str, str], list[str]] = {}
        self.plain_check = PlainCheck(survey, structure, findings)

    def tell(self, name: str, module: str, evidence: str) -> None:
        """Findings of one name are told together, with the evidence of the first."""
        self.told.setdefault((name, ""), []).append(f"{module}\0{evidence}")

    def finish(self) -> None:
        """Tell what was found."""
        self._compare()
        self.plain_check.finish()
        for (name, _), entries in self.told.items():
            pairs = [entry.split("\0", 1) for entry in entries]
            self.findings.add(name, [module for module, _ in pairs], pairs[0][1])
        self.told.clear()

    # --- by itself --------------------------------------------------------------------------------------------------------

    def plain(self, name: str) -> int:
        """A tensor that is no part of a quantized linear. Returns its bytes."""
        info = self.survey.tensors[name]
        if not info.dtype.is_floating_point:
            return info.nbytes
        bad = 0
        for part in _blocks(self.survey, name):
            values = part.float() if part.dtype.itemsize == 1 else part
            bad += values.numel() - int(torch.isfinite(values).sum())
            if not bad:
                self.plain_check.look(part)
        if bad:
            self.tell("values-not-finite", name, f"{bad} values are NaN or infinite")
        self.plain_check.done(name)
        return info.nbytes

    def linear(self, module: str, linear: QuantizedLinear) -> Rows | None:
        """A quantized linear: its parts, then its sampled rows. None where they cannot be decoded."""
        tensors = read_parts(self.survey, linear)
        self._check_parts(module, tensors)
        self._check_filled(module, linear, tensors)
        self._check_index(module, linear, tensors)
        try:
            rows = take_rows(module, linear, tensors)
        except QuantkitError as fault:
            self.tell("codes-unreadable", module, fault.problem)
            return None
        found = measure(rows, tensors)
        self.measures[module] = found
        self._check_scales(module, linear, rows, tensors)
        self._check_codes(module, linear, rows, found)
        return rows

    def _check_parts(self, module: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not tensor.dtype.is_floating_point:
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                bad = int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
            else:
                bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            if bad:
                self.tell("values-not-finite", name, f"{bad} values are NaN or infinite")

    def _check_filled(self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> None:
        """Bytes that were never written read as zeros, in packed words a run of lowest codes; and what is said of the shape."""
        shape = tensors.get(f"{module}.weight_shape")
        if shape is not None and tuple(shape.tolist()) != linear.shape:
            self.tell("part-malformed", f"{module}.weight_shape", f"it says {shape.tolist()}, and the codes are for {list(linear.shape)}")
        codes = tensors.get(linear.format.main_tensor(module, tensors))
        if codes is None or codes.dtype != torch.int32:  # zeros in other dtypes may be weights that are zero
            return
        flat = codes.contiguous().view(-1).view(torch.uint8)
        runs = int((flat[: len(flat) // _RUN * _RUN].view(torch.int64).view(-1, _RUN // 8) == 0).all(1).sum())
        if runs:
            self.tell("codes-constant", module, f"{runs * _RUN:,} bytes of its codes in runs of {_RUN} are zero: they were not written")

    def _check_index(self, module: str, linear: QuantizedLinear, tensors: dict[str, Tensor]) -> None:
        """GPTQ's groups of inputs: every group has as many as the others, and they are in order unless the description says otherwise."""
        g_idx = tensors.get(f"{module}.g_idx")
        format = linear.format.member(module)
        if g_idx is None or not isinstance(format, Gptq):
            return
        count = tensors[f"{module}.scales"].shape[0]
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= count:
            self.tell("act-order-wrong", f"{module}.g_idx", f"it names group {int(g_idx.max())}, and there are {count}")
            return
        members = torch.bincount(g_idx.long(), minlength=count)
        if not in_order(g_idx, count) and not format.desc_act:
            self.tell("act-order-wrong", f"{module}.g_idx", "inputs are not in the order of their groups, and desc_act is false")
        elif int(members.max()) != int(members.min()) and (format.desc_act or bool(g_idx.any())):
            told = f"a group has {int(members.max())} inputs and another {int(members.min())}"
            self.tell("act-order-wrong", f"{module}.g_idx", told)
        elif format.desc_act and count > 1 and not bool(g_idx.any()):
            self.tell("act-order-wrong", f"{module}.g_idx", "it is all zeros, and desc_act is true")

    def _check_scales(self, module: str, linear: QuantizedLinear, rows: Rows, tensors: dict[str, Tensor]) -> None:
        found = self.measures[module]
        inverse = _global_scale(module, tensors)
        if inverse is not None and found.rms > 100:
            told = f"values have a root mean square of {found.rms:.1e}; with {inverse[0]} = {inverse[1]:.3g} the other way round "
            told += f"{inverse[2] * found.rms:.1e}"
            self.inverted.append(module)
            self.tell("global-scale-inverted", module, told)
            return
        if rows.scale is None or rows.codes is None or rows.of_group is None:
            return
        dead = rows.scale == 0
        if bool(dead.any()) and isinstance(linear.grid, IntGrid):
            share = float(dead.float().mean())
            if share > 1e-4 and bool((rows.codes * dead[:, rows.of_group].float()).any()):
                self.tell("scales-zero", module, f"{share:.2%} of its scales are zero, and their codes are not")
        elif float(dead.float().mean()) > 0.05:
            self.tell("scales-zero", module, f"{float(dead.float().mean()):.2%} of its scales are zero")
        size = rows.scale.abs()
        usual = float(size.median())
        if usual > 0 and float(size.max()) > _ABSURD * usual:
            self.tell("scales-absurd", module, f"a scale is {float(size.max()) / usual:.0f} times the median scale")

    def _check_codes(self, module: str, linear: QuantizedLinear, rows: Rows, found: Measures) -> None:
        if rows.codes is None or rows.bits < 4:
            return
        points = rows.zero_point
        said = isinstance(linear.grid, IntGrid) and linear.grid.symmetric and isinstance(linear.format.member(module), Gptq)
        if said and points is not None and points.unique().numel() > 2:
            self.tell("description-wrong", module, "it says sym true, and zero points differ: engines then leave them out")
        if found.commonest > 0.98:
            self.tell("codes-constant", module, f"{found.commonest:.1%} of its codes are one value")
            return
        if found.constant_rows > 0.05:
            self.tell("codes-constant", module, f"{found.constant_rows:.1%} of its rows hold one code each")
        group = rows.codes.shape[1] // rows.scale.shape[1] if rows.scale is not None else rows.codes.shape[1]
        wide = isinstance(linear.grid, IntGrid) and found.spread > _SPREAD
        if wide and found.ends < 2 * found.beside_ends:
            told = f"codes are spread over {found.spread:.2f} of half the range, more than even ones: few lie at the zero point"
            self.tell("codes-shifted", module, told)
        elif wide or (found.ends > (0.4 if found.bits == 4 else 0.05) and group >= 32):
            self.tell("codes-saturated", module, f"{found.ends:.1%} of its codes are at the ends of the range")
        if found.follows is not None and found.follows < _FOLLOWS:
            self._name_order(module, rows, found.follows)

    def _name_order(self, module: str, rows: Rows, follows: float) -> None:
        """Codes that do not lie around their zero points: the order that would put them there, if one does."""
        best = ("", follows)
        for name, order in ORDERS.items():
            for axis, along in ((0, "outputs"), (1, "inputs")):
                codes = reordered(rows, order, axis)
                again = correlation_with_zeros(rows, codes) if codes is not None else None
                if again is not None and again > best[1]:
                    best = (f"{name}, along the {along}", again)
        if best[1] > follows + 0.3:
            told = f"mean codes of groups follow their zero points by {follows:.2f}, and by {best[1]:.2f} with {best[0]}"
            self.tell("packing-order", module, told)
        elif follows < 0.1:
            self.tell("zero-points-foreign", module, f"mean codes of groups follow their zero points by {follows:.2f} only")

    # --- beside others of its kind -------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        self._compare_sizes()
        self._compare_offsets()
        self._find_equal()
        self._compare_gates()

    def _kinds(self) -> dict[tuple[str, bool], list[str]]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for module in self.measures:
            kinds.setdefault((module.rpartition(".")[2], module in self.expert), []).append(module)
        return kinds

    def _compare_sizes(self) -> None:
        for modules in self._kinds().values():
            usual = median(self.measures[module].rms for module in modules)
            for module in modules:
                rms, outlier = self.measures[module].rms, self.measures[module].outlier
                if rms == 0 or usual == 0:
                    continue
                if len(modules) > 2 and not 1 / 32 < rms / usual < 32:
                    self.tell("scales-absurd", module, f"its values are {rms / usual:.3g} times the size of others of its kind")
                elif not 1e-9 < rms < 1e3:
                    self.tell("scales-absurd", module, f"its values have a root mean square of {rms:.1e}")
                elif outlier > _ABSURD:
                    self.tell("scales-absurd", module, f"a row is {outlier:.0f} times the median row")

    def _compare_offsets(self) -> None:
        """Weights have a mean near zero: code minus zero point has one, too, unless zero points are one off."""
        off: dict[int, list[str]] = {1: [], -1: []}
        for module, found in self.measures.items():
            sign = 1 if found.offset > 0 else -1
            if isinstance(self.described.linears[module].grid, IntGrid) and found.bits in (4, 8) and 0.75 < abs(found.offset) < 1.25:
                off[sign].append(module)
        for modules in off.values():
            # A mean of one step is nothing for 8 bits of one linear; of many linears it is.
            if len(modules) * 2 > len(self.measures) or (modules and self._are_outliers(modules)):
                offset = self.measures[modules[0]].offset
                told = (
                    f"code minus zero point is {offset:+.2f} in the mean in {len(modules)} of {len(self.measures)} linears: it should be 0"
                )
                for module in modules:
                    self.offsets[module] = self.measures[module].offset
                    self.tell("zero-points-off", module, told)

    def _are_outliers(self, modules: list[str]) -> bool:
        rest = [abs(found.offset) for module, found in self.measures.items() if module not in modules]
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
                    self.tell("linears-equal", module, f"{modules[0]} and {modules[1]} have the same bytes")

    def _compare_gates(self) -> None:
        """gate and up of a layer's experts differ in size by about the same ratio: where it is the inverse, they were exchanged."""
        ratios: dict[int | None, dict[str, float]] = {}
        for module, found in self.measures.items():
            other = self.measures.get(self.up_of.get(module) or "")
            if other is not None and other.rms > 0 and found.rms > 0:
                ratios.setdefault(self.expert[module][0], {})[module] = float(torch.tensor(found.rms / other.rms).log())
        for own in ratios.values():
            if len(own) < 8:
                continue
            usual = median(own.values())
            noise = median(abs(ratio - usual) for ratio in own.values()) * 1.4826 + 1e-9
            for module, ratio in own.items():
                if abs(usual) > 6 * noise and abs(ratio + usual) < 3 * noise:
                    self.tell(
                        "gate-up-exchanged", module, f"log of gate over up is {ratio:+.3f}, and {usual:+.3f} ± {noise:.3f} in its layer"
                    )


def _global_scale(module: str, tensors: dict[str, Tensor]) -> tuple[str, float, float] | None:
    """Name and value of an FP4 linear's global scale, and what taking it the other way would multiply the weight by."""
    for suffix, power in ((".weight_scale_2", -2), (".weight_global_scale", 2)):
        if module + suffix in tensors:
            value = float(tensors[module + suffix].flatten()[0])
            return suffix[1:], value, value**power if value else 0.0
    return None


def _blocks(survey: Survey, name: str) -> Iterator[Tensor]:
    info = survey.tensors[name]
    if len(info.shape) < 2:
        yield survey.shards.read(info)
        return
    rest = tuple((0, size) for size in info.shape[1:])
    step = max(BLOCK // max(info.nbytes // max(info.shape[0], 1), 1), 1)
    for start in range(0, info.shape[0], step):
        yield survey.shards.read(info, ((start, min(start + step, info.shape[0])), *rest))
