"""How far a checkpoint whose linears round what they read is from its source, and what of that is
the rounding."""

import json
from typing import NamedTuple

from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.quantization.convert import convert


class Distances(NamedTuple):
    """KL in nats a token: to the source, and to the checkpoint's own weights over inputs as they
    are."""

    source: float
    rounding: float


def distances(written, source, directory):
    """Leaves DIRECTORY/plain, the weights in FP32."""
    text = directory / "text.jsonl"
    text.write_text(json.dumps({"text": "3 4 7 11 18 29 47 76 " * 8}) + "\n")
    convert(written, directory / "plain", dtype="fp32")
    found = [
        measure(str(written), text, PerplexityOptions(baseline=str(other))).kl
        for other in (source, directory / "plain")
    ]
    return Distances(found[0], found[1])
