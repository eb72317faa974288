"""What an engine is loaded with, as one value that travels to the other ranks' processes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineOptions:
    """The arguments of `Engine.load`, which says what each is."""

    model_path: Path
    device: str = "auto"
    backend: str = "auto"
    dtype: str | None = None
    max_batch: int = 64
    max_model_len: int | None = None
    cache_tokens: int | None = None
    prefill_tokens: int | None = None
    measure_steps: bool = False
    num_drafts: int = 0
    num_looked_up: int = 0
    prefix_cache: bool = False
    cache: str | None = None
    tp: int = 1
    collectives: str | None = None
    count_experts: bool = False

    @property
    def answer_rows(self) -> int:
        """Rows that a step of answers has at most, guesses included."""
        return self.max_batch * (1 + max(self.num_drafts, self.num_looked_up))

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "model_path": str(self.model_path)})

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        values = json.loads(text)
        return cls(**{**values, "model_path": Path(values["model_path"])})
