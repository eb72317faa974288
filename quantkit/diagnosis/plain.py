"""Tensors that are stored plain, beside others of their kind: all zeros, another size, the same bytes, a head that is not used."""

import hashlib
import re
from statistics import median

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import HEAD
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.structure import Structure, is_tied
from quantkit.diagnosis.survey import Survey

_FAR = 200.0
"""Times that a tensor's size may be off the median of its kind: norms of first layers are a tenth of others."""
_SAMPLED = 65536


class PlainCheck:
    """look() at the parts of each tensor, then finish()."""

    def __init__(self, survey: Survey, structure: Structure, findings: DiagnosisFindings) -> None:
        self.survey, self.structure, self.findings = survey, structure, findings
        self.shared = {row.name for row in structure.rows if row.role in ("embedding", "head")}
        """MTP layers have copies of these."""
        self.kinds: dict[str, dict[str, float]] = {}
        self.holders: dict[tuple[str, str], list[str]] = {}
        self._squares, self._count = 0.0, 0
        self._digest = hashlib.blake2b(digest_size=16)

    def look(self, part: Tensor) -> None:
        """Some rows of the tensor that `done` names."""
        if part.dtype.itemsize > 1:
            self._squares += float(part.float().square().sum())
            self._count += part.numel()
            flat = part.contiguous().view(-1).view(torch.uint8)
            self._digest.update(flat[:: max(len(flat) // _SAMPLED, 1)].contiguous().numpy().tobytes())

    def done(self, name: str) -> None:
        """All parts of the tensor were looked at."""
        kind = re.sub(r"\.\d+\.", ".N.", name)
        if self._count and name.endswith(".weight"):  # biases may be anything
            self.kinds.setdefault(kind, {})[name] = (self._squares / self._count) ** 0.5
            if len(self.survey.tensors[name].shape) == 2 and self._squares and name not in self.shared:
                self.holders.setdefault((kind, self._digest.hexdigest()), []).append(name)
        self._squares, self._count = 0.0, 0
        self._digest = hashlib.blake2b(digest_size=16)

    def finish(self) -> None:
        """Tell what was found."""
        for kind, sizes in self.kinds.items():
            usual = median(sizes.values())
            matrix = len(self.survey.tensors[next(iter(sizes))].shape) == 2
            zero = [name for name, size in sizes.items() if size == 0]
            if zero and (usual > 0 or (len(sizes) == 1 and matrix)):
                self.findings.add("values-absurd", zero, f"all zeros; {kind} has a root mean square of {usual:.2g} elsewhere")
            known = usual > 0 and len(sizes) > 2 and usual < float("inf")
            far = [name for name, size in sizes.items() if known and size and not 1 / _FAR < size / usual < _FAR]
            if far:
                told = f"its values are {sizes[far[0]] / usual:.3g} times the size of others of its kind"
                self.findings.add("values-absurd", far, told)
        for names in self.holders.values():
            if len(names) > 1:
                self.findings.add("linears-equal", names, f"{names[0]} and {names[1]} have the same bytes")
        self._check_head()

    def _check_head(self) -> None:
        """A head beside a tied embedding must be the embedding once more: engines leave it out."""
        table = next((row.name for row in self.structure.rows if row.role == "embedding" and not row.mtp), "")
        if not is_tied(self.survey, self.structure) or table not in self.survey.tensors:
            return
        head, embedding = self.survey.tensors[f"{HEAD}.weight"], self.survey.tensors[table]
        rows = ((0, min(64, head.shape[0])), (0, head.shape[-1]))
        if head.shape != embedding.shape or not torch.equal(*(self.survey.shards.read(one, rows).float() for one in (head, embedding))):
            told = "config.json ties the head to the embedding, and another head is stored, which engines leave out"
            self.findings.add("head-ignored", HEAD, told)
