"""Comparison of every linear and unquantized matrix with the source: the error, and what explains
it.

Folded scales move sizes between neighbours: a linear may be diag(r) W diag(c) of the source's W. r
and c are fitted first; the rest is rounding error, or a fault. The fitted c of all consumers of a
norm must be what the norm lost: a consumer that was left out (a router) computes something else.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import FLOAT_DTYPES, Axis
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis import Findings
from quantkit.diagnosis.description import Description
from quantkit.diagnosis.measures import ORDERS, reordered
from quantkit.diagnosis.sampled_rows import (
    GRID_VALUES,
    SMALL,
    Gain,
    SampledRows,
    SourceFit,
    are_uneven,
    column_noise,
    cosine,
    fit,
    group_fault,
    is_on_grid,
    low_rank_fault,
    mean_log,
    sample_unquantized_rows,
    shift_of,
    size_faults,
    spread_of,
    step_fault,
)
from quantkit.diagnosis.structure import Structure
from quantkit.diagnosis.survey import Survey
from quantkit.grids.base import dequantize
from quantkit.models.table import Parameter, ScaleGroup

_ALLOWED = {2: 0.75, 3: 0.55, 4: 0.40, 8: 0.15, 16: 0.01}
"""Relative error after fitting that rounding to that many bits may cause. For 4 bits in groups 0.1
is usual."""
_ROUNDED_INPUTS = 0.8
"""The same where inputs have 4 bits: calibrated weights leave out the directions in which the error
of the inputs is larger than the inputs. Random models by a thousand tokens reach 0.68."""
_UNRELATED, _MIN_UNRELATED = 0.93, 3
"""Relative error of a row or column that is unrelated to the source's (unrelated ones of 64 values
have a cosine of at most 0.37), and how many of them rounding cannot cause."""
_ALIKE = 2.0
"""Factor over the usual square error of a row or column up to which a small one is only small."""
_ON_GRID = 0.3
"""Error of an unquantized matrix whose values were rounded before."""
_CORRECTED_BIAS = 0.5
"""Relative error of a bias up to which it may make up for what rounding moved in the mean."""
_FOLD_TOLERANCE = 0.05
"""Median distance of the logarithms of what a norm lost and its consumer gained."""
_NOISE = 6.0
"""Limit of a consumer's deviation relative to the rounding noise of its column factors. Valid ones
reach 1.8."""
_FOLLOWS = 0.7
"""Limit of a consumer's deviation relative to what the norm lost, if that exceeds the consumer's
error: a consumer that gained nothing deviates by all of it."""
_TRUNCATED = 0.25
"""Mean error in steps: rounding leaves 0.01, truncation half a step."""
_SAME_MATRIX = 0.75
"""Cosine above which one matrix is another one, rounded."""


Faults = dict[str, list[tuple[str, str]]]
"""Module and evidence, by the name of the fault."""


class SourceComparison:
    """Call add() with the rows of each linear, then finish()."""

    def __init__(
        self,
        source: Checkpoint,
        survey: Survey,
        structure: Structure,
        description: Description,
        findings: Findings,
    ) -> None:
        self.checkpoint, self.survey, self.structure = source, survey, structure
        self.description, self.findings = description, findings
        self.rows = {row.module: row for row in structure.rows if len(row.shape) == 2}
        self.gain_offsets = {
            row.module: row.gain_offset for row in structure.rows if row.role == "norm"
        }
        """What norms add to their stored gains."""
        # Modules with more than a weight and a bias: scales of any format, factors of their input.
        self.scaled = {
            name.rpartition(".")[0]
            for name in survey.tensors
            if not name.endswith((".weight", "bias"))
        }
        # GPT-2's matrices are inputs by outputs in its own class; writers store outputs by inputs.
        self.inputs_first = {
            module.rpartition(".")[2]
            for module, linear in description.linears.items()
            if module not in self.rows
            and linear.shape[0] != linear.shape[1]
            and self.checkpoint.has(f"{module}.weight")
            and self.checkpoint.shape(module) == linear.shape[::-1]
        }
        self.groups = structure.scale_groups
        self.producers = {group.producer for group in self.groups}
        self.gains: dict[str, Gain] = {}
        self.matching: set[str] = set()
        self.columns: dict[str, Tensor] = {}
        self.noise: dict[str, float] = {}
        self.row_factors: dict[str, tuple[Tensor, tuple[tuple[int, int], ...]]] = {}
        self.errors: dict[str, tuple[float, int]] = {}
        self.faults: Faults = defaultdict(list)
        self.unrelated: list[str] = []
        self.offsets: dict[str, float] = {}

    def add(self, module: str, rows: SampledRows) -> None:
        """The sampled rows of a linear, quantized or not."""
        if (theirs := self._source_rows(module, rows)) is None:
            return
        found = fit(rows.values, theirs)
        self.errors[module] = (found.error, rows.bits)
        row = self.rows.get(module)
        # A few experts suffice: all were folded together.
        if row is None or row.expert is None or row.expert < 8:
            self.columns[module] = found.columns
            self.noise[module] = column_noise(rows.values, theirs, found)
            self.row_factors[module] = found.rows, rows.ranges
        shift = shift_of(rows, theirs * found.rows[:, None] * found.columns)
        if found.error <= self._allowed(module, rows) and abs(shift) < 0.6:
            self.matching.add(module)
            self.gains[module] = Gain.of(found.rows, found.columns)
            evidence = (
                f"values are {shift:+.2f} steps off the source's in the mean: truncated, not "
                "rounded"
                if abs(shift) > _TRUNCATED
                else self._part_fault(module, rows, theirs, found)
            )
            if evidence:
                self.faults["error-large"].append((module, evidence))
        elif rows.codes is None and found.error < _ON_GRID and is_on_grid(rows.values):
            self.matching.add(module)
            self._report_on_grid(module, found.error)
        else:
            name, evidence = self._explain(module, rows, theirs, found, shift)
            self.faults[name].append((module, evidence))

    def _allowed(self, module: str, rows: SampledRows) -> float:
        linear = self.description.linears.get(module)
        if linear is not None and linear.grid is not None and linear.grid.activation_bits == 4:
            return _ROUNDED_INPUTS
        return _ALLOWED[rows.bits]

    def _report_on_grid(self, where: str, error: float) -> None:
        self.findings.add(
            "values-on-grid",
            where,
            f"stored unquantized, on at most {GRID_VALUES} levels, and {error:.0%} off the source's",
        )

    def _part_fault(self, module: str, rows: SampledRows, theirs: Tensor, found: SourceFit) -> str:
        """For a linear that matches the source overall: a fault of its sign, or of rows and columns
        that do not match; empty if there is none."""
        part = theirs * found.rows[:, None] * found.columns
        if float((rows.values * theirs).sum()) < 0:
            return "its values are the source's with the opposite sign"
        # quantkit moves no scale from an up projection with a bias, AutoAWQ does.
        row = self.rows.get(module)
        biased = row and row.projection == "up" and f"{module}.bias" in self.survey.tensors
        scalable = not self.producers or module in self.producers or biased
        if row and not scalable and are_uneven(found.rows):
            return "its rows have other sizes than the source's, which no linear can compensate"
        for axis, what in ((1, "rows"), (0, "columns")):
            size = theirs.square().mean(axis)
            lost = (rows.values == 0).all(axis) & (size > SMALL * size.median())
            if axis == 0 and self._reads_zeros(rows.values.shape[1]):
                continue
            if int(lost.sum()) >= _MIN_UNRELATED:
                return f"{int(lost.sum())} of {len(lost)} sampled {what} are zeros, and the source's not"
        left = rows.values - part
        if evidence := group_fault(rows, part) or step_fault(rows, found):
            return evidence
        # What more than rounding left out are directions of the inputs, which columns are part of.
        is_rounding = found.error <= _ALLOWED[rows.bits]
        if is_rounding and (evidence := low_rank_fault(rows, left)):
            return evidence
        left = left.square()
        for axis, what in ((1, "rows"), (0, "columns")) if is_rounding else ((1, "rows"),):
            size = rows.values.square().mean(axis)
            effect = size if axis else theirs.square().mean(0) * self._input_gain(module).square()
            rest = left.mean(axis)
            far = (rest > _UNRELATED**2 * size) & (rest > _ALIKE * rest.median())
            far &= effect > SMALL * effect.median()
            if int(far.sum()) >= _MIN_UNRELATED and float(far.float().mean()) < 0.5:
                return (
                    f"{int(far.sum())} of {len(far)} sampled {what} are unrelated to the "
                    f"source's, such as number {int(far.nonzero()[0])}"
                )
        return ""

    def _reads_zeros(self, inputs: int) -> bool:
        """Whether a linear of so many inputs reads a ReLU, of which some outputs are 0 for all
        tokens of a calibration: GPTQ zeroes their columns."""
        config = self.survey.config
        activation = config.get("hidden_act", config.get("activation_function"))
        hidden = config.get("hidden_size", config.get("n_embd"))
        return str(activation).startswith("relu") and inputs != hidden

    def _input_gain(self, module: str) -> Tensor:
        """Of the norm that a linear reads, in the source, [K]; 1 where it reads none. Calibrated
        rounding leaves a column whose input is small as far off as the others need it."""
        for group in self.groups:
            name = f"{group.producer}.weight"
            reads = module in group.consumers and group.producer in self.gain_offsets
            if reads and self.checkpoint.has(name):
                return self.checkpoint.read(name).float() + self.gain_offsets[group.producer]
        return torch.ones(())

    def _explain(
        self, module: str, rows: SampledRows, theirs: Tensor, found: SourceFit, shift: float
    ) -> tuple[str, str]:
        """Name and evidence of the fault that explains a large error."""
        evidence = (
            f"error {found.error:.2g}, and {rows.bits} bits cause at most "
            f"{self._allowed(module, rows):.2g}"
        )
        shifted = 0.6 < abs(shift) < 1.4 and found.error < 0.95
        if shifted and rows.scale is not None and rows.codes is not None and rows.bits < 16:
            back = rows.values - shift * rows.by_input(rows.scale)
            shifted = fit(back, theirs).error < self._allowed(module, rows)
        if rows.codes is not None and shifted and rows.bits < 16:
            self.offsets[module] = shift
            return "zero-points-off", f"all values are {shift:+.2f} steps off the source's"
        if order := self._order(rows, theirs):
            return "packing-order", f"{evidence}; with {order} it matches the source"
        is_square = rows.values.shape[0] == rows.values.shape[1]
        if is_square and cosine(rows.values, theirs.T.contiguous()) > _SAME_MATRIX:
            return "transposed", f"{evidence}; it is the source's matrix transposed"
        if other := self._find_match(module, rows):
            name = _name_exchange(self.rows[module], self.rows[other])
            return name, f"{evidence}; it is the source's {other}"
        if found.error > 0.9:
            self.unrelated.append(module)
        return "error-large", evidence

    def _order(self, rows: SampledRows, theirs: Tensor) -> str:
        if rows.codes is None or rows.scale is None or rows.of_group is None:
            return ""
        for name, order in ORDERS.items():
            for axis, along in ((0, "outputs"), (1, "inputs")):
                codes = reordered(rows, order, axis)
                if codes is None:
                    continue
                values = rows.centred(codes) * rows.by_input(rows.scale)
                if cosine(values, theirs) > _SAME_MATRIX:
                    return f"{name}, along the {along}"
        return ""

    def _find_match(self, module: str, rows: SampledRows) -> str:
        """Another linear of the source that this one matches."""
        for candidate in self._candidates(module):
            theirs = self._source_rows(candidate, rows)
            if theirs is not None and cosine(rows.values, theirs) > _SAME_MATRIX:
                return candidate
        return ""

    def _candidates(self, module: str) -> Iterable[str]:
        """Linears of the same shape that writers exchange: gate and up, other experts of the layer,
        other layers."""
        if (row := self.rows.get(module)) is None:
            return []
        same_shape = [
            other
            for other in self.rows.values()
            if other.shape == row.shape and other.module != module
        ]
        same_parts = [
            (one.expert == row.expert) + (one.projection == row.projection) for one in same_shape
        ]
        found = list(zip(same_shape, same_parts))
        near = [one.module for one, parts in found if one.layer == row.layer and parts]
        far = [one.module for one, parts in found if one.layer != row.layer and parts == 2]
        return [*near, *far][:512]

    def _source_rows(self, module: str, rows: SampledRows) -> Tensor | None:
        """The same rows of the source; None if it lacks them or has another shape, or if `rows` are
        not finite."""
        theirs = self._rows_of(module, rows.ranges)
        comparable = theirs is not None and theirs.shape == rows.values.shape
        return theirs if comparable and bool(torch.isfinite(rows.values).all()) else None

    def _rows_of(self, module: str, ranges: tuple[tuple[int, int], ...]) -> Tensor | None:
        if not (module in self.checkpoint.linears or self.checkpoint.has(f"{module}.weight")):
            return None
        axis: Axis = "K" if module.rpartition(".")[2] in self.inputs_first else "N"
        size = self.checkpoint.shape(module)["NK".index(axis)]
        cuts = []
        for start, stop in ranges:
            if start >= size:
                return None
            weight, first = self.checkpoint.weight_slice(module, axis, start, min(stop, size))
            values = dequantize(weight)
            values = values if axis == "N" else values.T
            cuts.append(values[start - first : stop - first])
        return torch.cat(cuts)

    def finish(self) -> None:
        """Report the faults; if nothing matches, the checkpoint has another source."""
        if len(self.unrelated) > 0.8 * max(len(self.errors), 1) and len(self.errors) > 2:
            evidence = (
                f"{len(self.unrelated)} of {len(self.errors)} matrices are not the source's: "
                "it has another source, or was rotated"
            )
            self.findings.add("unlike-source", self.unrelated, evidence)
            return
        self._compare_tables()
        self.findings.add_groups(
            {name: pairs for name, pairs in self.faults.items() if not self.findings.has(name)}
        )
        if not self.findings.has("packing-order", "transposed"):
            self._check_folding()
            self._check_sizes()

    def _compare_tables(self) -> None:
        """What writers do not change: embedding, head, norms outside the layers, states, and biases
        but for corrections, and for the scales of their linear's outputs."""
        for row in self.structure.rows:
            outside = row.role in ("embedding", "head") or (row.layer is None and not row.mtp)
            linear = row.module.removesuffix(".bias")
            scaled = self.row_factors.get(linear) if linear in self.producers else None
            unscaled = bool(self.producers) and row.module not in self.producers
            unchanged = row.role == "router_bias" or (row.role == "norm" and unscaled)
            unchanged |= row.role == "state" and len(row.shape) != 2  # matrices read scaled inputs
            unchanged |= outside or (
                row.role == "bias" and (linear not in self.producers or linear in self.matching)
            )
            info, stored = (
                one.get(row.name) for one in (self.survey.tensors, self.checkpoint.tensors)
            )
            if not unchanged or info is None or stored is None or info.shape != stored.shape:
                continue
            if row.module in self.description.linears:
                continue
            if len(row.shape) == 2:
                rows = sample_unquantized_rows(self.survey, row.name)
                ours, theirs = rows.values, self._rows_of(row.module, rows.ranges)
            else:
                ours = self.survey.shards.read(info).float()
                theirs = self.checkpoint.read(row.name).float()
            if theirs is None or not bool(torch.isfinite(ours).all()):
                continue
            if scaled is not None:
                ours, theirs = (
                    torch.cat([one[start:stop] for start, stop in scaled[1]])
                    for one in (ours, theirs)
                )
                theirs = theirs * scaled[0]  # which leave one factor for all rows free
                theirs *= (ours * theirs).sum() / theirs.square().sum().clamp(min=1e-20)
            error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-20))
            if len(row.shape) == 2 and 0.02 < error < _ON_GRID and is_on_grid(ours):
                self._report_on_grid(row.name, error)
            elif error > (_CORRECTED_BIAS if row.role == "bias" else 0.02):
                evidence = f"stored unquantized, and {error:.0%} off the source's"
                self.faults["error-large"].append((row.name, evidence))

    def _check_folding(self) -> None:
        """For each norm: what it lost, each of its consumers must have gained."""
        wrong: Faults = defaultdict(list)
        for group in self.groups:
            if group.producer_is_norm:
                self._check_group(group, wrong)
            else:
                self._check_chain(group, wrong)
        self.findings.add_groups(wrong)

    def _check_sizes(self) -> None:
        """For each chain of linears: what one lost in size, the next must have gained."""
        if not self.groups or self.findings.has(
            "folding-broken", "router-not-compensated", "error-large"
        ):
            return  # without a table it is unknown what compensates what
        lost = {}
        for group in self.groups:
            if group.producer_is_norm and (gains := self._norm_gains(group.producer)) is not None:
                ours, theirs = gains
                lost[group.producer] = mean_log(theirs) - mean_log(ours)
        faults = list(size_faults(self.groups, self.gains, lost))
        if not self.findings.has("scales-absurd"):
            self.findings.add_groups({"scales-absurd": faults})

    def _check_group(self, group: ScaleGroup, wrong: Faults) -> None:
        gains = self._norm_gains(group.producer)
        if gains is None or not bool(torch.isfinite(gains[0]).all()):
            return
        ours, theirs = gains
        lost = theirs / torch.where(ours == 0, torch.ones_like(ours), ours)
        other = {module for entries in self.faults.values() for module, _ in entries}
        for module in group.consumers:
            gained = None if module in other else self._columns(module)
            if (
                gained is None
                or gained.shape != lost.shape
                or not bool((gained.abs() > 0).float().mean() > 0.5)
            ):
                continue  # a matrix of zeros has no factors
            ratio, off, moved = gained / lost, spread_of(gained / lost), spread_of(lost)
            noise = _NOISE * self.noise.get(module, 0.0)
            follows = off < _FOLLOWS * moved or moved < max(_FOLD_TOLERANCE, noise)
            # Free where outputs were scaled too, or the norm is the source's: see `size_faults`.
            resized = (
                module not in self.producers
                and not bool(torch.isclose(lost.median(), torch.ones(()), atol=_FOLD_TOLERANCE))
                and abs(float(ratio.abs().clamp(min=1e-6).log().median())) > 0.7
            )
            if off > max(_FOLD_TOLERANCE, noise) or resized or not follows:
                router = module in self.rows and self.rows[module].role == "router"
                evidence = (
                    f"{group.producer} was divided by scales of median "
                    f"{float(lost.median()):.3g} (spread {moved:.2f}), and the columns of {module} "
                    f"were multiplied by others (off by {off:.2f} in log)"
                )
                name = "router-not-compensated" if router else "folding-broken"
                wrong[name].append((module, evidence))

    def _norm_gains(self, module: str) -> tuple[Tensor, Tensor] | None:
        """Gains of a norm here and in the source, float32 [K]; None if one of them lacks it or
        shapes differ."""
        name = f"{module}.weight"
        if name not in self.survey.tensors or not self.checkpoint.has(name):
            return None
        ours = self.survey.shards.read(self.survey.tensors[name]).float()
        theirs = self.checkpoint.read(name).float()
        offset = self.gain_offsets.get(module, 0.0)
        return (ours + offset, theirs + offset) if ours.shape == theirs.shape else None

    def _check_chain(self, group: ScaleGroup, wrong: Faults) -> None:
        """Row factors of a linear against the column factors of its consumer, for the sampled
        rows."""
        if group.producer not in self.matching or group.producer not in self.row_factors:
            return
        lost, ranges = self.row_factors[group.producer]
        outputs = self.rows[group.producer].shape[0]
        for module in group.consumers:
            gained = self.columns.get(module)
            if module not in self.matching or gained is None or len(gained) != outputs:
                continue
            product = torch.cat([gained[start:stop] for start, stop in ranges]) * lost
            off, moved = spread_of(product), max(spread_of(gained), spread_of(lost))
            if off > max(_FOLD_TOLERANCE, _NOISE * self.noise[module]) and off > _FOLLOWS * moved:
                evidence = (
                    f"rows of {group.producer} and columns of {module} were scaled, and deviate "
                    f"by {off:.2f} in log together"
                )
                wrong["folding-broken"].append((module, evidence))

    def _columns(self, module: str) -> Tensor | None:
        """Column factors [K] of a module; an unquantized one is fitted now."""
        if module in self.columns:
            return self.columns[module]
        name = f"{module}.weight"
        if not self.is_unquantized(name):
            return None
        rows = sample_unquantized_rows(self.survey, name)
        if (theirs := self._source_rows(module, rows)) is None:
            return None
        found = fit(rows.values, theirs)
        self.noise[module] = column_noise(rows.values, theirs, found)
        return found.columns

    def is_unquantized(self, name: str) -> bool:
        """Whether a matrix's stored values are its weights: 16 or 32 bits, and no scale of any
        format."""
        module, info = name.removesuffix(".weight"), self.survey.tensors.get(name)
        return (
            info is not None
            and len(info.shape) == 2
            and info.dtype in FLOAT_DTYPES
            and module not in self.description.linears
            and module not in self.scaled
        )


def _name_exchange(one: Parameter, other: Parameter) -> str:
    if (one.layer, one.expert) == (other.layer, other.expert):
        is_gated = {one.projection, other.projection} == {"gate", "up"}
        return "gate-up-exchanged" if is_gated else "linears-exchanged"
    return "experts-exchanged" if one.layer == other.layer else "layers-exchanged"


def is_matrix(row: Parameter) -> bool:
    """Whether an unquantized tensor of the table is compared with the source."""
    return len(row.shape) == 2 and row.role in ("linear", "kv_b", "router", "mtp_proj", "indexer")
