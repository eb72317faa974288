"""Options of `plan`."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.common.options import option
from quantkit.executor.options import cache_option, dp_option
from quantkit.quantization.options import SchemeOptions


@dataclass(frozen=True)
class PlanOptions(SchemeOptions):
    """What quantize() would write, where it runs and what it serves there."""

    devices: str | None = option(
        None,
        "8x64GiB by default; 8xH100 by name, or 8x910B1 for predicted decode times as well.",
    )
    context: int = option(4096, "Tokens of the longest request to serve.", min=1)
    redundant: int = option(0, "Redundant copies of routed experts per layer, as for place.", min=0)
    cache: str | None = cache_option()
    dp: int = dp_option()
    draft: str | Path | None = option(
        None, "A draft model, which every device holds whole, with its cache.", metavar="MODEL"
    )
    layout: str | None = option(
        None,
        "A layout of --engine, such as four-boxes, as for deploy; --devices are then those of one "
        "machine.",
    )
