"""What the codes of a linear look like, in a few numbers: for comparing it with others of its kind."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.diagnosis.rows import Rows

ORDERS: dict[str, tuple[int, ...]] = {
    "neighbours exchanged": (1, 0, 3, 2, 5, 4, 7, 6),
    "AutoAWQ's order taken for the natural one": (0, 2, 4, 6, 1, 3, 5, 7),
    "the natural order taken for AutoAWQ's": (0, 4, 1, 5, 2, 6, 3, 7),
    "words reversed": (7, 6, 5, 4, 3, 2, 1, 0),
    "halves exchanged": (4, 5, 6, 7, 0, 1, 2, 3),
}
"""Ways to mistake the places of eight values: new place j takes the value of place ORDERS[j]."""


@dataclass(frozen=True)
class Measures:
    """Of one linear. rms: of its values. offset: mean of code minus zero point; spread: their root mean square, of half the range.

    ends, beside_ends: share of codes at the ends of the range, and next to them. commonest: share of the commonest code. follows:
    correlation of a group's mean code with its zero point, None without zero points. constant_rows: share. outlier: largest row over the
    median row. digest: of its bytes.
    """

    rms: float
    offset: float
    spread: float
    ends: float
    beside_ends: float
    commonest: float
    follows: float | None
    constant_rows: float
    outlier: float
    digest: str
    bits: int


def measure(rows: Rows, tensors: Mapping[str, Tensor]) -> Measures:
    """tensors: all that is stored of the linear."""
    values = rows.values
    row_rms = values.square().mean(1).sqrt()
    middle = float(row_rms.median())
    outlier = float(row_rms.max()) / middle if middle > 0 else 1.0
    offset = spread = ends = beside = commonest = constant = 0.0
    follows = None
    if rows.codes is not None:
        codes, half = rows.codes, 2.0 ** (rows.bits - 1)
        centred = codes if rows.zero_point is None or rows.of_group is None else codes - rows.zero_point[:, rows.of_group]
        offset, spread = _mean_inside(rows, centred), float(centred.square().mean().sqrt()) / half
        ends, beside = _share_at_ends(codes, 0), _share_at_ends(codes, 1)
        commonest = float((codes == codes.flatten().mode().values).float().mean())
        constant = float((codes == codes[:, :1]).all(1).float().mean())
        follows = correlation_with_zeros(rows, codes)
    rms = float(values.square().mean().sqrt())
    return Measures(rms, offset, spread, ends, beside, commonest, follows, constant, outlier, _digest(tensors), rows.bits)


def _mean_inside(rows: Rows, centred: Tensor) -> float:
    """Mean of code minus zero point; on a symmetric grid without the ends, for AutoRound gives the largest of a group the lowest code."""
    assert rows.codes is not None
    if rows.bits < 16 and (rows.zero_point is None or rows.zero_point.unique().numel() == 1):
        inside = rows.codes.abs() < 2 ** (rows.bits - 1) - 1
        return float(centred[inside].mean()) if bool(inside.any()) else 0.0
    return float(centred.mean())


def _share_at_ends(codes: Tensor, inside: int) -> float:
    """Share of codes that are `inside` steps from either end of those that occur."""
    low, high = codes.min() + inside, codes.max() - inside
    return float(((codes == low) | (codes == high)).float().mean())


def correlation_with_zeros(rows: Rows, codes: Tensor) -> float | None:
    """Of the mean code of a group and its zero point, over groups and rows: a zero point is where most codes lie. None where there is
    nothing to correlate."""
    if rows.zero_point is None or rows.of_group is None or rows.zero_point.unique().numel() < 3:
        return None
    count = rows.zero_point.shape[1]
    sums = torch.zeros(len(codes), count).index_add_(1, rows.of_group, codes)
    members = torch.zeros(count).index_add_(0, rows.of_group, torch.ones(len(rows.of_group))).clamp(min=1)
    pair = torch.stack(((sums / members).flatten(), rows.zero_point.flatten()))
    found = float(torch.corrcoef(pair)[0, 1])
    return found if found == found else None


def reordered(rows: Rows, order: tuple[int, ...], axis: int) -> Tensor | None:
    """Codes with every eight along an axis (0: outputs, 1: inputs) put in another order; None where eight do not divide it."""
    assert rows.codes is not None
    if rows.codes.shape[axis] % 8:
        return None
    return rows.codes.unflatten(axis, (-1, 8)).index_select(axis + 1, torch.tensor(order)).flatten(axis, axis + 1)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of the codes and scales: equal linears have equal ones. Names and shapes of scalars do not count."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            step = max(len(flat) // 65536, 1)
            digest.update(flat[::step].contiguous().numpy().tobytes())
    return digest.hexdigest()
