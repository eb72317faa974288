"""The cost M [H, H] of an error in the residual stream, used by `compensate_both`, and the KL of
the next token.

Half of the cost is that to the next readers of the stream: for a reader W after a norm of gain g, D
= diag(g), an error e gives the output error W D e, relative to what W D gives for random inputs; so
each adds D W^T W D / ||W D||^2, and all have the same weight, the router too. The other half is the
Fisher information of the next token, as the stream would predict it if no layer followed: the mean
of g g^T, g the gradient of log p(y) with respect to the stream through the final norm and the head,
y drawn from p (arXiv 2505.22988 obtains it by backpropagation through the whole model, which a
model streamed layer by layer does not allow).

Several residual streams are mixed by numbers of each token, so an error of a sublayer's output
reaches every stream, its readers and the end as a multiple of itself: M is then that of the merged
stream, and what the factors do is neglected.

The head of R1 is 129,280 rows of 7168, so neither it nor the logits of all tokens are held whole.
One pass over blocks of the vocabulary keeps, for every token, the largest logit so far and the sums
relative to it, rescaled when a larger one comes (arXiv 1805.02867).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibrate.embed_and_head import EmbedAndHead
from quantkit.calibrate.source_model import ParameterReader
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.quant.tensor_cores import sample_products

BLOCK_ROWS = 4096
"""Rows of the head read and multiplied at a time: 117 MB in float32 for R1."""
JUDGED_TOKENS, JUDGED_ROWS = 1024, 1024
"""Held-out tokens whose next tokens are compared, and rows of the head at a time: several logits of
each are alive together."""


Logits = Callable[[Tensor, int], Tensor]
"""As `EmbedAndHead.logits`."""


def products(of_rows: Tensor, first: int) -> Tensor:
    """Logits of most models: the products themselves."""
    return of_rows


@dataclass(frozen=True)
class NextTokenKl:
    """tokens: how many were compared. kl: mean over them of KL(original || quantized), nats.
    top1_agree: share with the same most likely next token."""

    tokens: int
    kl: float
    top1_agree: float


def compare_paths(
    original: Tensor,
    others: Sequence[Tensor],
    head: Iterable[Tensor],
    logits: Logits = products,
    own_heads: Sequence[Iterable[Tensor]] = (),
) -> list[NextTokenKl]:
    """Each of `others` compared with the original, in one pass over the head. original, others
    float32 [T, H]: hidden states of the same tokens after the final norm. head: its rows, in blocks
    float32 [R, H]; own_heads: those of the others in the same blocks, where they have other ones.
    logits: from products with them to logits."""
    p, paths = (
        Softmax(len(original), original.device),
        [Softmax(len(original), original.device) for _ in others],
    )
    differences = [
        torch.zeros_like(p.total) for _ in others
    ]  # sums of exp(logit of p - p.largest) * (logit of p - logit of q)
    for rows, *own in zip(head, *own_heads, strict=True):
        first = p.offset
        p_logits = logits(original @ rows.t(), first)
        factor = p.update(p_logits)
        weight = (p_logits - p.largest[:, None]).exp_()
        for other, q, difference, q_rows in zip(
            others, paths, differences, own or [rows] * len(others)
        ):
            q_logits = logits(other @ q_rows.t(), first)
            q.update(q_logits)
            difference *= factor
            difference += (weight * (p_logits - q_logits)).sum(-1).double()
    found = []
    for q, difference in zip(paths, differences):
        kl = difference / p.total - p.log_sum() + q.log_sum()
        found.append(
            NextTokenKl(
                len(original), float(kl.mean()), float((p.argmax == q.argmax).double().mean())
            )
        )
    return found


def likeliest_tokens(hidden: Tensor, head: Iterable[Tensor]) -> Tensor:
    """hidden [T, H] before the head -> the token of the largest logit, int64 [T]."""
    found = Softmax(len(hidden), hidden.device)
    for rows in head:
        found.update(hidden @ rows.t())
    return found.argmax


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` trials."""
    z = 1.96
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    return (middle - half) / scale, (middle + half) / scale


def accepted_shares(name: str, right: Tensor) -> dict[str, float]:
    """Shares of drafts under names of the report. right float64 [2, T]: 1 for an accepted one, of
    the source and of what was quantized."""
    source, share = right.mean(1).tolist()
    low, high = share_interval(share, right.shape[1])
    parts = {"": share, "_low": low, "_high": high, "_source": source}
    return {f"{name}{part}": value for part, value in parts.items()}


class Softmax:
    """Online softmax of T tokens over the `offset` first logits: largest [T], argmax [T], and total
    [T], the sum of exp(logit - largest)."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.largest = torch.full((tokens,), -torch.inf, device=device)
        self.argmax = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.total = torch.zeros(tokens, dtype=torch.float64, device=device)
        self.offset = 0

    def update(self, logits: Tensor) -> Tensor:
        """Add the next logits [T, R]. Returns the factor that rescales sums relative to the
        previous largest, float64 [T]."""
        largest, place = logits.max(-1)
        self.argmax = torch.where(largest > self.largest, place + self.offset, self.argmax)
        largest = torch.maximum(largest, self.largest)
        factor = (self.largest.double() - largest.double()).exp_()
        self.total = self.total * factor + (logits - largest[:, None]).exp_().sum(-1).double()
        self.largest, self.offset = largest, self.offset + logits.shape[1]
        return factor

    def log_sum(self) -> Tensor:
        return self.largest.double() + self.total.log()


READ_NORMS = 2
"""Norms whose readers count: with one, KL increases by 40 % on tiny-r1; a third changes nothing."""
HEAD_TOKENS = 512
DRAWS = 8
"""Next tokens drawn for each of HEAD_TOKENS tokens."""


def cost_to_readers(readers: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Sum over (gain [H], W [N_i, H]) of D W^T W D / ||W D||^2, of trace 1 each; scaled to trace 1.
    None without readers."""
    total, count = None, 0
    for gain, w in readers:
        scaled = w * gain
        scaled /= scaled.square().sum().sqrt().clamp(min=1e-30)
        total = scaled.t() @ scaled if total is None else total.addmm_(scaled.t(), scaled)
        count += 1
    return None if total is None else total.div_(count)


def cost_to_next_token(
    hidden: Tensor,
    x: Tensor,
    gain: Tensor,
    eps: float,
    head: Iterable[Tensor],
    logits: Logits = products,
    centred: bool = False,
) -> Tensor:
    """Fisher information [H, H] of the next token at the residual stream `hidden` float32 [T, H],
    scaled to trace 1: the covariance of the gradients of drawn tokens.

    x [T, H]: the same after the final norm, of gain [H] and eps, which subtracts the mean if
    `centred`; head: its rows, in blocks float32 [R, H]. A nonlinearity of the logits, such as a
    cap, is neglected in the gradient.
    """
    drawn = draw_rows(x, head, logits)
    drawn -= drawn.mean(0)
    around = hidden - hidden.mean(-1, keepdim=True) if centred else hidden
    size = (around.square().mean(-1, keepdim=True) + eps).sqrt()
    direction = around / size
    total = hidden.new_zeros(hidden.shape[1], hidden.shape[1])
    for one in drawn:
        by_norm = one * gain
        by_stream = (by_norm - direction * (by_norm * direction).mean(-1, keepdim=True)) / size
        by_stream = by_stream - by_stream.mean(-1, keepdim=True) if centred else by_stream
        total.addmm_(by_stream.t(), by_stream)
    return total.div_(total.diagonal().sum().clamp(min=1e-30))


def draw_rows(x: Tensor, head: Iterable[Tensor], logits: Logits) -> Tensor:
    """Rows of the head of DRAWS next tokens for each of x float32 [T, H], [DRAWS, T, H], drawn from
    the softmax in one pass over the head.

    With S the sum of exp(logit) so far, u S with u uniform in [0, 1) is a place in it; if that lies
    in the latest block, the draw becomes the row there, otherwise it stays. So there is one random
    number for a block, and none for a row.
    """
    generator = torch.Generator(x.device).manual_seed(0)
    largest, before = x.new_full((len(x), 1), -torch.inf), x.new_zeros(len(x), 1)
    drawn, first = x.new_zeros(DRAWS, *x.shape), 0
    for rows in head:
        own = logits(x @ rows.t(), first)
        higher = torch.maximum(largest, own.amax(-1, keepdim=True))
        up_to = own.sub_(higher).exp_().cumsum(-1)
        total = before * (largest - higher).exp_() + up_to[:, -1:]
        place = total * torch.rand(len(x), DRAWS, generator=generator, device=x.device)
        inside = (place < up_to[:, -1:]).t()
        row = torch.searchsorted(up_to, place).clamp_(max=len(rows) - 1).t()
        drawn[inside] = rows[row[inside]]
        largest, before, first = higher, total, first + len(rows)
    return drawn


class ResidualStream:
    """The readers of one model's residual stream. groups: those of its decoder layers, in forward
    order. norm: the final one; None if the model does not end with one, and the cost is then
    unknown."""

    def __init__(
        self,
        source: ParameterReader,
        rows: Sequence[Parameter],
        groups: Sequence[ScaleGroup],
        embed_and_head: EmbedAndHead,
    ) -> None:
        self.source, self.embed_and_head = source, embed_and_head
        self.by_module = {row.module: row for row in rows}
        self.norm = next((row for row in rows if row.layer is None and row.role == "norm"), None)
        own = (row for row in rows if row.layer is None)
        self.head = min(
            (row for row in own if row.role in ("head", "embedding")),
            key=lambda row: row.role != "head",
        )  # or tied
        self.shape = self.head.shape[1:]
        self.reading = [
            group
            for group in groups
            if group.producer_is_norm and self.by_module[group.producer].shape == self.shape
        ]

    def squared_gain(self, layer: int) -> Tensor | None:
        """Squared gain of the norm that reads the stream after a decoder layer, [H]. A channel with
        almost no gain may hold the largest values of all, and an error there costs almost
        nothing."""
        following = (
            row
            for row in self.by_module.values()
            if row.role == "norm" and row.layer == layer + 1 and not row.mtp
        )
        norm = next(
            (row for row in following if self.norm is not None and row.shape == self.norm.shape),
            self.norm,
        )
        return None if norm is None else self._squared(norm)

    def _squared(self, norm: Parameter) -> Tensor:
        """Squared gain [H], the mean over the streams of a norm that has one for each."""
        return self.source.gain(norm).square().view(-1, *self.shape).mean(0)

    @sample_products()
    def next_token_cost(self, hidden: Tensor, eps: float) -> Tensor:
        """`cost_to_next_token` [H, H] of some tokens of the hidden states float32 [T, W]."""
        assert self.norm is not None, "no norm at the end of the stack"
        some = hidden[:: max(1, len(hidden) // HEAD_TOKENS)][:HEAD_TOKENS]
        gain = self.source.gain(self.norm)
        return cost_to_next_token(
            self.embed_and_head.merged(some),
            self.embed_and_head.final_norm(some),
            gain if gain.shape == self.shape else self._squared(self.norm).sqrt(),
            eps,
            self.source.blocks(self.head, BLOCK_ROWS),
            self.embed_and_head.logits,
            self.embed_and_head.centred,
        )

    @sample_products()
    def cost(self, sublayer: Sequence[Parameter], next_token: Tensor) -> Tensor:
        """Cost of an error in what the sublayer with these parameters writes, [H, H]. next_token:
        `next_token_cost` of the stream before its layer, which changes little within a layer. If
        none of the sublayer's norms is known to read the stream, only the next token counts."""
        cost = next_token.clone()
        own = {row.module for row in sublayer}
        here = max(
            (place for place, group in enumerate(self.reading) if group.producer in own),
            default=None,
        )
        read = (
            None
            if here is None
            else cost_to_readers(self._weights(self.reading[here + 1 :][:READ_NORMS]))
        )
        if read is not None:
            cost += read
        producers = {group.producer for group in self.reading}
        for row in sublayer:
            if row.role == "norm" and row.shape == self.shape and row.module not in producers:
                gain = self.source.gain(
                    row
                )  # of a norm between the sublayer's output and the stream
                cost.mul_(gain).mul_(gain[:, None])
        return cost

    def _weights(self, groups: Sequence[ScaleGroup]) -> Iterator[tuple[Tensor, Tensor]]:
        """(gain, weight) of the readers after these norms. The first routed expert represents all
        if none is shared."""
        for group in groups:
            gain = self.source.gain(self.by_module[group.producer])
            rows = [self.by_module[module] for module in group.consumers]
            shared = [row for row in rows if row.expert is None]
            for row in (
                shared
                if any(row.role == "linear" for row in shared)
                else [row for row in rows if not row.expert]
            ):
                yield gain, self.source.dequantized(row)
