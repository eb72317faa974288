"""Options of `quantkit go`."""

from dataclasses import dataclass, fields
from pathlib import Path

from quantkit.common.options import option
from quantkit.planning.options import PlanOptions
from quantkit.quantization.options import QuantizeOptions, SchemeOptions, scheme_names

QUANTKIT = "quantkit"
"""The engine that serves on a CPU: this package."""


@dataclass(frozen=True)
class GoOptions(QuantizeOptions):
    """score: whether `tasks` are scored, `limit` problems of each."""

    devices: str | None = option(
        None, "What will serve it: 8x64GiB, 8xH100, 8x910B1 or cpu; this machine's by default."
    )
    out: Path | None = option(None, "Folder for all output; MODEL-go by default.")
    scheme: str | None = option(
        None, "Use this scheme instead of choosing one.", complete=scheme_names
    )
    context: int = option(4096, "Tokens of the longest request to serve.", min=1)
    score: bool = option(False, "Also score tasks, next to the source.", "--score")
    tasks: str | None = option(
        None, "For --score, comma-separated: as for eval; tiny-math by default."
    )
    limit: int = option(50, "For --score: the first problems of each task.", min=1)

    @property
    def scored_tasks(self) -> tuple[str, ...]:
        named = (self.tasks or "tiny-math").split(",")
        return tuple(name.strip() for name in named) if self.score else ()

    @property
    def planned(self) -> PlanOptions:
        """The same output as `plan` plans it."""
        output = {one.name: getattr(self, one.name) for one in fields(SchemeOptions)}
        return PlanOptions(**output, context=self.context)
