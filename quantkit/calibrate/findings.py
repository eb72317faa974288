"""What a calibrated run found out: what its report is made from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from quantkit.calibrate.linear_solver import Rounded


@dataclass
class Findings:
    """Grows as units finish. After a restart it is filled from the facts stored with finished
    units."""

    errors: dict[str, float] = field(default_factory=dict)
    """module -> squared output error over squared output, on held-out inputs"""
    methods: dict[str, str] = field(default_factory=dict)
    """module -> what rounded it"""
    scales: dict[str, list[float]] = field(default_factory=dict)
    """group -> smallest, median and largest s"""
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    """layer -> calibration tokens of every expert"""
    expert_agreement: dict[str, float] = field(default_factory=dict)
    """layer -> share of (token, slot) choices that the quantized and the original path have in
    common"""
    hidden_error: dict[str, float] = field(default_factory=dict)
    """layer -> squared distance of the two paths over the squared norm of the original"""

    next_token: dict[str, float] = field(default_factory=dict)
    """of `next_token_kl.NextToken`, on held-out tokens, and plain_kl, the KL of plain rounding;
    empty where none were held out"""

    def facts(self, linears: Mapping[str, Rounded], scales: Mapping[str, Tensor]) -> dict[str, Any]:
        """What to store with one unit so that a resumed run reports the same; also taken up
        here."""
        facts = {
            "errors": {
                module: None if math.isnan(one.error) else one.error
                for module, one in linears.items()
            },
            "methods": {module: one.method for module, one in linears.items()},
            "scales": {
                name: [float(s.min()), float(s.median()), float(s.max())]
                for name, s in scales.items()
            },
        }
        self.take(facts)
        return facts

    def take(self, facts: dict[str, Any]) -> None:
        self.errors |= {
            module: math.nan if error is None else error
            for module, error in facts["errors"].items()
        }
        self.methods |= facts["methods"]
        self.scales |= facts["scales"]

    @property
    def mean_error(self) -> float:
        known = [error for error in self.errors.values() if not math.isnan(error)]
        return math.fsum(known) / len(known) if known else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
