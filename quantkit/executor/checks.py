"""What an engine refuses before it computes: amounts that are none, requests that can never run,
and ends of answers that are no tokens. Whether it can go on."""

from collections.abc import Iterable
from pathlib import Path

import torch

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.options import MAX_GUESSES, EngineOptions
from quantkit.executor.sampling.params import SamplingParams

_AMOUNTS = ("max_batch", "max_model_len", "cache_tokens", "prefill_tokens", "tp", "dp")


def check_amounts(options: EngineOptions) -> None:
    """Raises UsageError where an option is no amount: a batch or a chunk of nothing never ends."""
    for name in _AMOUNTS:
        value = getattr(options, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise UsageError(f"{name} is {value!r}", "give a whole number of at least 1")
    check_guesses(options.num_drafts, options.num_looked_up)


def check_request(prompt: list[int], params: SamplingParams, context: int, vocab: int) -> None:
    """Raises QuantkitError where a prompt has no place in a context of so many tokens, or something
    is no token of the vocabulary."""
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
    """eos_ids: as the model at `path` names them."""
    for token in eos_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            said = (
                f"{path}: eos_token_id {token!r:.100} is no token of the model, which has {vocab}"
            )
            raise QuantkitError(
                said, "correct generation_config.json, config.json or tokenizer_config.json"
            )


def check_context(asked: int | None, longest: int) -> None:
    """asked: tokens of prompt and answer, None where nobody asked; longest: that the model was
    built for. Raises UsageError."""
    if asked is not None and asked > longest:
        raise UsageError(
            f"context of {asked} tokens asked for, the model has {longest}",
            "that is prompt and answer together",
        )
    if asked is not None and asked < 2:
        raise UsageError(
            f"a context of {asked} has no room for a prompt and an answer",
            "ask for 2 tokens at least",
        )


def check_guesses(drafts: int, looked_up: int) -> None:
    """Of a step, by each source."""
    for count in (drafts, looked_up):
        if not 0 <= count <= MAX_GUESSES:
            raise QuantkitError(f"{count} guesses a step are asked for", f"use 0 to {MAX_GUESSES}")


def check_usable(device: torch.device, fault: Exception, *, alone: bool) -> None:
    """Raise `fault` where it is more than one pass's: other ranks wait in that pass, or the device
    computes nothing any more."""
    if not alone:
        raise fault
    try:
        torch.ones(1, device=device).sum().item()
    except Exception:
        raise fault from None
