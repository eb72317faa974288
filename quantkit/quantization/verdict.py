"""Is a quantized model good? One sentence from its KL to the source, beside plain rounding's on the
same tokens.

KL is in nats a token, a mean. exp(KL) bounds how much the perplexity on the source's own texts
grows, so 0.01 is one percent.
"""

from dataclasses import dataclass
from typing import Literal

NEAR, FAR = 0.01, 0.1
"""KL under the first is close to the source; above the second the answers are another model's."""
NO_BETTER = 0.9
"""Share of plain rounding's KL from which a calibrated scheme was not worth its time."""
USUAL = {
    "awq-w4a16": (0.16, 0.41),
    "fp4-w4a16": (0.16, 0.39),
    "int8-a8w8c16": (0.64, 0.89),
    "int4-w4a8-groups": (0.20, 0.40),
    "nvfp4-w4a4": (0.73, 0.76),
}
"""Least and most of plain rounding's KL that a scheme had on the models that judge it
(docs/lab/2026-11-27-quality.md, of int8 docs/lab/2026-11-27-int8-and-inputs.md)."""

Word = Literal["good", "fair", "poor"]


@dataclass(frozen=True)
class Verdict:
    """word: of one glance; sentence: what it rests on."""

    word: Word
    sentence: str


def judge(
    kl: float, top1_agree: float, tokens: int, plain_kl: float | None = None, scheme: str = ""
) -> Verdict:
    """kl, plain_kl: to the source, of the model and of plain rounding to the same grid; top1_agree:
    share of equal likeliest tokens.
    scheme: whose usual share of plain rounding's KL is told, if it is known."""
    word: Word = "good" if kl < NEAR else "fair" if kl < FAR else "poor"
    beside, useless = "", plain_kl is not None and kl > NO_BETTER * plain_kl and plain_kl > 0
    if plain_kl is not None and plain_kl > 0:
        beside = f", {kl / plain_kl:.2f} of plain rounding's {plain_kl:.2e}"
        if scheme in USUAL:
            beside += " (usual: {:.2f} to {:.2f})".format(*USUAL[scheme])
    if useless and word == "good":
        word = "fair"
    closer = "hardly closer" if plain_kl is not None and kl < plain_kl else "no closer"
    meaning = {
        "good": "close to the source",
        "fair": f"{closer} to the source than plain rounding"
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
    return Verdict(word, f"{word.capitalize()}: {meaning}. KL {kl:.2e}{beside}; {same}{advice}.")
