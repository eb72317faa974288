"""Statistics of a linear's codes and scales, and faults that they show by themselves."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.check import QuantizedLinear
from quantkit.diagnosis.sampled_rows import SampledRows

ORDERS: dict[str, tuple[int, ...]] = {
    "neighbours exchanged": (1, 0, 3, 2, 5, 4, 7, 6),
    "AutoAWQ's order instead of the natural one": (0, 2, 4, 6, 1, 3, 5, 7),
    "the natural order instead of AutoAWQ's": (0, 4, 1, 5, 2, 6, 3, 7),
    "words reversed": (7, 6, 5, 4, 3, 2, 1, 0),
    "halves exchanged": (4, 5, 6, 7, 0, 1, 2, 3),
}
"""Wrong orders of eight packed values: position j takes the value of position ORDERS[j]."""

ODD_E2M1 = (0.5, 1.5, 3.0, 6.0)
"""Magnitudes of E2M1 whose lowest bit is set."""
LARGEST_GAIN = 1e3
"""RMS times the square root of the number of inputs that no matrix of a model reaches."""
_CHUNK = 1 << 20
"""Number of values summed at a time."""
_RARE_SHARE, _MIN_CODES, _MIN_SCALES = 1e-3, 4096, 64
"""Share of codes below which a bit counts as never set, and the number of codes for that; minimum
number of scales for a meaningful share."""


@dataclass(frozen=True)
class Measures:
    """Statistics of one linear.

    rms: of its values. offset: mean of code minus zero point; spread: its RMS over half the range.
    ends, next_to_ends: share of codes at the ends of the range, and one step inside. commonest:
    share of the most common code. follows: correlation of a group's mean code with its zero point,
    None without zero points. constant_rows, constant_columns: shares, of columns without those of
    zeros next to others in their groups, whose share is zero_columns. zero_rows: of FP8. outlier:
    largest row norm over the median one. positive: share of codes above the zero point, among those
    not on it. dead_bit: a bit of the codes that never changes, None without. common_scale: share of
    the most common scale. unwritten: all stored bytes are zero. digest: of its bytes.
    """

    rms: float
    outlier: float
    unwritten: bool
    digest: str
    bits: int
    common_scale: float
    offset: float = 0.0
    spread: float = 0.0
    ends: float = 0.0
    next_to_ends: float = 0.0
    commonest: float = 0.0
    follows: float | None = None
    constant_rows: float = 0.0
    constant_columns: float = 0.0
    zero_columns: float = 0.0
    zero_rows: float = 0.0
    positive: float = 0.5
    dead_bit: int | None = None


@dataclass(frozen=True)
class CodeHistogram:
    """Counts of code values. values: float32 [V], ascending, evenly spaced; counts: int64 [V]."""

    values: Tensor
    counts: Tensor

    @classmethod
    def of(cls, codes: Tensor, step: float) -> "CodeHistogram":
        """codes: float32, multiples of `step`, within a range of some hundred steps."""
        low, high = torch.aminmax(codes)
        counts = torch.bincount(
            ((codes - low) / step).to(torch.int16).flatten(), minlength=int((high - low) / step) + 1
        )
        return cls(low + step * torch.arange(len(counts)), counts)

    def share(self, chosen: Tensor) -> float:
        """Share of the values selected by `chosen`, bool [V]."""
        return float(self.counts[chosen].sum() / self.counts.sum())

    def mean(self, chosen: Tensor) -> float:
        """Mean of the values selected by `chosen`, bool [V]; 0 if there are none."""
        counts = self.counts[chosen].double()
        return (
            float((self.values[chosen] * counts).sum() / counts.sum())
            if bool(counts.any())
            else 0.0
        )

    @property
    def rms(self) -> float:
        return float(
            ((self.values.double().square() * self.counts).sum() / self.counts.sum()).sqrt()
        )

    @property
    def positive(self) -> float:
        """Share of positive values among the nonzero ones."""
        above, below = (int(self.counts[side].sum()) for side in (self.values > 0, self.values < 0))
        return above / max(above + below, 1)

    @property
    def commonest(self) -> float:
        return float(self.counts.max() / self.counts.sum())

    def dead_bit(self, bits: int) -> int | None:
        """The lowest bit that is the same in (almost) all values, if any."""
        words = self.values.to(torch.int16)
        return next(
            (
                bit
                for bit in range(bits)
                if not _RARE_SHARE < self.share(((words >> bit) & 1).bool()) < 1 - _RARE_SHARE
            ),
            None,
        )

    def ends(self, inside: int) -> float:
        """Share of values `inside` steps from either end of the occurring range."""
        chosen = torch.zeros(len(self.values), dtype=torch.bool)
        chosen[[min(inside, len(chosen) - 1), max(len(chosen) - 1 - inside, 0)]] = True
        return self.share(chosen)


def measure(rows: SampledRows, tensors: Mapping[str, Tensor]) -> Measures:
    """tensors: all stored tensors of the linear."""
    row_rms = torch.linalg.vector_norm(rows.values, dim=1) / rows.values.shape[1] ** 0.5
    middle, rms = float(row_rms.median()), float(row_rms.square().mean().sqrt())
    common_scale = 0.0
    if rows.scale is not None and rows.scale.numel() >= _MIN_SCALES:
        common_scale = float((rows.scale == rows.scale.flatten().mode().values).float().mean())
    unwritten = rms == 0 and not any(
        bool(tensor.view(torch.uint8).any()) for tensor in tensors.values() if tensor.dim() == 2
    )
    return Measures(
        rms=rms,
        outlier=float(row_rms.max()) / middle if middle > 0 else 1.0,
        unwritten=unwritten,
        digest=_digest(tensors),
        bits=rows.bits,
        common_scale=common_scale,
        **({} if rows.codes is None else _code_measures(rows, rows.codes)),
    )


def _code_measures(rows: SampledRows, values: Tensor) -> dict[str, Any]:
    step = 0.5 if rows.is_e2m1 else 1.0
    codes = centred = CodeHistogram.of(values, step)
    if rows.zero_point is not None:
        centred = CodeHistogram.of(rows.centred(values), step)
    zero = (rows.values == 0).all(0)
    if rows.in_order and rows.scale is not None:  # a group of zeros has no padding: see `live`
        group = rows.group_means((~zero).float()[None].expand(len(values), -1))
        zero &= rows.by_input(group)[0] > 0
    zeros = float(zero.float().mean())
    return {
        "offset": _mean_inside(rows, codes, centred),
        "spread": centred.rms / 2.0 ** (rows.bits - 1),
        "ends": codes.ends(0),
        "next_to_ends": codes.ends(1),
        "commonest": codes.commonest,
        "follows": correlation_with_zeros(rows, values),
        "constant_rows": _share_of_constant(values, 1),
        "constant_columns": _share_of_constant(values, 0) - zeros,
        "zero_columns": zeros,
        "positive": centred.positive,
        "dead_bit": _dead_bit(rows, codes),
    }


def _share_of_constant(codes: Tensor, along: int) -> float:
    low, high = torch.aminmax(codes, dim=along)
    return float((low == high).float().mean())


def _dead_bit(rows: SampledRows, codes: CodeHistogram) -> int | None:
    """The lowest bit shared by all codes; for FP4 that of the mantissa. Not determined for 8-bit
    floating point."""
    if int(codes.counts.sum()) < _MIN_CODES or not 4 <= rows.bits <= 8:
        return None
    if rows.is_e2m1:
        return (
            0
            if codes.share(torch.isin(codes.values.abs(), torch.tensor(ODD_E2M1))) < _RARE_SHARE
            else None
        )
    # Clamped codes may have the bit only at the ends.
    inside = CodeHistogram(codes.values[1:-1], codes.counts[1:-1])
    several = int((inside.counts > _RARE_SHARE * int(codes.counts.sum())).sum()) > 2
    return next(
        (
            bit
            for part in ((codes, inside) if several else (codes,))
            if (bit := part.dead_bit(rows.bits)) is not None
        ),
        None,
    )


def _mean_inside(rows: SampledRows, codes: CodeHistogram, centred: CodeHistogram) -> float:
    """Mean of code minus zero point; on a symmetric grid without the ends, because AutoRound
    assigns the lowest code to a group's maximum."""
    points = rows.zero_point.unique() if rows.zero_point is not None else torch.zeros(1)
    if rows.bits < 16 and len(points) == 1:
        inside = codes.values.abs() < 2 ** (rows.bits - 1) - 1
        return codes.mean(inside) - float(points) if codes.share(inside) else 0.0
    return centred.mean(torch.ones(len(centred.values), dtype=torch.bool))


def correlation_with_zeros(rows: SampledRows, codes: Tensor) -> float | None:
    """Correlation of a group's mean code with its zero point, over groups and rows: most codes are
    near the zero point. codes: [n, K], of `rows`. None if there is nothing to correlate."""
    if rows.zero_point is None or rows.of_group is None or rows.zero_point.unique().numel() < 3:
        return None
    pair = torch.stack((rows.group_means(codes).flatten(), rows.zero_point.flatten()))
    found = float(torch.corrcoef(pair)[0, 1])
    return found if found == found else None


def reordered(rows: SampledRows, order: tuple[int, ...], axis: int) -> Tensor | None:
    """Codes with every eight along an axis (0: outputs, 1: inputs) in another order; None if the
    axis is not a multiple of eight."""
    assert rows.codes is not None
    if rows.codes.shape[axis] % 8:
        return None
    return (
        rows.codes.unflatten(axis, (-1, 8))
        .index_select(axis + 1, torch.tensor(order))
        .flatten(axis, axis + 1)
    )


def not_finite(values: Tensor) -> int:
    """Number of NaN or infinite values of a float tensor of any shape. They are counted only if the
    sum of squares is not finite."""
    if values.dtype == torch.float8_e4m3fn:
        magnitudes = values.view(torch.uint8) & 0x7F
        return (
            int((magnitudes == 0x7F).sum())
            if values.numel() and int(magnitudes.max()) == 0x7F
            else 0
        )
    return (
        0
        if math.isfinite(squares(values))
        else values.numel() - int(torch.isfinite(values.float()).sum())
    )


def fp8_at_end(codes: Tensor) -> float:
    """Share of float8_e4m3fn codes, of any shape, whose magnitude is the largest finite one; 0 in
    other dtypes."""
    if codes.dtype != torch.float8_e4m3fn:
        return 0.0
    return float((codes.view(torch.uint8) & 0x7F == 0x7E).float().mean())


def squares(values: Tensor) -> float:
    """The sum of squares of values of any shape in float32, piece by piece so that memory is
    reused."""
    return sum(
        float(torch.dot(piece, piece))
        for piece in map(Tensor.float, values.reshape(-1).split(_CHUNK))
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest of a sample of the codes and scales; equal linears have equal ones. Names and scalars
    are not included."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            step = max(len(flat) // 65536, 1)
            digest.update(flat[::step].contiguous().numpy().tobytes())
    return digest.hexdigest()


_OUTLIER = 60.0
"""Factor over the usual size of its row and of its column."""
_FULL_SIZE = 0.5
"""Minimum size of a group's codes, relative to the median, for its scale not to be caused by one
large weight."""


def outlier_group(rows: SampledRows) -> str:
    """The scale fault in the sampled rows, as text; empty if there is none.

    A row of a model may be large, and so may an input, but in all groups alike. One large weight
    makes a group's scale large and its other codes small. A group in which all weights are large,
    among small ones in its row and in its column, was not trained: a bit of its scale changed.
    """
    if rows.scale is None or rows.codes is None or rows.of_group is None:
        return ""
    # Scales first, which are few: codes of one linear have about the same size in all groups.
    if not _outlier_evidence(rows.scale.abs(), _OUTLIER / 2):
        return ""
    full = rows.group_means(rows.centred(rows.codes).square()).sqrt()
    size = full * rows.scale.abs()
    return _outlier_evidence(
        torch.where(full >= _FULL_SIZE * full.median(), size, size.clamp(max=float(size.median()))),
        _OUTLIER,
    )


def outlier_block(scales: Tensor) -> str:
    """The same for scales [rows, columns] of blocks, whose codes reach the end of their range in
    every block."""
    return _outlier_evidence(scales.float().abs(), _OUTLIER)


def _outlier_evidence(size: Tensor, times: float) -> str:
    """size: [rows, groups]."""
    if size.shape[0] < 4:
        return ""
    if size.shape[1] == 1:
        first, second = size.flatten().topk(2).values.tolist()
        return (
            f"a row is {first / second:.0f} times as large as the next, in all of its codes"
            if 0 < times * second < first
            else ""
        )
    usual = torch.maximum(size.median(1, keepdim=True).values, size.median(0, keepdim=True).values)
    found = (size > times * usual) & (usual > 0)
    if not bool(found.any()):
        return ""
    largest = float((size / usual.clamp(min=1e-30))[found].max())
    return (
        f"all weights of a group are {largest:.0f} times the usual size in its row and in its "
        "column"
    )


_SPREAD = 0.62
"""RMS of codes over half the range above which a group's maximum did not set the scale; uniform
codes have 0.577."""
_FOLLOWS = 0.3
"""Correlation of mean codes with zero points below which they do not belong together; valid ones
have at least 0.6."""
_ONE_SIDE = 0.04
"""Minimum share of codes on each side of the zero point, among those not on it."""
_MAX_BETWEEN = 0.01
"""Share of codes between the zero point and half of the range; normally a half."""
_CONSTANT = 0.98
CONSTANT_SHARE = 0.05
"""Share of rows or columns."""

Fault = tuple[str, str]
"""Name of a finding, and the evidence."""


def code_faults(
    linear: QuantizedLinear, rows: SampledRows, found: Measures, *, symmetric: bool
) -> Iterator[Fault]:
    """Faults in the codes of the sampled rows: constant, saturated, one-sided, with a lost bit, or
    in another order. symmetric: whether the description says so of all linears."""
    if rows.codes is None or rows.bits < 4:
        return
    points = rows.zero_point
    grid = linear.grid
    is_symmetric = grid is not None and grid.is_integer and (symmetric or grid.symmetric)
    if is_symmetric and points is not None and points.unique().numel() > 2:
        yield (
            "description-wrong",
            "it says sym true, and zero points differ: engines then ignore them",
        )
    if found.rms == 0:
        return  # judged by comparison with others of its kind
    if found.commonest > _CONSTANT:
        yield "codes-constant", f"{found.commonest:.1%} of its codes are one value"
        return
    largest = float(rows.codes.abs().max())
    if grid is not None and grid.is_integer and largest > 2 ** (rows.bits - 1):
        yield "description-wrong", f"it says {rows.bits} bits, and codes reach {largest:.0f}"
        return
    constant = ((found.constant_rows, "rows"), (found.constant_columns, "columns"))
    if evidence := [
        f"{share:.1%} of its {what}" for share, what in constant if share > CONSTANT_SHARE
    ]:
        yield "codes-constant", f"{' and '.join(evidence)} hold one code each"
        return
    spread = list(_spread_faults(linear, rows, found))
    yield from spread
    # Without signs the highest bit is the same in all codes.
    if found.dead_bit is not None and (found.dead_bit < rows.bits - 1 or not spread):
        yield (
            "codes-constant",
            f"bit {found.dead_bit} of its codes is the same in all of them: it was lost",
        )
    if found.follows is not None and found.follows < _FOLLOWS:
        yield from _order_faults(rows, found.follows)


def _spread_faults(linear: QuantizedLinear, rows: SampledRows, found: Measures) -> Iterator[Fault]:
    assert rows.codes is not None
    group = (
        rows.codes.shape[1] // rows.scale.shape[1]
        if rows.scale is not None
        else rows.codes.shape[1]
    )
    wide = linear.grid is not None and linear.grid.is_integer and found.spread > _SPREAD
    if not _ONE_SIDE < found.positive < 1 - _ONE_SIDE:
        yield (
            "codes-shifted",
            f"{found.positive:.0%} of its codes are above the zero point, where weights are "
            "on both sides",
        )
    elif wide and found.ends < 2 * found.next_to_ends:
        yield (
            "codes-shifted",
            f"the RMS of its codes is {found.spread:.2f} of half the range, more than "
            "uniform ones: few are near the zero point",
        )
    elif _is_ternary(rows):
        return
    elif wide or (found.ends > (0.4 if found.bits == 4 else 0.05) and group >= 32):
        yield "codes-saturated", f"{found.ends:.1%} of its codes are at the ends of the range"


def _is_ternary(rows: SampledRows) -> bool:
    """Whether codes are almost only the ends of the range and the zero point, as for ternary
    weights rounded to nearest. With a scale that is too small, codes next to the zero point are as
    many as those on it; with one four times too small, they are half of the range away."""
    assert rows.codes is not None
    off = rows.centred(rows.codes).abs()
    between = float(((off > 0) & (off < 0.75 * off.max())).float().mean())
    return between < _MAX_BETWEEN and float((off == 0).float().mean()) > 4 * _MAX_BETWEEN


def _order_faults(rows: SampledRows, follows: float) -> Iterator[Fault]:
    """For codes that do not correlate with their zero points: the order in which they would, if
    there is one."""
    best = ("", follows)
    for name, order in ORDERS.items():
        for axis, along in ((0, "outputs"), (1, "inputs")):
            codes = reordered(rows, order, axis)
            correlation = correlation_with_zeros(rows, codes) if codes is not None else None
            if correlation is not None and correlation > best[1]:
                best = (f"{name}, along the {along}", correlation)
    if best[1] > follows + 0.3:
        yield (
            "packing-order",
            f"mean codes of groups correlate with their zero points by {follows:.2f}, and "
            f"by {best[1]:.2f} with {best[0]}",
        )
    elif follows < 0.1:
        yield (
            "zero-points-foreign",
            f"mean codes of groups correlate with their zero points by {follows:.2f} only",
        )
