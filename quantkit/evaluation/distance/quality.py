"""Distance of a model's next-token predictions from another's: sums over tokens, the resulting
metrics, and their output."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.plots import layer_plot
from quantkit.common.result import Result
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.tracing import Trace
from quantkit.models.expert_counts import ExpertCounts


@dataclass(frozen=True)
class TextProgress:
    """`done` of `total` tokens were scored in `stage`."""

    stage: Literal["baseline", "model"]
    done: int
    total: int


@dataclass(frozen=True)
class GreedyPaths:
    """Greedy replies of two models to the same prompts. same: share of equal replies;
    tokens_until_apart: median number of tokens before the first difference, the whole length
    for equal replies."""

    prompts: int
    same: float
    tokens_until_apart: float


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """Means over predicted tokens. KL is KL(baseline || model) in nats; `kl_stderr` is over
    documents.

    expert_agree: share of the baseline's routed experts, over (token, MoE layer, slot), that the
    model chose too; None without experts. layer_errors: |h - h_baseline| / |h_baseline| (Frobenius,
    all tokens) of the hidden state after each layer. named_share: probability mass of the tokens
    for which a server returned log-probabilities; KL is then over those and all others as one.
    expert_counts: tokens routed to the model's experts, where requested; not in the JSON.
    """

    ppl: float
    tokens: int
    documents: int
    baseline_ppl: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    top1_agree: float | None = None
    expert_agree: float | None = None
    layer_errors: list[float] = field(default_factory=list)
    greedy: GreedyPaths | None = None
    named_share: float | None = None
    expert_counts: ExpertCounts | None = None

    def to_json(self) -> dict[str, Any]:
        """Metrics that do not apply are omitted."""
        names = "ppl tokens documents baseline_ppl kl kl_stderr top1_agree expert_agree named_share"
        found: dict[str, Any] = {
            name: value for name in names.split() if (value := getattr(self, name)) is not None
        }
        found |= {"layer_errors": self.layer_errors} if self.layer_errors else {}
        return found | ({"greedy": asdict(self.greedy)} if self.greedy else {})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer."""
        return [{"layer": layer, "error": error} for layer, error in enumerate(self.layer_errors)]

    @property
    def heading(self) -> str:
        return "next tokens" if self.kl is None else "next tokens, compared with the baseline"

    def facts(self) -> list[tuple[str, str]]:
        rows = [
            ("perplexity", f"{self.ppl:.4f}"),
            ("tokens", f"{self.tokens:,} in {self.documents} documents"),
        ]
        if self.kl is not None:
            spread = "" if self.kl_stderr is None else f" ± {self.kl_stderr:.1e}"
            rows += [
                ("baseline's perplexity", f"{self.baseline_ppl:.4f}"),
                ("KL from the baseline", f"{self.kl:.3e}{spread} nats a token"),
                ("same likeliest token", f"{self.top1_agree:.2%}"),
            ]
        if self.named_share is not None:
            rows.append(
                (
                    "tokens named by the server",
                    f"{self.named_share:.4%} of the probability; the KL is a lower bound",
                )
            )
        if self.greedy is not None:
            paths = (
                f"{self.greedy.tokens_until_apart:g} tokens (median), {self.greedy.same:.1%} "
                f"of {self.greedy.prompts} never"
            )
            rows.append(("greedy outputs diverge after", paths))
        if self.expert_agree is not None:
            rows.append(("same experts", f"{self.expert_agree:.2%}"))
        if self.layer_errors:
            last, most = self.layer_errors[-1], max(self.layer_errors)
            text = f"{last:.2e} after the last, {most:.2e} after {self.layer_errors.index(most)}"
            rows.append(("error after layers", text))
        return rows

    def pictures(self) -> list[str]:
        """The error after each layer."""
        layers = dict(enumerate(self.layer_errors))
        return (
            [layer_plot(layers, "error relative to the baseline's norm", log=True)]
            if layers
            else []
        )


_CHUNK = 128  # tokens per block of logits


@dataclass
class TokenSums:
    """Sums over documents, in float64; the KL divergence of every token, by document."""

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
    """Add the next-token metrics of one forward pass: positions from the one before a window's
    first scored token on predict the token after them."""
    device = trace.final.device
    starts = itertools.accumulate((len(window.ids) for window in windows), initial=0)
    rows_of = [
        torch.arange(window.first - 1, len(window.ids) - 1) + start
        for window, start in zip(windows, starts)
    ]
    positions = torch.cat(rows_of).to(device)
    targets = torch.cat([window.ids[window.first :] for window in windows]).to(device)
    divergences = []
    for rows, wanted in zip(positions.split(_CHUNK), targets[:, None].split(_CHUNK)):
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
        # Rounding can make the sum slightly negative.
        divergences.append((base.exp() * (base - logs)).sum(dim=-1).double().clamp(min=0))
        sums.same_top1 += int((base.argmax(dim=-1) == logs.argmax(dim=-1)).sum())
    sums.tokens += len(positions)
    if divergences:
        sums.document_kl += [
            part.tolist()
            for part in torch.cat(divergences).split([window.scored for window in windows])
        ]


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


def summarize(sums: TokenSums, documents: int, compared: bool) -> Quality:
    """The metrics of the sums. compared: whether there is a baseline."""
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
