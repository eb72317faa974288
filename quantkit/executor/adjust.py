"""What requests ask of the logits before a token is chosen: biases, penalties, no early end, a grammar.

Every row is adjusted for the tokens before it, drafts included, so that the tokens with drafts are those without. A row behind a wrong
draft is adjusted for nothing that counts: its token is not kept.
"""

from collections import Counter

import torch
from torch import Tensor

from quantkit.executor.sequence import Sequence


def adjust(logits: Tensor, counts: list[tuple[Sequence, int]], eos_ids: frozenset[int]) -> Tensor:
    """logits float32 [R, V] of sequences with so many rows each, one behind the other. The same object where nobody asks for anything.

    A grammar that fails is its sequence's fault; its rows stay as they are.
    """
    adjusted, row = logits, 0
    for sequence, count in counts:
        if _asks(sequence):
            adjusted = logits.clone() if adjusted is logits else adjusted
            _adjust(adjusted[row : row + count], sequence, eos_ids)
        row += count
    return adjusted


def _asks(sequence: Sequence) -> bool:
    params = sequence.params
    early = len(sequence.token_ids) - sequence.prompt_len < params.min_new_tokens
    return bool(early or params.logit_bias or params.penalizes or sequence.guide is not None)


def _adjust(rows: Tensor, sequence: Sequence, eos_ids: frozenset[int]) -> None:
    """rows [n, V]: a sequence's, in place."""
    params, device = sequence.params, rows.device
    if params.logit_bias:
        ids, values = zip(*params.logit_bias)
        rows.index_add_(1, torch.tensor(ids, device=device), torch.tensor(values, device=device).expand(len(rows), -1))
    if params.penalizes:
        for index, row in enumerate(rows):
            _penalize(row, sequence, sequence.drafts[:index])
    too_short = params.min_new_tokens - (len(sequence.token_ids) - sequence.prompt_len)
    if too_short > 0:
        ends = sorted(eos_ids | set(params.stop_token_ids))
        rows[:too_short, torch.tensor(ends, device=device)] = float("-inf")
    if sequence.guide is not None and sequence.fault is None:
        for row, mask in zip(rows, sequence.masks(sequence.drafts)):
            if mask is not None:
                row.masked_fill_(~mask.to(device), float("-inf"))


def _penalize(row: Tensor, sequence: Sequence, drafts: list[int]) -> None:
    """row [V], in place: the repetition penalty over prompt and answer, then the others over the answer."""
    params = sequence.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*sequence.token_ids, *drafts}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    times = Counter(sequence.generated)
    times.update(drafts)
    if times:
        ids, each = torch.tensor(list(times), device=row.device), torch.tensor(list(times.values()), device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * each
