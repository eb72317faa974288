"""What an engine is loaded with, as one value that travels to the other ranks' processes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

DRAFTS_OF_A_MODEL = 4
"""Tokens that a draft model guesses a step, at most, where nobody said how many."""

MAX_GUESSES = 128
"""Of a step behind each answer, by each source: memory is kept for a row of each, and how many pay
is chosen among all."""


def lookahead_of(num_drafts: int, num_looked_up: int) -> int:
    """Tokens that a step may write behind those that stay: the guesses it checks and then those it
    makes."""
    return max(num_drafts, num_looked_up) + num_drafts


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
    draft: Path | None = None
    num_looked_up: int = 0
    prefix_cache: bool = False
    cache: str | None = None
    tp: int = 1
    dp: int = 1
    collectives: str | None = None
    count_experts: bool = False

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.tp * self.dp

    @property
    def own_batch(self) -> int:
        """Requests that a rank computes together: those it shares with others, or those that are
        its own."""
        return -(-self.max_batch // self.dp)

    @property
    def most_drafts(self) -> int:
        """Tokens that are guessed a step, at most, by whatever model."""
        return self.num_drafts or (0 if self.draft is None else DRAFTS_OF_A_MODEL)

    @property
    def lookahead(self) -> int:
        """As `lookahead_of` has it."""
        return lookahead_of(self.most_drafts, self.num_looked_up)

    @property
    def answer_rows(self) -> int:
        """Rows that a step of answers has at most, guesses included."""
        return self.max_batch * (1 + max(self.most_drafts, self.num_looked_up))

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)  # paths

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        values = json.loads(text)
        draft = None if values["draft"] is None else Path(values["draft"])
        return cls(**{**values, "model_path": Path(values["model_path"]), "draft": draft})
