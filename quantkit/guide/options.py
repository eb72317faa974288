"""Options of `quantkit go`."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.common.options import option
from quantkit.quantization.options import (
    names_of_engines,
    samples_option,
    scheme_names,
    seq_len_option,
)


@dataclass(frozen=True)
class GoOptions:
    """score: whether `tasks` are scored, `limit` problems of each."""

    devices: str | None = option(
        None, "What will serve it: 8x64GiB, 8xH100, 8x910B1 or cpu; this machine's by default."
    )
    out: Path | None = option(None, "Folder for all output; MODEL-go by default.")
    scheme: str | None = option(
        None, "Use this scheme instead of choosing one.", complete=scheme_names
    )
    engine: str | None = option(
        None, "Use this engine: vllm, sglang, vllm-ascend, omni-infer.", complete=names_of_engines
    )
    calibration: str | None = option(None, "As for quantize.")
    samples: int | None = samples_option()
    seq_len: int | None = seq_len_option()
    context: int = option(4096, "Tokens of the longest request to serve.", min=1)
    score: bool = option(False, "Also score tasks, next to the source.", "--score")
    tasks: str = option("tiny-math", "For --score, comma-separated: as for eval.")
    limit: int = option(50, "For --score: the first problems of each task.", min=1)

    @property
    def scored_tasks(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.tasks.split(",")) if self.score else ()
