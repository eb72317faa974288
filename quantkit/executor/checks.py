"""What an engine refuses before it computes: options that no model or not this one has, requests that can never run, and ends of answers
that are no tokens. Whether it can go on."""

from collections.abc import Iterable
from pathlib import Path

import torch

from quantkit.errors import QuantkitError
from quantkit.executor.cache import check_context
from quantkit.executor.expert_parallel import check_experts
from quantkit.executor.load import check_heads
from quantkit.executor.options import MAX_GUESSES, EngineOptions
from quantkit.executor.sampling import SamplingParams
from quantkit.models.stored import Model as StoredModel

_LEAST = {"max_batch": 1, "max_model_len": 2, "cache_tokens": 1, "prefill_tokens": 1, "tp": 1, "dp": 1}
"""Of options that are amounts. A context of two tokens is a prompt's and an answer's."""


def check_amounts(options: EngineOptions) -> None:
    """Raises QuantkitError where an option is no amount that an engine can have of it."""
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise QuantkitError(f"{name} is {value!r}", f"give a whole number of at least {least}")
    check_guesses(options.num_drafts, options.num_looked_up)


def check_fits(read: StoredModel, options: EngineOptions) -> None:
    """Raises QuantkitError where the model's sizes alone refuse what was asked for: before ranks are started and weights are read."""
    check_heads(read.config, options.tp)
    check_experts(read.rows, options.dp)
    check_context(options.max_model_len, read.config.max_position_embeddings)


def check_request(prompt: list[int], params: SamplingParams, context: int, vocab: int) -> None:
    """Raises QuantkitError where a prompt has no place in a context of so many tokens, or something is no token of the vocabulary."""
    if not prompt:
        raise QuantkitError("the prompt is empty", "give at least one token")
    if len(prompt) >= context:
        raise QuantkitError(f"the prompt has {len(prompt)} tokens, the context is {context}", "shorten it")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise QuantkitError(f"the prompt has token ids outside 0..{vocab - 1}", "use the model's own tokenizer")
    if any(not 0 <= token < vocab for token in params.named_tokens):
        raise QuantkitError(f"logit_bias or stop_token_ids names a token outside 0..{vocab - 1}", "use the model's own tokenizer")


def check_eos(eos_ids: Iterable[object], vocab: int, path: Path) -> None:
    """eos_ids: as the model at `path` names them."""
    for token in eos_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            said = f"{path}: eos_token_id {token!r:.100} is no token of the model, which has {vocab}"
            raise QuantkitError(said, "correct generation_config.json, config.json or tokenizer_config.json")


def check_guesses(drafts: int, looked_up: int) -> None:
    """Of a step, by each source."""
    for count in (drafts, looked_up):
        if not 0 <= count <= MAX_GUESSES:
            raise QuantkitError(f"{count} guesses a step are asked for", f"use 0 to {MAX_GUESSES}")


def check_usable(device: torch.device, fault: Exception, *, alone: bool) -> None:
    """Raise `fault` where it is more than one pass's: other ranks wait in that pass, or the device computes nothing any more."""
    if not alone:
        raise fault
    try:
        torch.ones(1, device=device).sum().item()
    except Exception:
        raise fault from None
