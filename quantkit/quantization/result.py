"""Result of quantize(): sizes, times, errors and the verdict."""

import math
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibrate.output import Findings
from quantkit.common.plots import layer_plot
from quantkit.common.result import JsonObject, Result
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.quantization.bit_allocation import describe_grids
from quantkit.quantization.checks import Coverage
from quantkit.quantization.report import describe_drafts, judge


@dataclass(frozen=True, repr=False)
class QuantizationReport(Result):
    """Result of a run. Bytes are of tensors; seconds and peak_memory, the largest resident set,
    are those of a resumed run as a whole; planned_memory is the expected one."""

    out: Path
    scheme: str
    format: str
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_memory: int
    planned_memory: int
    calibration_tokens: int
    findings: Findings
    coverage: Coverage
    pruned: str = ""
    """How many routed experts a layer keeps, in words, if some were pruned."""
    allocation: JsonObject | None = None
    """`GridAssignment.account`, if grids were chosen."""
    done_already: bool = False
    """`out` was already complete, from the same source and settings."""

    def to_json(self) -> JsonObject:
        """Without the findings of single linears, which are in report.json."""
        fields = {
            key: value for key, value in vars(self).items() if key not in ("findings", "coverage")
        }
        if self.allocation is None:
            del fields["allocation"]
        fields |= {"quantized_share": self.coverage.share, "left": self.coverage.left}
        return fields | {
            "mean_error": self.findings.mean_error,
            "next_token": self.findings.next_token,
            "out": str(self.out),
        }

    @property
    def _verdict(self) -> str:
        found = self.findings.next_token
        if not found:
            return (
                "not measured: no text was held out; quantkit ppl measures the distance to the "
                "source"
            )
        return judge(
            found["kl"], found["top1_agree"], int(found["tokens"]), found.get("plain_kl")
        ).sentence

    @property
    def heading(self) -> str:
        return f"{self.out} as {self.scheme}"

    def facts(self) -> list[tuple[str, str]]:
        drafts = describe_drafts(self.findings.next_token)
        return [
            ("verdict", self._verdict),
            ("written to", f"{self.out} ({self.format})"),
            ("size", f"{format_bytes(self.output_bytes)}, from {format_bytes(self.source_bytes)}"),
            *(
                [("routed experts", f"{self.pruned}; what that loses is in the KL")]
                if self.pruned
                else []
            ),
            ("quantized", str(self.coverage)),
            *([] if self.allocation is None else [("grids", describe_grids(self.allocation))]),
            ("time", format_duration(self.seconds)),
            (
                "peak memory",
                f"{format_bytes(self.peak_memory)}, planned {format_bytes(self.planned_memory)}",
            ),
            ("calibration", f"{self.calibration_tokens:,} tokens"),
            ("mean output error", f"{self.findings.mean_error:.2e}"),
            *([("accepted drafts", drafts)] if drafts else []),
            ("report", str(self.out / "report.html")),
        ]

    def rows(self) -> list[JsonObject]:
        """A row for each linear: its error, as in `LinearResult`, and its method."""
        errors, methods = self.findings.errors, self.findings.methods
        return [
            {"module": module, "error": error, "method": methods.get(module)}
            for module, error in errors.items()
        ]

    def pictures(self) -> list[str]:
        """The error of the hidden states after each layer, with held-out text."""
        layers = {
            int(layer): error
            for layer, error in self.findings.hidden_error.items()
            if not math.isnan(error)
        }
        return [layer_plot(layers, "squared error over squared norm", log=True)] if layers else []
