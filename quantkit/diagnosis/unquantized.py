"""Tensors that are stored plain: all zeros, another size than others of their kind, rows or bytes
that are another's, a head or a bias that nobody uses."""

import hashlib
import re
from collections.abc import Container
from statistics import median

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import HEAD
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.measures import LARGEST_GAIN, squares
from quantkit.diagnosis.source_fit import is_on_grid
from quantkit.diagnosis.structure import Structure, is_tied
from quantkit.diagnosis.survey import Survey
from quantkit.diagnosis.texts import token_count

_FAR = 200.0
"""Times that a tensor's size may be off the median of its kind: norms of first layers are a tenth
of others."""
_SAMPLED = 65536
_REPEATS, _COLUMNS = 0.25, 16
"""Share of rows that may be the same as the one before, and by how many columns that is seen.
Reserved tokens share a row."""


_WIDE = 16
"""Rows that are sampled of a block, and the least that both sides of a matrix have to tell
something."""
_NEAR, _NEAR_SHARE, _HEAVY = 1 / 8, 0.002, 30.0
"""Values below an eighth of the root mean square: a tenth of weights are, and none of those whose
exponents were misread. Root mean square
over the median magnitude: 1.5 for weights, up to 3 with large ones among them."""
_SMALLEST = 1e-9
_LARGEST = 1e6
"""Of the gains of a norm, also in the median one's size."""


def _misread(rows: Tensor) -> str:
    """What tells that 16 bits were taken for those of the other float16: sizes that all are alike,
    or that have no usual one."""
    size = rows.abs()
    size = size[size.amax(1) > 0]
    if size.numel() < _WIDE * _WIDE * 4:
        return ""
    rms = torch.linalg.vector_norm(size, dim=1, keepdim=True) / size.shape[1] ** 0.5
    near, usual = float((size < _NEAR * rms).float().mean()), size.median(1).values
    heavy = float(
        (rms[:, 0] / usual).median()
    )  # infinite where most values are zero, which is another thing
    if near < _NEAR_SHARE and not is_on_grid(rows):
        return (
            f"{near:.2%} of its values are near zero, where a tenth of weights are: its bits "
            "are those of another dtype"
        )
    if _HEAVY < heavy < float("inf") and not is_on_grid(rows):
        return (
            f"its root mean square is {heavy:.0f} times the median of its values: its bits are "
            "those of another dtype"
        )
    return ""


def _misread_gains(gains: Tensor) -> str:
    size = gains.abs()
    largest, usual = float(size.max()), float(size.median())
    if largest > _LARGEST or (usual > 0 and largest > _LARGEST * usual):
        return (
            f"a norm multiplies by {largest:.2g} somewhere, and by {usual:.2g} in the median: "
            "its bytes are another dtype's"
        )
    return ""


class PlainCheck:
    """look() at the parts of each tensor, done() after its last one, then finish()."""

    def __init__(self, survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
        self.survey, self.structure, self.findings = survey, structure, findings
        self.rows = {row.name: row for row in structure.rows}
        self.modules = {row.module for row in structure.rows}
        self.shared = {row.name for row in structure.rows if row.role in ("embedding", "head")}
        """MTP layers have copies of these."""
        self.tokens = token_count(survey)
        self.kinds: dict[str, dict[str, float]] = {}
        self.holders: dict[tuple[str, str], list[str]] = {}
        self.digests: dict[str, str] = {}
        self.absurd: dict[str, str] = {}
        self.biases: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._squares, self._sum, self._count, self._seen, self._repeats = 0.0, 0.0, 0, 0, 0
        self._digest, self._misread = hashlib.blake2b(digest_size=16), ""

    def look(self, name: str, part: Tensor) -> None:
        """The next rows of a tensor."""
        row = self.rows.get(name)
        if part.dtype.itemsize > 1:
            self._squares += squares(
                part.float() + row.gain_offset if row is not None and row.gain_offset else part
            )
            self._count += part.numel()
            flat = part.contiguous().view(-1).view(torch.uint8)
            self._digest.update(
                flat[:: max(len(flat) // _SAMPLED, 1)].contiguous().numpy().tobytes()
            )
        if part.dim() == 2 and min(part.shape) >= _WIDE and not self._misread:
            self._misread = _misread(part[:: max(len(part) // _WIDE, 1)].float())
        elif part.dim() == 1 and row is not None and row.role == "norm":
            self._misread = _misread_gains(part.float())
        if part.dim() == 1:
            self._sum += float(part.float().sum())
        elif part.dim() == 2:
            # Rows of a vocabulary behind the last token are there to fill it up.
            first = part[
                : max(self.tokens - self._seen, 0) if name in self.shared else None, :_COLUMNS
            ]
            self._repeats += int((first[1:] == first[:-1]).all(1).sum())
            self._seen += len(first)

    def done(self, name: str) -> None:
        """All parts of the tensor were looked at."""
        kind = re.sub(r"\.\d+\.", ".N.", name)
        if self._count and name.endswith(".weight"):  # biases may be anything
            self.kinds.setdefault(kind, {})[name] = (self._squares / self._count) ** 0.5
            self.digests[name] = self._digest.hexdigest()
            if (
                len(self.survey.tensors[name].shape) == 2
                and self._squares
                and name not in self.shared
            ):
                self.holders.setdefault((kind, self.digests[name]), []).append(name)
            self._judge(name)
        elif (
            name.endswith(".bias")
            and self._squares
            and name.removesuffix(".bias") in self.modules
            and name not in self.rows
        ):
            self.biases.append(name)
        self._begin()

    def _judge(self, name: str) -> None:
        """What a matrix or a norm tells alone."""
        row, shape = self.rows.get(name), self.survey.tensors[name].shape
        size = (self._squares / self._count) ** 0.5
        if len(shape) == 2:
            table = row is not None and row.role == "embedding"
            if size * (1 if table else shape[1] ** 0.5) > LARGEST_GAIN:
                self.absurd[name] = f"its values have a root mean square of {size:.2g}"
            elif self._misread or 0 < size < _SMALLEST:
                self.absurd[name] = (
                    self._misread or f"its values have a root mean square of {size:.2g}"
                )
            elif size and self._repeats > _REPEATS * self._seen:
                self.absurd[name] = (
                    f"{self._repeats} of {self._seen} rows are the same as the one before"
                )
        elif self._misread:
            self.absurd[name] = self._misread
        elif (
            row is not None
            and row.role == "norm"
            and self._sum / self._count + row.gain_offset <= 0
        ):
            self.absurd[name] = (
                f"a norm multiplies by {self._sum / self._count + row.gain_offset:.2g} in the mean"
            )

    def finish(self, agreed: Container[str] = ()) -> None:
        """Tell what was found. agreed: modules that are as the source has them."""
        for kind, sizes in self.kinds.items():
            usual = median(sizes.values())
            matrix = len(self.survey.tensors[next(iter(sizes))].shape) == 2
            for name, size in sizes.items():
                if (
                    not matrix and not self.rows
                    # of such an architecture a norm may be stored less one, as Gemma's: zeros are
                    # no fault
                ):
                    continue
                if size == 0 and (usual > 0 or (len(sizes) == 1 and matrix)):
                    self.absurd[name] = (
                        f"all zeros; {kind} has a root mean square of {usual:.2g} elsewhere"
                    )
                elif (
                    size
                    and 0 < usual < float("inf")
                    and len(sizes) > 2
                    and not 1 / _FAR < size / usual < _FAR
                ):
                    self.absurd[name] = (
                        f"its values are {size / usual:.3g} times the size of others of its kind"
                    )
        absurd = {
            name: told
            for name, told in self.absurd.items()
            if name.removesuffix(".weight") not in agreed
        }
        if absurd:
            self.findings.add("values-absurd", absurd, next(iter(absurd.values())))
        for names in self.holders.values():
            if len(names) > 1 and any(name.removesuffix(".weight") not in agreed for name in names):
                self.findings.add(
                    "linears-equal", names, f"{names[0]} and {names[1]} have the same bytes"
                )
        if self.biases:
            told = (
                f"{len(self.biases)} biases are not zero, and the architecture has none there: "
                "engines leave them out"
            )
            self.findings.add("tensors-unknown", self.biases, told)
        self._check_head()
        self._check_copies()

    def _check_copies(self) -> None:
        """An MTP layer's embedding and head are the model's own: some engines load the copy, others
        share."""
        for role in ("embedding", "head"):
            own = next(
                (row.name for row in self.structure.rows if row.role == role and not row.mtp), ""
            )
            for copy in [row.name for row in self.structure.rows if row.role == role and row.mtp]:
                if (
                    own in self.digests
                    and copy in self.digests
                    and self._alike(own, copy)
                    and self.digests[own] != self.digests[copy]
                ):
                    self.findings.add(
                        "copies-differ", copy, f"it is not {own}, of which it should be a copy"
                    )

    def _alike(self, one: str, other: str) -> bool:
        ours, theirs = self.survey.tensors[one], self.survey.tensors[other]
        return ours.shape == theirs.shape and ours.dtype == theirs.dtype

    def _check_head(self) -> None:
        """A head beside a tied embedding must be the embedding once more: engines leave it out."""
        table = next(
            (row.name for row in self.structure.rows if row.role == "embedding" and not row.mtp), ""
        )
        if not is_tied(self.survey, self.structure) or table not in self.survey.tensors:
            return
        head, embedding = self.survey.tensors[f"{HEAD}.weight"], self.survey.tensors[table]
        rows = ((0, min(64, head.shape[0])), (0, head.shape[-1]))
        if head.shape != embedding.shape or not torch.equal(
            *(self.survey.shards.read(one, rows).float() for one in (head, embedding))
        ):
            told = (
                "config.json ties the head to the embedding, and another head is stored, which "
                "engines leave out"
            )
            self.findings.add("head-ignored", HEAD, told)
