"""What quantization does to the next token: both paths' last hidden states through the head, a
block of the vocabulary at a time.

The head of R1 is 129,280 rows of 7168, so neither it nor the logits of all tokens are held whole.
One pass over the blocks keeps, for every token, the largest logit so far and the sums under it,
rescaled when a larger one comes (arXiv 1805.02867).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 4096
"""Rows of the head that are read and multiplied at a time: 117 MB in float32 for R1."""
JUDGED_TOKENS = 1024


Logits = Callable[[Tensor, int], Tensor]
"""As `Ends.logits`."""


def products(of_rows: Tensor, first: int) -> Tensor:
    """Logits of most models: the products themselves."""
    return of_rows


@dataclass(frozen=True)
class NextToken:
    """tokens: how many were looked at. kl: mean over them of KL(original || quantized), nats. top1_agree: share with the same likeliest
    next token."""

    tokens: int
    kl: float
    top1_agree: float


def compare_next_tokens(
    original: Tensor, quantized: Tensor, head: Iterable[Tensor], logits: Logits = products
) -> NextToken:
    """original, quantized float32 [T, H]: of the same tokens, after the final norm. head: its rows,
    in blocks float32 [R, H]. logits: what the model makes of products with them."""
    return compare_paths(original, [quantized], head, logits)[0]


def compare_paths(
    original: Tensor, others: Sequence[Tensor], head: Iterable[Tensor], logits: Logits = products
) -> list[NextToken]:
    """The same for several paths, each against the original, in one pass over the head."""
    p, paths = (
        Softmax(len(original), original.device),
        [Softmax(len(original), original.device) for _ in others],
    )
    differences = [
        torch.zeros_like(p.total) for _ in others
    ]  # sums of exp(logit of p - p.largest) * (logit of p - logit of q)
    for rows in head:
        first = p.seen
        p_logits = logits(original @ rows.t(), first)
        factor = p.take(p_logits)
        weight = (p_logits - p.largest[:, None]).exp_()
        for other, q, difference in zip(others, paths, differences):
            q_logits = logits(other @ rows.t(), first)
            q.take(q_logits)
            difference *= factor
            difference += (weight * (p_logits - q_logits)).sum(-1, dtype=torch.float64)
    found = []
    for q, difference in zip(paths, differences):
        kl = difference / p.total - p.log_sum() + q.log_sum()
        found.append(
            NextToken(
                len(original), float(kl.mean()), float((p.likeliest == q.likeliest).double().mean())
            )
        )
    return found


class Softmax:
    """Of T tokens, over the `seen` first logits: largest [T], its place [T], and total [T], the sum
    of exp(logit - largest)."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.largest = torch.full((tokens,), -torch.inf, device=device)
        self.likeliest = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.total = torch.zeros(tokens, dtype=torch.float64, device=device)
        self.seen = 0

    def take(self, logits: Tensor) -> Tensor:
        """The next logits [T, R]. Returns what sums under the old largest are to be multiplied by,
        float64 [T]."""
        largest, place = logits.max(-1)
        self.likeliest = torch.where(largest > self.largest, place + self.seen, self.likeliest)
        largest = torch.maximum(largest, self.largest)
        factor = (self.largest.double() - largest.double()).exp_()
        self.total = self.total * factor + (logits - largest[:, None]).exp_().sum(
            -1, dtype=torch.float64
        )
        self.largest, self.seen = largest, self.seen + logits.shape[1]
        return factor

    def log_sum(self) -> Tensor:
        return self.largest.double() + self.total.log()
