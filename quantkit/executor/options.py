"""Options of everything that loads a model to run it: one frozen value, which also travels to the
processes of the other ranks as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.options import device_option, option

MODEL_DRAFT_LENGTH = 4
"""Draft tokens per step of a draft model where no draft length is given."""
MAX_DRAFT_LENGTH = 128
"""Per step and sequence, for each source: memory is reserved for one row of each draft token."""


def lookahead_of(draft_length: int, prompt_lookup: int) -> int:
    """Tokens that a step may write to the cache after the accepted ones: the drafts it verifies and
    those it then makes."""
    return max(draft_length, prompt_lookup) + draft_length


def cache_option() -> Any:
    return option(
        None,
        "int8 or fp8: keep keys and values, or latents, in 8 bits; in the model's 16 bits by "
        "default.",
    )


def dp_option() -> Any:
    return option(
        1,
        "Data-parallel ranks, one per device, each with its own requests; they share the routed "
        "experts; not with --tp.",
        min=1,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where and how a model that is loaded in this process computes."""

    cache: str | None = cache_option()
    device: str = device_option()
    backend: str = option("auto", "Kernel backend; see `quantkit kernels`.")


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """Options of `Engine.load`. model_path: the checkpoint directory, which `load` fills in."""

    model_path: Path = Path()
    max_batch: int = option(64, "Requests computed together.", min=1)
    max_model_len: int | None = option(
        None,
        "Longest prompt plus answer, tokens; what model and cache allow by default.",
        min=2,
    )
    cache_tokens: int | None = option(
        None,
        "Tokens in the cache, all requests together; as many as fit in memory by default.",
        min=1,
    )
    chunk_tokens: int | None = option(
        None,
        "Prompt tokens computed in one step; measured by default.",
        min=1,
        old=("prefill_tokens",),
    )
    draft_length: int = option(
        0,
        "Draft tokens per step, at most, of the MTP layer or of --draft's model; answers stay the "
        "same.",
        min=0,
        max=MAX_DRAFT_LENGTH,
        old=("num_drafts", "--drafts"),
    )
    draft: str | Path | None = option(
        None,
        "A small model with the same vocabulary, or an EAGLE-3 head, that drafts instead of an MTP "
        f"layer: {MODEL_DRAFT_LENGTH} tokens, or --draft-length.",
        metavar="MODEL",
    )
    prompt_lookup: int = option(
        0,
        "Draft tokens per step taken from earlier in the prompt and answer; answers stay the same.",
        min=0,
        max=MAX_DRAFT_LENGTH,
        old=("num_looked_up",),
    )
    prefix_cache: bool = option(
        False, "Requests that share a prefix share its cache.", "--prefix-cache"
    )
    tp: int = option(1, "Tensor-parallel ranks, one per device; all are started here.", min=1)
    dp: int = dp_option()
    collectives: str | None = option(
        None,
        "int8 or fp8: sum prompts over ranks in 8 bits a value; in the model's 16 bits by default.",
    )
    dtype: str | None = option(
        None, "bfloat16, float16 or float32; the device's own by default.", cli=False
    )
    measure_steps: bool = option(
        False,
        "Measure at load how many prompt tokens a step should compute next to decoding sequences, "
        "and shorten drafts where that is faster: for servers.",
        cli=False,
    )
    count_experts: bool = option(
        False,
        "Count the tokens routed to each expert; decode steps are then not captured.",
        cli=False,
    )

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.tp * self.dp

    @property
    def own_batch(self) -> int:
        """Requests that one rank computes together: all of them, or its share if data-parallel."""
        return -(-self.max_batch // self.dp)

    @property
    def max_draft_length(self) -> int:
        """Draft tokens per step of the MTP layer or draft model, at most."""
        return self.draft_length or (0 if self.draft is None else MODEL_DRAFT_LENGTH)

    @property
    def lookahead(self) -> int:
        """See `lookahead_of`."""
        return lookahead_of(self.max_draft_length, self.prompt_lookup)

    @property
    def answer_rows(self) -> int:
        """Rows of a decode step, draft tokens included, at most."""
        return self.max_batch * (1 + max(self.max_draft_length, self.prompt_lookup))

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)  # paths

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        values = json.loads(text)
        draft = None if values["draft"] is None else Path(values["draft"])
        return cls(**{**values, "model_path": Path(values["model_path"]), "draft": draft})


_AMOUNTS = ("max_batch", "max_model_len", "cache_tokens", "chunk_tokens", "tp", "dp")


def check_amounts(options: EngineOptions) -> None:
    """Raises UsageError for a number out of range: with a batch or chunk of 0, steps never end."""
    for name in _AMOUNTS:
        value = getattr(options, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise UsageError(f"{name} is {value!r}", "give a whole number of at least 1")
    for count in (options.draft_length, options.prompt_lookup):
        if not 0 <= count <= MAX_DRAFT_LENGTH:
            raise QuantkitError(
                f"{count} draft tokens per step are too many or too few",
                f"use 0 to {MAX_DRAFT_LENGTH}",
            )


def check_context(requested: int | None, longest: int) -> None:
    """requested: tokens of prompt and answer, if given; longest: what the model was built for.
    Raises UsageError."""
    if requested is not None and requested > longest:
        raise UsageError(
            f"a context of {requested} tokens was requested, the model has {longest}",
            "ask for fewer, prompt and answer together: --max-model-len, --context of playground, "
            "--input-len and --output-len of bench",
        )
    if requested is not None and requested < 2:
        raise UsageError(
            f"a context of {requested} has no room for a prompt and an answer",
            "request at least 2 tokens",
        )
