"""report.json and report.html next to the weights: the verdict, losses by layer and linear, and how
to reproduce the output. Self-contained.

All of it follows from the run's settings, except for "run": when and where it was finished and how
long it took. The files of a resumed run equal those of an uninterrupted one in everything else.

KL is in nats a token, a mean. exp(KL) bounds the growth of the perplexity on the source's own
texts, so 0.01 is one percent.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from quantkit.calibrate.output import Findings
from quantkit.common.pages import render_page
from quantkit.common.plots import GREY, OURS, THEIRS, draw, label_axes, layer_plot
from quantkit.common.result import JsonObject
from quantkit.common.sizes import byte_unit, format_bytes, format_duration
from quantkit.models.table import Parameter

NEAR, FAR = 0.01, 0.1
"""KL below the first is close to the source; above the second the outputs are those of another
model."""
NO_BETTER = 0.9
"""Share of round-to-nearest's KL from which a calibrated scheme was not worth its time."""

Word = Literal["good", "fair", "poor"]


@dataclass(frozen=True)
class Verdict:
    """word: at a glance; sentence: its basis."""

    word: Word
    sentence: str


def judge(kl: float, top1_agree: float, tokens: int, plain_kl: float | None = None) -> Verdict:
    """kl, plain_kl: to the source, of the model and of round-to-nearest on the same grid;
    top1_agree: share of equal most likely tokens."""
    word: Word = "good" if kl < NEAR else "fair" if kl < FAR else "poor"
    compared, useless = "", plain_kl is not None and kl > NO_BETTER * plain_kl and plain_kl > 0
    if plain_kl is not None and plain_kl > 0:
        compared = f", {kl / plain_kl:.2f} of round-to-nearest's {plain_kl:.2e}"
    if useless and word == "good":
        word = "fair"
    closer = "hardly closer" if plain_kl is not None and kl < plain_kl else "no closer"
    meaning = {
        "good": "close to the source",
        "fair": f"{closer} to the source than round-to-nearest"
        if useless
        else "changed, and usable for most things",
        "poor": "far from the source",
    }[word]
    same = (
        f"the likeliest next token is the same for {top1_agree:.1%} of {tokens:,} held-out tokens"
    )
    advice = {
        "good": "",
        "fair": ", so score it on your tasks",
        "poor": ", so take a scheme of more bits, or other calibration text",
    }[word]
    return Verdict(word, f"{word.capitalize()}: {meaning}. KL {kl:.2e}{compared}; {same}{advice}.")


_TEMPLATE = Path(__file__).with_name("report.html.j2")
_WORST = 25
"""Linears listed."""
_COLOURS = (OURS, THEIRS, "#3d8b5f", "#8a4fa0", "#b23a48", "#4aa3b8", "#9a8b2f", "#555555")


@dataclass(frozen=True)
class RunFacts:
    """Of the process that finished the output. seconds: of the run with its restarts; found: units
    finished before the last of them."""

    finished: str
    seconds: float
    machine: str
    found: str = ""


@dataclass(frozen=True)
class RunDescription:
    """Content of a report besides the findings. Bytes are of tensors, by part of the model. source:
    its directory; command: reproduces the output; recipe: all its settings. quantized_share, left:
    as in `Coverage`; told: the inventory's note. experts_left: there are routed experts, and none
    was quantized. allocation: `GridAssignment.account`, if grids were chosen."""

    model: str
    source: str
    command: str
    recipe: JsonObject
    scheme: str
    format: str
    version: str
    calibration: str | None
    calibration_tokens: int
    min_expert_tokens: int
    source_bytes: dict[str, int]
    output_bytes: dict[str, int]
    quantized_share: float
    left: dict[str, int]
    experts_left: bool
    told: str = ""
    allocation: JsonObject | None = None


def report_files(
    account: RunDescription, findings: Findings, rows: Iterable[Parameter], run: RunFacts
) -> dict[str, bytes]:
    """report.json and report.html. rows: the model's table."""
    facts = summary(account, findings, rows) | {"run": vars(run)}
    return {
        "report.json": (json.dumps(facts, indent=1) + "\n").encode(),
        "report.html": _page(facts).encode(),
    }


def summary(account: RunDescription, findings: Findings, rows: Iterable[Parameter]) -> JsonObject:
    """All contents of the page, JSON-ready; an error without held-out inputs is null."""
    starved = {
        layer: [
            expert for expert, tokens in enumerate(counts) if tokens < account.min_expert_tokens
        ]
        for layer, counts in findings.expert_tokens.items()
    }
    modules = sorted(
        findings.errors, key=_natural
    )  # several ranks report them in another order than one
    held_out = _held_out(findings)
    return {
        **vars(account),
        "verdict": _verdict(account, held_out),
        "mean_error": findings.mean_error,
        "errors": {
            module: None if math.isnan(findings.errors[module]) else findings.errors[module]
            for module in modules
        },
        "methods": {module: findings.methods[module] for module in modules},
        "error_by_layer": by_layer({module: findings.errors[module] for module in modules}, rows),
        "held_out": held_out,
        "hidden_error": {
            layer: None if math.isnan(error) else error
            for layer, error in findings.hidden_error.items()
        },
        "scales": findings.scales,
        "expert_tokens": findings.expert_tokens,
        "starved_experts": {layer: experts for layer, experts in starved.items() if experts},
        "expert_agreement": findings.expert_agreement,
    }


def read_findings(out: Path) -> Findings:
    """Findings of a finished output, from its report.json."""
    facts = json.loads((out / "report.json").read_text(encoding="utf-8"))
    found = Findings(
        **{name: facts[name] for name in ("methods", "scales", "expert_tokens", "expert_agreement")}
    )
    found.errors, found.hidden_error = (
        {name: math.nan if error is None else error for name, error in facts[key].items()}
        for key in ("errors", "hidden_error")
    )
    found.next_token = {
        key: value for key, value in (facts["held_out"] or {}).items() if key != "expert_agree"
    }
    return found


def _verdict(account: RunDescription, held_out: dict[str, float] | None) -> dict[str, str]:
    """A word and a sentence."""
    if held_out is None:
        compare = (
            f"quantkit ppl OUT --baseline {shlex.quote(account.source)} --text FILE "
            "measures the distance"
        )
        sentence = f"Not measured: no text was held out. {compare}."
        return {"word": "unknown", "sentence": sentence}
    return vars(
        judge(
            held_out["kl"],
            held_out["top1_agree"],
            int(held_out["tokens"]),
            held_out.get("plain_kl"),
        )
    )


def _held_out(findings: Findings) -> dict[str, float] | None:
    """Keys as those of `ppl`; None without held-out tokens. expert_agree is the mean over layers
    with experts."""
    if not findings.next_token:
        return None
    agreement = findings.expert_agreement.values()
    return findings.next_token | (
        {"expert_agree": math.fsum(agreement) / len(agreement)} if agreement else {}
    )


def describe_drafts(held_out: Mapping[str, float]) -> str:
    """Accepted drafts of the MTP layer, or of a head that drafts blocks, on all held-out text and
    on what the model wrote of it; empty without either."""
    kinds = {"accepted_length": _accepted_length, "accepted_drafts": _accepted_drafts}
    found = next(((name, say) for name, say in kinds.items() if name in held_out), None)
    if found is None:
        return ""
    name, say = found
    own = "none of that text is the model's own, which --calibration self has it write"
    if (count := held_out.get(f"{name}_own_tokens")) is not None:
        own = f"on {int(count):,} tokens that the model wrote {say(held_out, f'{name}_own')}"
    return f"{say(held_out, name)}; {own}"


def _accepted_length(held_out: Mapping[str, float], name: str) -> str:
    own, low, high, source = _with_interval(held_out, name)
    return (
        f"{own:.2f} tokens a step of the DSpark head's blocks, the source's {source:.2f} "
        f"(95 % interval {low:.2f} to {high:.2f})"
    )


def _accepted_drafts(held_out: Mapping[str, float], name: str) -> str:
    own, low, high, source = _with_interval(held_out, name)
    return (
        f"{own:.1%} of the MTP layer's, the source's {source:.1%} (95 % interval {low:.1%} to "
        f"{high:.1%}): {1 + own:.2f} tokens a step of one draft, {1 + source:.2f}"
    )


def _with_interval(held_out: Mapping[str, float], name: str) -> list[float]:
    return [held_out[f"{name}{part}"] for part in ("", "_low", "_high", "_source")]


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def by_layer(errors: dict[str, float], rows: Iterable[Parameter]) -> dict[str, dict[str, float]]:
    """kind of linear -> layer -> median error; routed experts are a kind of their own."""
    in_layers = {row.module: row for row in rows if row.layer is not None}
    found: dict[str, dict[str, list[float]]] = {}
    for module, error in errors.items():
        row = in_layers.get(module)
        if row is not None and not math.isnan(error):
            found.setdefault(linear_kind(row), {}).setdefault(str(row.layer), []).append(error)
    return {
        kind: {layer: median(values) for layer, values in layers.items()}
        for kind, layers in found.items()
    }


def linear_kind(row: Parameter) -> str:
    """ "o_proj", "shared down_proj", "expert gate_proj"."""
    name = row.module.rsplit(".", 1)[1]
    return (
        f"expert {name}"
        if row.block == "expert"
        else f"shared {name}"
        if row.block == "shared_expert"
        else name
    )


def _page(facts: JsonObject) -> str:
    filters: dict[str, Callable[..., object]] = {
        "size": format_bytes,
        "span": format_duration,
        "count": _count,
        "scientific": lambda value: "-" if value is None else f"{value:.2e}",
    }
    worst = sorted(
        ((error, module) for module, error in facts["errors"].items() if error is not None),
        reverse=True,
    )[:_WORST]
    plots = {
        "errors": _error_plot(facts["error_by_layer"]) if facts["error_by_layer"] else "",
        "hidden": layer_plot(
            _numbered(facts["hidden_error"]), "squared error over squared norm", log=True
        ),
        "tokens": _tokens_plot(facts["expert_tokens"], facts["min_expert_tokens"])
        if facts["expert_tokens"]
        else "",
        "agreement": layer_plot(
            _numbered(facts["expert_agreement"]), "share of the same experts", log=False
        ),
        "scales": _scale_plot(facts["scales"]) if facts["scales"] else "",
        "sizes": _size_plot(facts["source_bytes"], facts["output_bytes"]),
        "curve": curve_plot(facts["allocation"]) if facts["allocation"] else "",
    }
    return render_page(
        _TEMPLATE,
        filters,
        facts=facts,
        plots=plots,
        worst=worst,
        methods=Counter(facts["methods"].values()).most_common(),
    )


def _count(weights: int) -> str:
    """671.0 billion, 14.0 million, 940."""
    for scale, name in ((1e9, " billion"), (1e6, " million")):
        if weights >= scale:
            return f"{weights / scale:.1f}{name}"
    return f"{weights:,}"


def _numbered(layers: dict[str, float | None]) -> dict[int, float]:
    return {int(layer): value for layer, value in layers.items() if value is not None}


def _error_plot(kinds: dict[str, dict[str, float]]) -> str:
    axes, plot = draw(5.0, 3.4)
    for number, (kind, layers) in enumerate(sorted(kinds.items())):
        points = sorted((int(layer), error) for layer, error in layers.items())
        colour, style = _COLOURS[number % len(_COLOURS)], "-" if number < len(_COLOURS) else "--"
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            style,
            marker="o",
            markersize=3,
            color=colour,
            label=kind,
            linewidth=1,
        )
    axes.set_yscale("log")
    label_axes(axes, "layer", "median output error")
    plot.figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    return plot.svg()


def _tokens_plot(layers: dict[str, list[int]], starved: int) -> str:
    """Every layer's experts in descending order of tokens."""
    axes, plot = draw(5.0, 2.6)
    for counts in layers.values():
        axes.plot(
            sorted(counts, reverse=True), color=OURS, alpha=max(0.15, 1 / len(layers)), linewidth=1
        )
    axes.axhline(starved, color=THEIRS, linewidth=1, linestyle="--", label="starved below this")
    axes.set_yscale("symlog", linthresh=max(starved, 1))
    axes.set_ylim(bottom=0)
    label_axes(axes, "experts of a layer, busiest first (a line a layer)", "calibration tokens")
    axes.legend(fontsize=8, frameon=False)
    return plot.svg()


def _scale_plot(scales: dict[str, list[float]]) -> str:
    """Smallest to largest s of every group, in the order of the layers."""
    axes, plot = draw(5.0, 2.6)
    for place, (low, middle, high) in enumerate(scales.values()):
        axes.plot([place, place], [low, high], color=GREY, linewidth=1.2)
        axes.plot([place], [middle], marker="_", color=OURS, markersize=5)
    axes.set_yscale("log")
    label_axes(axes, "groups, first layer to last", "s: smallest, median, largest")
    return plot.svg()


def curve_plot(allocation: JsonObject) -> str:
    """Predicted KL over the size of the output, with this output marked."""
    axes, plot = draw(5.0, 2.6)
    scale, unit = byte_unit(max(point["size"] for point in allocation["curve"]))
    points = [
        (point["size"] / scale, point["kl"]) for point in allocation["curve"] if point["kl"] > 0
    ]
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        marker="o",
        markersize=3,
        color=OURS,
        linewidth=1,
        label="best of each size",
    )
    if allocation["kl"] > 0:
        axes.plot(
            [allocation["size"] / scale],
            [allocation["kl"]],
            marker="D",
            markersize=7,
            color=THEIRS,
            linestyle="",
            label="this output",
        )
    axes.set_yscale("log")
    label_axes(axes, f"size, {unit}", "predicted KL")
    axes.legend(fontsize=8, frameon=False)
    return plot.svg()


def _size_plot(source: dict[str, int], output: dict[str, int]) -> str:
    parts = [
        part
        for part, nbytes in sorted(output.items(), key=lambda item: -item[1])
        if nbytes * 200 > sum(output.values())
    ]
    axes, plot = draw(5.0, 0.7 + 0.45 * len(parts))
    scale, unit = byte_unit(max([*source.values(), *output.values(), 1]))
    for place, part in enumerate(parts):
        axes.barh(
            place - 0.18,
            source.get(part, 0) / scale,
            height=0.34,
            color=GREY,
            label="source" if place == 0 else None,
        )
        axes.barh(
            place + 0.18,
            output[part] / scale,
            height=0.34,
            color=OURS,
            label="output" if place == 0 else None,
        )
    axes.set_yticks(range(len(parts)), parts)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    label_axes(axes, unit, "")
    axes.legend(fontsize=8, frameon=False)
    return plot.svg()
