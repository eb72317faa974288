"""Distance of a model's next-token predictions from another's: sums over tokens, the resulting
metrics, and their output."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from quantkit.common.errors import QuantkitError
from quantkit.common.plots import OURS, THEIRS, draw, label_axes, layer_plot
from quantkit.common.result import JsonObject, Result
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.tracing import Trace
from quantkit.evaluation.statistics.estimates import doubling_range
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


@dataclass(frozen=True)
class PositionRange:
    """Means over the scored tokens number `first` to `last` of the `documents` that have them, named
    as in Quality; the intervals of 95 % are of kl, top1_agree and accuracy_change."""

    first: int
    last: int
    tokens: int
    documents: int
    kl: float
    kl_stderr: float | None
    top1_agree: float
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """Means over predicted tokens. KL is KL(baseline || model) in nats. accuracy: share of tokens that
    were the likeliest next ones; None where a server samples. kl_stderr, and the intervals of
    95 %, are over documents: of ppl, of accuracy, of ppl over baseline_ppl (ppl_ratio), and of the
    accuracies' difference (accuracy_change).

    expert_agree: share of the baseline's routed experts, over (token, MoE layer, slot), that the
    model chose too; None without experts. layer_errors: |h - h_baseline| / |h_baseline| (Frobenius)
    of the hidden state after each layer. Both are over the first 65,536 tokens. positions: KL, agreement
    and accuracy along the text, in ranges whose length doubles. named_share: probability mass of the
    tokens for which a server returned log-probabilities; KL is then over those and all others as one.
    expert_counts: tokens routed to the model's experts, where requested; not in the JSON.
    """

    ppl: float
    tokens: int
    documents: int
    accuracy: float | None = None
    baseline_ppl: float | None = None
    baseline_accuracy: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    kl: float | None = None
    kl_stderr: float | None = None
    top1_agree: float | None = None
    expert_agree: float | None = None
    layer_errors: list[float] = field(default_factory=list)
    positions: list[PositionRange] = field(default_factory=list)
    greedy: GreedyPaths | None = None
    named_share: float | None = None
    expert_counts: ExpertCounts | None = None

    def to_json(self) -> JsonObject:
        """Metrics that do not apply are omitted."""
        found = {name: value for name, value in vars(self).items() if value not in (None, [], {})}
        found.pop("expert_counts", None)
        if self.positions:
            found["positions"] = [asdict(one) for one in self.positions]
        return found | ({"greedy": asdict(self.greedy)} if self.greedy else {})

    def rows(self) -> list[JsonObject]:
        """A row for each layer."""
        return [{"layer": layer, "error": error} for layer, error in enumerate(self.layer_errors)]

    @property
    def heading(self) -> str:
        return "next tokens" if self.kl is None else "next tokens, compared with the baseline"

    def facts(self) -> list[tuple[str, str]]:
        rows = [
            ("perplexity", f"{self.ppl:.4f}{self._interval('ppl', '.4g')}"),
            ("tokens", f"{self.tokens:,} in {self.documents} documents"),
        ]
        if self.accuracy is not None:
            found = f"{self.accuracy:.2%}{self._interval('accuracy', '.2%')}"
            rows.append(("next-token accuracy", found))
        if self.kl is not None and self.baseline_ppl is not None:
            ratio = f"{self.ppl / self.baseline_ppl:.4f}{self._interval('ppl_ratio', '.4f')}"
            spread = "" if self.kl_stderr is None else f" ± {self.kl_stderr:.1e}"
            rows.append(("baseline's perplexity", f"{self.baseline_ppl:.4f}; ratio {ratio}"))
            if self.accuracy is not None and self.baseline_accuracy is not None:
                change = 100 * (self.accuracy - self.baseline_accuracy)
                by = f"{change:+.2f} points{self._interval('accuracy_change', '+.2f', 100)}"
                rows.append(("baseline's accuracy", f"{self.baseline_accuracy:.2%}; {by}"))
            rows += [
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
            if min(self.layer_errors) > 1:
                text = "more than 1 in each: hidden states are rotated, or have nothing in common"
            rows.append(("error after layers", text))
        return rows

    def _interval(self, name: str, form: str, unit: float = 1) -> str:
        """In brackets, times `unit`; empty for one document."""
        if name not in self.intervals:
            return ""
        low, high = (unit * end for end in self.intervals[name])
        return f" (95 %: {low:{form}} to {high:{form}})"

    def pictures(self) -> list[str]:
        """KL and next-token accuracy along the text, and the error after each layer."""
        layers = dict(enumerate(self.layer_errors))
        plots = [
            *self._along(),
            layer_plot(layers, "error relative to the baseline's norm", log=True),
        ]
        return [plot for plot in plots if plot]

    def _along(self) -> list[str]:
        """Means at the middle of each range: KL with two standard errors, and both accuracies; none
        for a single range."""
        ranges = self.positions
        if len(ranges) < 2:
            return []
        places, across = [(one.first + one.last) / 2 for one in ranges], "tokens from its beginning"
        errors = [2 * (one.kl_stderr or 0.0) for one in ranges]
        axes, plot = draw(5.0, 2.6)
        kl = [one.kl for one in ranges]
        axes.errorbar(places, kl, yerr=errors, marker="o", markersize=3, color=OURS)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        label_axes(axes, across, "KL, nats a token")
        plots = [plot.svg()]
        if self.accuracy is not None:
            axes, plot = draw(5.0, 2.6)
            for name, color, label in (
                ("baseline_accuracy", THEIRS, "baseline"),
                ("accuracy", OURS, "here"),
            ):
                shares = [100 * getattr(one, name) for one in ranges]
                axes.plot(places, shares, marker="o", markersize=3, color=color, label=label)
            axes.set_xscale("log")
            axes.legend(fontsize=8, frameon=False)
            label_axes(axes, across, "next-token accuracy, %")
            plots.append(plot.svg())
        return plots


_CHUNK = 128  # tokens per block of logits


Scores = dict[str, Tensor]
"""Of a document's scored tokens, float64 [T] each: `nll`, the negative log-likelihood, and `right`,
whether it was the likeliest token (absent where a server sampled). With a baseline also its
`base_nll` and `base_right`, `kl`, and `same`: whether both models have the same likeliest token."""


@dataclass
class Sums:
    """Scores by document, and sums over tokens by layer."""

    documents: list[Scores] = field(default_factory=list)
    same_experts: int = 0
    experts: int = 0
    error: dict[int, float] = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)


def _scores(logs: Tensor, wanted: Tensor, prefix: str = "") -> Scores:
    """Of rows of log-probabilities and the wanted token of each, int64 [T, 1]."""
    right = logs.argmax(dim=-1, keepdim=True) == wanted
    nll = -logs.gather(1, wanted).double()
    return {f"{prefix}nll": nll[:, 0], f"{prefix}right": right[:, 0].double()}


def add_tokens(
    sums: Sums,
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
    parts = list[Scores]()
    for rows, wanted in zip(positions.split(_CHUNK), targets[:, None].split(_CHUNK)):
        logs = head(trace.final[rows]).float().log_softmax(dim=-1)
        parts.append(_scores(logs, wanted))
        if theirs is None or their_head is None:
            continue
        base = their_head(theirs.final[rows]).float().log_softmax(dim=-1)
        if base.shape != logs.shape:
            raise QuantkitError(
                f"the vocabularies have {logs.shape[1]} and {base.shape[1]} entries",
                "compare a model with its original",
            )
        # Rounding can make the sum slightly negative.
        kl = (base.exp() * (base - logs)).sum(dim=-1).double().clamp(min=0)
        same = (base.argmax(dim=-1) == logs.argmax(dim=-1)).double()
        parts[-1] |= _scores(base, wanted, "base_") | {"kl": kl, "same": same}
    lengths = [window.scored for window in windows]
    columns = {
        name: torch.cat([part[name] for part in parts]).cpu().split(lengths) for name in parts[0]
    }
    sums.documents += [dict(zip(columns, one)) for one in zip(*columns.values())]


def add_layers(sums: Sums, ours: Trace, theirs: Trace) -> None:
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


def summarize(sums: Sums) -> Quality:
    """The metrics of the sums, compared with the baseline's where there are any."""
    documents = sums.documents
    tokens = [len(one["nll"]) for one in documents]
    totals = {name: [float(one[name].sum()) for one in documents] for name in documents[0]}

    def mean(name: str) -> float:
        return sum(totals[name]) / sum(tokens)

    def change(name: str) -> list[float]:
        return [one - base for one, base in zip(totals[name], totals[f"base_{name}"])]

    sampled = "right" not in totals
    intervals = {"ppl": _interval(totals["nll"], tokens, _exp)}
    if not sampled:
        intervals["accuracy"] = _interval(totals["right"], tokens)
    found = Quality(
        _exp(mean("nll")), sum(tokens), len(documents), None if sampled else mean("right")
    )
    if "kl" in totals:
        intervals["ppl_ratio"] = _interval(change("nll"), tokens, _exp)
        if not sampled:
            intervals["accuracy_change"] = _interval(change("right"), tokens)
        found = replace(
            found,
            baseline_ppl=_exp(mean("base_nll")),
            baseline_accuracy=None if sampled else mean("base_right"),
            kl=mean("kl"),
            kl_stderr=_stderr(totals["kl"], tokens) if len(documents) > 1 else None,
            top1_agree=mean("same"),
            positions=_positions(documents),
            expert_agree=sums.same_experts / sums.experts if sums.experts else None,
            layer_errors=[
                math.sqrt(sums.error[layer] / sums.norm[layer]) for layer in sorted(sums.error)
            ],
        )
    return replace(found, intervals=intervals if len(documents) > 1 else {})


def _positions(documents: list[Scores]) -> list[PositionRange]:
    """Along the text, up to the end of the longest document; a document counts in the ranges that it
    reaches."""
    longest, done, ranges = max(len(one["kl"]) for one in documents), 0, list[PositionRange]()
    while done < longest:
        first, last = doubling_range(done + 1)
        parts = [
            {name: column[first - 1 : last] for name, column in one.items()}
            for one in documents
            if len(one["kl"]) >= first
        ]
        ranges.append(_range(first, min(last, longest), parts))
        done = last
    return ranges


def _range(first: int, last: int, parts: list[Scores]) -> PositionRange:
    """Of the parts of documents that lie there."""
    counts = [len(part["kl"]) for part in parts]
    sums = {name: [float(part[name].sum()) for part in parts] for name in parts[0]}
    means = {name: sum(found) / sum(counts) for name, found in sums.items()}
    error, intervals = None, dict[str, tuple[float, float]]()
    if len(parts) > 1:
        error = _stderr(sums["kl"], counts)
        intervals["kl"] = _interval(sums["kl"], counts, lambda end: max(end, 0.0))
        intervals["top1_agree"] = _interval(sums["same"], counts, lambda end: min(end, 1.0))
        if "right" in sums:
            change = [ours - theirs for ours, theirs in zip(sums["right"], sums["base_right"])]
            intervals["accuracy_change"] = _interval(change, counts)
    return PositionRange(
        first,
        last,
        sum(counts),
        len(parts),
        means["kl"],
        error,
        means["same"],
        means.get("right"),
        means.get("base_right"),
        intervals,
    )


_NORMAL_95 = 1.959964


def _stderr(sums: Sequence[float], tokens: Sequence[int]) -> float:
    """Of sum(sums) / sum(tokens), a ratio whose documents were drawn (Cochran, Sampling Techniques,
    section 6.3)."""
    mean, count = sum(sums) / sum(tokens), len(tokens)
    spread = math.fsum((a - mean * n) ** 2 for a, n in zip(sums, tokens))
    return math.sqrt(spread * count / max(count - 1, 1)) / sum(tokens)


def _interval(
    sums: Sequence[float], tokens: Sequence[int], scale: Callable[[float], float] = float
) -> tuple[float, float]:
    """95 % of the mean over tokens, on a scale."""
    mean, room = sum(sums) / sum(tokens), _NORMAL_95 * _stderr(sums, tokens)
    return scale(mean - room), scale(mean + room)


def _exp(mean: float) -> float:
    """Perplexity; of a broken model at most what a float holds."""
    return math.exp(min(mean, 700.0))
