"""What quantization does to the next token: both paths' last hidden states through the head, a block of the vocabulary at a time.

The head of R1 is 129,280 rows of 7168, so neither it nor the logits of all tokens are held whole. One pass over the blocks keeps, for
every token, the largest logit so far and the sums under it, rescaled when a larger one comes (arXiv 1805.02867).
"""

from collections.abc import Callable, Iterable
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


def compare_next_tokens(original: Tensor, quantized: Tensor, head: Iterable[Tensor], logits: Logits = products) -> NextToken:
    """original, quantized float32 [T, H]: of the same tokens, after the final norm. head: its rows, in blocks float32 [R, H]. logits: what
    the model makes of products with them."""
    p, q = Softmax(len(original), original.device), Softmax(len(original), original.device)
    difference = torch.zeros_like(p.total)  # sum over the vocabulary of exp(logit of p - p.largest) * (logit of p - logit of q)
    for rows in head:
        p_logits, q_logits = (logits(hidden @ rows.t(), p.seen) for hidden in (original, quantized))
        difference *= p.take(p_logits)
        q.take(q_logits)
        weight = (p_logits - p.largest[:, None]).exp_()
        difference += (weight * (p_logits - q_logits)).sum(-1, dtype=torch.float64)
    kl = difference / p.total - p.log_sum() + q.log_sum()
    return NextToken(len(original), float(kl.mean()), float((p.likeliest == q.likeliest).double().mean()))


class Softmax:
    """Of T tokens, over the `seen` first logits: largest [T], its place [T], and total [T], the sum of exp(logit - largest)."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.largest = torch.full((tokens,), -torch.inf, device=device)
        self.likeliest = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.total = torch.zeros(tokens, dtype=torch.float64, device=device)
        self.seen = 0

    def take(self, logits: Tensor) -> Tensor:
        """The next logits [T, R]. Returns what sums under the old largest are to be multiplied by, float64 [T]."""
        largest, place = logits.max(-1)
        self.likeliest = torch.where(largest > self.largest, place + self.seen, self.likeliest)
        largest = torch.maximum(largest, self.largest)
        factor = (self.largest.double() - largest.double()).exp_()
        self.total = self.total * factor + (logits - largest[:, None]).exp_().sum(-1, dtype=torch.float64)
        self.largest, self.seen = largest, self.seen + logits.shape[1]
        return factor

    def log_sum(self) -> Tensor:
        return self.largest.double() + self.total.log()
