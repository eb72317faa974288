"""What an engine refuses before it computes: options out of range, requests that can never run and
invalid end-of-sequence tokens. Also whether it can go on after a fault."""

from collections.abc import Iterable
from pathlib import Path

import torch

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.options import MAX_DRAFT_LENGTH, EngineOptions
from quantkit.executor.sampling.params import SamplingParams

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


def check_request(prompt: list[int], params: SamplingParams, context: int, vocab: int) -> None:
    """Raises QuantkitError for a prompt that does not fit in `context` tokens, or a token id
    outside the vocabulary."""
    if not prompt:
        raise QuantkitError("the prompt is empty", "give at least one token")
    if len(prompt) >= context:
        raise QuantkitError(
            f"the prompt has {len(prompt)} tokens, the context is {context}", "shorten it"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise QuantkitError(
            f"the prompt has token ids outside 0..{vocab - 1}", "use the model's own tokenizer"
        )
    if any(not 0 <= token < vocab for token in params.named_tokens):
        raise QuantkitError(
            f"logit_bias or stop_token_ids names a token outside 0..{vocab - 1}",
            "use the model's own tokenizer",
        )


def check_eos(eos_ids: Iterable[object], vocab: int, path: Path) -> None:
    """eos_ids: from the configuration files of the model at `path`."""
    for token in eos_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise QuantkitError(
                f"{path}: eos_token_id {token!r:.100} is not a token of the model, which has "
                f"{vocab}",
                "correct generation_config.json, config.json or tokenizer_config.json",
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


def check_usable(device: torch.device, fault: Exception, *, alone: bool) -> None:
    """Raise `fault` where it concerns more than one forward pass: other ranks wait in that pass, or
    the device no longer computes."""
    if not alone:
        raise fault
    try:
        torch.ones(1, device=device).sum().item()
    except Exception:
        raise fault from None
