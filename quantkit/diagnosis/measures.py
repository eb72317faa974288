"""What the codes of a linear look like, in a few numbers: for comparing it with others of its
kind."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.diagnosis.stored_rows import Rows

ORDERS: dict[str, tuple[int, ...]] = {
    "neighbours exchanged": (1, 0, 3, 2, 5, 4, 7, 6),
    "AutoAWQ's order taken for the natural one": (0, 2, 4, 6, 1, 3, 5, 7),
    "the natural order taken for AutoAWQ's": (0, 4, 1, 5, 2, 6, 3, 7),
    "words reversed": (7, 6, 5, 4, 3, 2, 1, 0),
    "halves exchanged": (4, 5, 6, 7, 0, 1, 2, 3),
}
"""Ways to mistake the places of eight values: new place j takes the value of place ORDERS[j]."""

ODD_E2M1 = (0.5, 1.5, 3.0, 6.0)
"""Magnitudes of E2M1 whose lowest bit is set."""
LARGEST_GAIN = 1e3
"""Root mean square, times the root of the inputs, that no matrix of a model has."""
_PIECE = 1 << 20
"""Values that are summed at a time."""
_RARE, _ENOUGH, _MANY = 1e-3, 4096, 64
"""Share of codes below which a bit is never set, of how many; scales of which a share means
something."""


@dataclass(frozen=True)
class Measures:
    """Of one linear. rms: of its values. offset: mean of code minus zero point; spread: their root
    mean square, of half the range.

    ends, beside_ends: share of codes at the ends of the range, and next to them. commonest: share
    of the commonest code. follows: correlation of a group's mean code with its zero point, None
    without zero points. constant_rows, constant_columns: shares. outlier: largest row over the
    median row. positive: share of codes above the zero point, of those that are not on it.
    dead_bit: of the codes, which never changes; None without. alike: share of the commonest scale.
    digest: of its bytes.
    """

    rms: float
    offset: float
    spread: float
    ends: float
    beside_ends: float
    commonest: float
    follows: float | None
    constant_rows: float
    constant_columns: float
    outlier: float
    positive: float
    dead_bit: int | None
    alike: float
    unwritten: bool
    digest: str
    bits: int


@dataclass(frozen=True)
class CodeHistogram:
    """How often each value occurs. values: float32 [V], ascending, evenly spaced; counts: int64
    [V]."""

    values: Tensor
    counts: Tensor

    @classmethod
    def of(cls, codes: Tensor, step: float) -> "CodeHistogram":
        """codes: float32, multiples of `step`, some hundreds of them apart at most."""
        low, high = torch.aminmax(codes)
        counts = torch.bincount(
            ((codes - low) / step).to(torch.int16).flatten(), minlength=int((high - low) / step) + 1
        )
        return cls(low + step * torch.arange(len(counts)), counts)

    def share(self, chosen: Tensor) -> float:
        """Of all values, those at which `chosen`, bool [V], is true."""
        return float(self.counts[chosen].sum() / self.counts.sum())

    def mean(self, chosen: Tensor) -> float:
        """Of those at which `chosen`, bool [V], is true; 0 without any."""
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
        """Share of those above zero, of those that are not zero."""
        above, below = (int(self.counts[side].sum()) for side in (self.values > 0, self.values < 0))
        return above / max(above + below, 1)

    @property
    def commonest(self) -> float:
        return float(self.counts.max() / self.counts.sum())

    def dead_bit(self, bits: int) -> int | None:
        """The lowest bit that all have, or none."""
        words = self.values.to(torch.int16)
        return next(
            (
                bit
                for bit in range(bits)
                if not _RARE < self.share(((words >> bit) & 1).bool()) < 1 - _RARE
            ),
            None,
        )

    def ends(self, inside: int) -> float:
        """Share of values that are `inside` steps from either end of those that occur."""
        chosen = torch.zeros(len(self.values), dtype=torch.bool)
        chosen[[min(inside, len(chosen) - 1), max(len(chosen) - 1 - inside, 0)]] = True
        return self.share(chosen)


def measure(rows: Rows, tensors: Mapping[str, Tensor]) -> Measures:
    """tensors: all that is stored of the linear."""
    row_rms = torch.linalg.vector_norm(rows.values, dim=1) / rows.values.shape[1] ** 0.5
    middle, rms = float(row_rms.median()), float(row_rms.square().mean().sqrt())
    outlier = float(row_rms.max()) / middle if middle > 0 else 1.0
    offset = spread = ends = beside = commonest = alike = 0.0
    follows, positive, dead, constant = None, 0.5, None, [0.0, 0.0]
    if rows.codes is not None:
        step = 0.5 if rows.is_e2m1 else 1.0
        codes = CodeHistogram.of(rows.codes, step)
        centred = (
            codes
            if rows.zero_point is None
            else CodeHistogram.of(rows.codes - rows.by_input(rows.zero_point), step)
        )
        offset, spread = _mean_inside(rows, codes, centred), centred.rms / 2.0 ** (rows.bits - 1)
        ends, beside, commonest, positive = (
            codes.ends(0),
            codes.ends(1),
            codes.commonest,
            centred.positive,
        )
        constant = [_share_of_constant(rows.codes, along) for along in (1, 0)]
        follows = correlation_with_zeros(rows, rows.codes)
        dead = _dead_bit(rows, codes)
    if rows.scale is not None and rows.scale.numel() >= _MANY:
        alike = float((rows.scale == rows.scale.flatten().mode().values).float().mean())
    unwritten = rms == 0 and not any(
        bool(tensor.view(torch.uint8).any()) for tensor in tensors.values() if tensor.dim() == 2
    )
    return Measures(
        rms=rms,
        offset=offset,
        spread=spread,
        ends=ends,
        beside_ends=beside,
        commonest=commonest,
        follows=follows,
        constant_rows=constant[0],
        constant_columns=constant[1],
        outlier=outlier,
        positive=positive,
        dead_bit=dead,
        alike=alike,
        unwritten=unwritten,
        digest=_digest(tensors),
        bits=rows.bits,
    )


def _share_of_constant(codes: Tensor, along: int) -> float:
    low, high = torch.aminmax(codes, dim=along)
    return float((low == high).float().mean())


def _dead_bit(rows: Rows, codes: CodeHistogram) -> int | None:
    """The lowest bit that all codes share. Of FP4 it is that of the mantissa; of 8 bits in floating
    point none is known."""
    if int(codes.counts.sum()) < _ENOUGH or not 4 <= rows.bits <= 8:
        return None
    if rows.is_e2m1:
        return (
            0
            if codes.share(torch.isin(codes.values.abs(), torch.tensor(ODD_E2M1))) < _RARE
            else None
        )
    # Codes that were clamped may have the bit at the ends alone.
    inside = CodeHistogram(codes.values[1:-1], codes.counts[1:-1])
    several = int((inside.counts > _RARE * int(codes.counts.sum())).sum()) > 2
    return next(
        (
            bit
            for part in ((codes, inside) if several else (codes,))
            if (bit := part.dead_bit(rows.bits)) is not None
        ),
        None,
    )


def _mean_inside(rows: Rows, codes: CodeHistogram, centred: CodeHistogram) -> float:
    """Mean of code minus zero point; on a symmetric grid without the ends, for AutoRound gives the
    largest of a group the lowest code."""
    points = rows.zero_point.unique() if rows.zero_point is not None else torch.zeros(1)
    if rows.bits < 16 and len(points) == 1:
        inside = codes.values.abs() < 2 ** (rows.bits - 1) - 1
        return codes.mean(inside) - float(points) if codes.share(inside) else 0.0
    return centred.mean(torch.ones(len(centred.values), dtype=torch.bool))


def correlation_with_zeros(rows: Rows, codes: Tensor) -> float | None:
    """Of the mean code of a group and its zero point, over groups and rows: a zero point is where
    most codes lie. codes: [n, K], of `rows`. None where there is nothing to correlate."""
    if rows.zero_point is None or rows.of_group is None or rows.zero_point.unique().numel() < 3:
        return None
    pair = torch.stack((rows.group_means(codes).flatten(), rows.zero_point.flatten()))
    found = float(torch.corrcoef(pair)[0, 1])
    return found if found == found else None


def reordered(rows: Rows, order: tuple[int, ...], axis: int) -> Tensor | None:
    """Codes with every eight along an axis (0: outputs, 1: inputs) put in another order; None where
    eight do not divide it."""
    assert rows.codes is not None
    if rows.codes.shape[axis] % 8:
        return None
    return (
        rows.codes.unflatten(axis, (-1, 8))
        .index_select(axis + 1, torch.tensor(order))
        .flatten(axis, axis + 1)
    )


def not_finite(values: Tensor) -> int:
    """How many of values of any shape, of a float dtype, are NaN or infinite. A sum that is finite
    has no such summand; only another one is worth counting."""
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


def squares(values: Tensor) -> float:
    """The sum of the squares of values of any shape, in float32, a piece at a time: memory that is
    used again needs no new pages."""
    return sum(
        float(torch.dot(piece, piece))
        for piece in map(Tensor.float, values.reshape(-1).split(_PIECE))
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of the codes and scales: equal linears have equal ones. Names and shapes of scalars do not
    count."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            step = max(len(flat) // 65536, 1)
            digest.update(flat[::step].contiguous().numpy().tobytes())
    return digest.hexdigest()
