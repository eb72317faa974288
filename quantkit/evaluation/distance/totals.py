"""Sums over the tokens of two models' passes, and the figures that they make."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.distance.quality import Quality
from quantkit.evaluation.distance.traced import Trace
from quantkit.evaluation.distance.windows import Window

_CHUNK = 128  # tokens whose logits are held at a time


@dataclass
class TokenSums:
    """Totals over documents, in float64; the divergence of every token, by document."""

    tokens: int = 0
    nll: float = 0.0
    baseline_nll: float = 0.0
    same_top1: int = 0
    same_experts: int = 0
    experts: int = 0
    error: dict[int, float] = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)
    document_kl: list[list[float]] = field(default_factory=list)


def add_tokens(
    sums: TokenSums,
    windows: list[Window],
    trace: Trace,
    head: Callable[[Tensor], Tensor],
    theirs: Trace | None,
    their_head: Callable[[Tensor], Tensor] | None,
) -> None:
    """Next-token figures of one pass: each position from the one before a window's first scored
    token on predicts the token after it."""
    device = trace.final.device
    starts = _starts([len(window.ids) for window in windows])
    rows_of = [
        torch.arange(window.first - 1, len(window.ids) - 1) + start
        for window, start in zip(windows, starts)
    ]
    positions = torch.cat(rows_of).to(device)
    targets = torch.cat([window.ids[window.first :] for window in windows]).to(device)
    divergences = []
    for part in _chunks(len(positions)):
        rows, wanted = positions[part], targets[part, None]
        logs = head(trace.final[rows]).float().log_softmax(dim=-1)
        sums.nll -= float(logs.gather(1, wanted).double().sum())
        if theirs is None or their_head is None:
            continue
        base = their_head(theirs.final[rows]).float().log_softmax(dim=-1)
        if base.shape != logs.shape:
            raise QuantkitError(
                f"the vocabularies have {logs.shape[1]} and {base.shape[1]} entries",
                "compare a model with its original",
            )
        sums.baseline_nll -= float(base.gather(1, wanted).double().sum())
        # Rounding alone can make the sum negative where the two agree.
        divergences.append((base.exp() * (base - logs)).sum(dim=-1).double().clamp(min=0))
        sums.same_top1 += int((base.argmax(dim=-1) == logs.argmax(dim=-1)).sum())
    sums.tokens += len(positions)
    if divergences:
        sums.document_kl += [
            part.tolist()
            for part in torch.cat(divergences).split([window.scored for window in windows])
        ]


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))


def add_layers(sums: TokenSums, ours: Trace, theirs: Trace) -> None:
    if ours.hidden.keys() != theirs.hidden.keys() or ours.topk_ids.keys() != theirs.topk_ids.keys():
        raise QuantkitError(
            "the model and its baseline have different layers",
            "compare a model with the one it was made from",
        )
    for layer, base in theirs.hidden.items():
        exact = base.double()
        sums.error[layer] = sums.error.get(layer, 0.0) + float(
            (ours.hidden[layer].double() - exact).square().sum()
        )
        sums.norm[layer] = sums.norm.get(layer, 0.0) + float(exact.square().sum())
    for layer, chosen in theirs.topk_ids.items():
        sums.same_experts += int(
            (chosen[:, :, None] == ours.topk_ids[layer][:, None, :]).any(dim=-1).sum()
        )
        sums.experts += chosen.numel()


def figures(sums: TokenSums, documents: int, compared: bool) -> Quality:
    ppl = math.exp(sums.nll / sums.tokens)
    if not compared:
        return Quality(ppl, sums.tokens, documents)
    means = torch.tensor([sum(row) / len(row) for row in sums.document_kl], dtype=torch.float64)
    return Quality(
        ppl=ppl,
        tokens=sums.tokens,
        documents=documents,
        baseline_ppl=math.exp(sums.baseline_nll / sums.tokens),
        kl=sum(map(sum, sums.document_kl)) / sums.tokens,
        kl_stderr=float(means.std() / math.sqrt(documents)) if documents > 1 else None,
        top1_agree=sums.same_top1 / sums.tokens,
        expert_agree=sums.same_experts / sums.experts if sums.experts else None,
        layer_errors=[
            math.sqrt(sums.error[layer] / sums.norm[layer]) for layer in sorted(sums.error)
        ],
    )
