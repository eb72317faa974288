"""Tensors that two shards hold. The index names one, which transformers reads; vLLM and SGLang keep
the one that they come to last."""

from collections.abc import Iterable

import torch

from quantkit.checkpoint.header import TensorInfo
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.diagnosis.survey import Survey


def compare_forms(seen: Survey, findings: DiagnosisFindings) -> None:
    """Copies that differ by their headers: in dtype or shape."""
    _tell(
        ((named, other) for named, other in seen.copies if not _alike(named, other)),
        "dtype or shape",
        findings,
    )


def compare_values(seen: Survey, findings: DiagnosisFindings) -> None:
    """Copies of one dtype and shape whose bytes differ."""
    _tell(
        (
            (named, other)
            for named, other in seen.copies
            if _alike(named, other) and _differ(seen, named, other)
        ),
        "values",
        findings,
    )


def _alike(named: TensorInfo, other: TensorInfo) -> bool:
    return (named.dtype, named.shape) == (other.dtype, other.shape)


def _differ(seen: Survey, named: TensorInfo, other: TensorInfo) -> bool:
    pairs = zip(seen.blocks(named), seen.blocks(other))
    return not all(
        torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
        for ours, theirs in pairs
    )


def _tell(
    differing: Iterable[tuple[TensorInfo, TensorInfo]], what: str, findings: DiagnosisFindings
) -> None:
    """Once for two shards, with all tensors that both hold."""
    told: dict[tuple[str, str], list[str]] = {}
    for named, other in differing:
        told.setdefault((named.shard, other.shard), []).append(other.name)
    for (named_shard, other_shard), names in told.items():
        findings.add(
            "shards-disagree",
            names,
            f"the index says {named_shard}, and {other_shard} holds other {what} under the same "
            "name",
        )
