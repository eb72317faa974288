"""What came of a conversion."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.common.result import Result
from quantkit.common.sizes import format_bytes, format_duration


@dataclass(frozen=True)
class Change:
    """What became of one part of the model: how many weights, and the largest relative difference
    of any stored value."""

    weights: int
    max_relative_error: float


@dataclass(frozen=True, repr=False)
class ConversionReport(Result):
    """What came of a conversion. Bytes are of tensors; peak_memory is this process's largest
    resident set, in bytes.

    changes: by what happened and where, such as "awq to compressed-tensors: experts" or "copied".
    activation_bits: of what quantized linears read, in the source and in the output.
    """

    out: Path
    source_format: str
    format: str
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_memory: int
    changes: dict[str, Change]
    activation_bits: tuple[int, int]
    done_already: bool = False
    """Nothing was done: `out` was there, complete, from the same source and settings."""

    @property
    def exact(self) -> bool:
        return all(change.max_relative_error == 0 for change in self.changes.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "exact": self.exact}

    @property
    def heading(self) -> str:
        return "converted"

    def facts(self) -> list[tuple[str, str]]:
        told = "{:,} weights, largest relative difference {:.1e}"
        return [
            ("written to", f"{self.out} ({self.format}, from {self.source_format})"),
            ("size", f"{format_bytes(self.output_bytes)}, from {format_bytes(self.source_bytes)}"),
            ("time", format_duration(self.seconds)),
            ("peak memory", format_bytes(self.peak_memory)),
            ("exact", "yes, every value" if self.exact else "no"),
            *(
                [("activations", "{1} bits, {0} in the source".format(*self.activation_bits))]
                if len(set(self.activation_bits)) == 2
                else []
            ),
            *(
                (f"  {what}", told.format(one.weights, one.max_relative_error))
                for what, one in self.changes.items()
            ),
        ]


def joined(one: Change | None, other: Change) -> Change:
    if one is None:
        return other
    return Change(
        one.weights + other.weights, max(one.max_relative_error, other.max_relative_error)
    )
