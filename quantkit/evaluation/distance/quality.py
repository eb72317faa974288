"""How far a model's next tokens are from another's: the figures, and how they are printed."""

from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.common.plots import layer_plot
from quantkit.common.result import Result
from quantkit.evaluation.distance.sampled import GreedyPaths
from quantkit.models.expert_counts import ExpertCounts


@dataclass(frozen=True)
class TextProgress:
    """`done` of `total` tokens are through the model in `stage`."""

    stage: Literal["baseline", "model"]
    done: int
    total: int


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """Means over predicted tokens. KL is KL(baseline || model) in nats; `kl_stderr` is over documents.

    expert_agree: share of the baseline's chosen experts, over (token, MoE layer, slot), that the
    model chose too; None without experts.
    layer_errors: |h - h_baseline| / |h_baseline| (Frobenius, all tokens) of the hidden state after each layer.
    named_share: probability of the tokens that a server named; KL beside a server is over those and
    all others as one.
    expert_counts: what the model's experts were asked, where that was to be counted; not in the
    JSON.
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
        """ppl, tokens, documents; with a baseline also the rest. Figures that do not apply are left
        out."""
        every = {
            "ppl": self.ppl,
            "tokens": self.tokens,
            "documents": self.documents,
            "baseline_ppl": self.baseline_ppl,
            "kl": self.kl,
        }
        every |= {
            "kl_stderr": self.kl_stderr,
            "top1_agree": self.top1_agree,
            "expert_agree": self.expert_agree,
        }
        every |= {"named_share": self.named_share}
        found: dict[str, Any] = {name: value for name, value in every.items() if value is not None}
        found |= {"layer_errors": self.layer_errors} if self.layer_errors else {}
        return found | ({"greedy": self.greedy.to_json()} if self.greedy else {})

    @property
    def heading(self) -> str:
        return "next tokens" if self.kl is None else "next tokens, beside the baseline's"

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
                    f"{self.named_share:.4%} of the probability; the KL is at least so large",
                )
            )
        if self.greedy is not None:
            paths = (
                f"{self.greedy.tokens_until_apart:g} tokens (median), {self.greedy.same:.1%} "
                f"of {self.greedy.prompts} never"
            )
            rows.append(("greedy paths part after", paths))
        if self.expert_agree is not None:
            rows.append(("same experts", f"{self.expert_agree:.2%}"))
        return rows + [
            (f"  error after layer {number}", f"{error:.2e}")
            for number, error in enumerate(self.layer_errors)
        ]

    def pictures(self) -> list[str]:
        """The error after each layer."""
        layers = dict(enumerate(self.layer_errors))
        return [layer_plot(layers, "error beside the baseline's norm", log=True)] if layers else []
