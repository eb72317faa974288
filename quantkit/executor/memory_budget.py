"""What memory is left for the cache of a loaded model.

On an NPU the operators themselves take memory that no header tells: CANN's grouped product of
16-bit activations by 4-bit weights keeps a 16-bit copy of all experts of a layer, attention and
collectives have buffers of their own. So a prompt is computed once, as long as a step computes,
before the cache is sized: what that took stays with the allocator, and what is free afterwards is
free.
"""

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from quantkit.common.devices import free_bytes
from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes
from quantkit.executor.cache.cache import CachePlan, plan_cache
from quantkit.executor.options import EngineOptions
from quantkit.executor.runner.attention_context import Chunk, PrefillContext
from quantkit.executor.speculation.eagle_head import LoadedEagleHead
from quantkit.executor.weights.load import LoadedModel
from quantkit.models.architecture import KeyValueCache, LatentCache

PREFILL_TOKENS = {"cuda": 4096, "npu": 2048, "cpu": 1024}
"""Prompt tokens of a step: weights are read and decoded once for all of them, and whoever comes
meanwhile waits for them."""
LONG_PREFILL_TOKENS = 8192
"""On a CUDA device that has memory for it: of models with keys and values, whose answers then wait
for fewer prompts of others between two tokens, and of a mixture whose every step expands all
latents of a prompt anew. 16,384 tokens of one of four ranks of R1 take an H200 1.174 s in steps of
4096, 1.148 of 8192."""
_GRAPHS_BYTES = 3 << 29
"""What captured steps take beside a step that is launched."""
_ROWS, _MLP_ROWS, _PAIR_ROWS, _EXPANDED_BYTES = 8, 16, 2.6, 1 << 30
"""Rows of the hidden size that a step holds of a token, and more while an MLP without experts
computes (gate, up and what is between them: Qwen3-8B has 9), and while experts compute of a token
and expert, places without a pair included; latents that are expanded at a time. Of R1 3.7 GB: one
of four ranks took 2.4 in prompts of 8192 to 61,440 tokens."""
_MOST_FOR_STEPS = 0.25
"""The largest share of free memory that a cache leaves to long steps."""


def default_step_tokens(device: torch.device) -> int:
    """Of a step on such a device, where nobody chose."""
    return PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"])


def prefill_tokens(
    loaded: LoadedModel, plan: CachePlan, draft: LoadedModel | LoadedEagleHead | None = None
) -> int:
    """Of a step, where nobody chose: on every rank what the one with the least memory has room for
    beside the planned cache, and that of what guesses."""
    usual, needed = default_step_tokens(loaded.device), long_step_bytes(loaded)
    if needed is None:
        return usual
    token_bytes = loaded.cache_token_bytes + (0 if draft is None else draft.cache_token_bytes)
    left = free_bytes(loaded.device) - plan.num_blocks * plan.block_size * token_bytes
    return LONG_PREFILL_TOKENS if loaded.weights.ranks.minimum(left) >= needed else usual


def long_step_bytes(loaded: LoadedModel) -> int | None:
    """What a step of LONG_PREFILL_TOKENS takes; None for models and devices that have no such
    steps."""
    config, held = loaded.config, loaded.config.cache
    if (
        loaded.device.type != "cuda"
        or loaded.weights.expert_ranks.size > 1
        or config.recurrent is not None
    ):
        return None
    row, at_once = config.hidden_size * loaded.dtype.itemsize, 0
    if isinstance(held, LatentCache):
        if held.index_dim or config.routing is None:
            return None
        at_once = _EXPANDED_BYTES
    elif not isinstance(held, KeyValueCache):
        return None
    asked = (
        _MLP_ROWS
        if config.routing is None
        else _PAIR_ROWS * (config.routing.num_experts_per_tok + 1)
    )  # the shared one, too
    return (
        LONG_PREFILL_TOKENS * _ROWS * row
        + max(int(LONG_PREFILL_TOKENS * asked * row), at_once)
        + _GRAPHS_BYTES
    )


def plan_kv_cache(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | LoadedEagleHead | None = None
) -> CachePlan:
    """The same on every rank: what fits on the one with the least memory. draft: what guesses,
    whose cache has as many blocks. Where nobody chose, the cache leaves room for long steps, unless
    what was asked for would not fit then."""
    device = loaded.device
    tokens = options.prefill_tokens or default_step_tokens(device)
    if isinstance(draft, LoadedModel):
        free_cache_bytes(draft, tokens)
    free = free_cache_bytes(loaded, tokens)
    states = loaded.sequence_bytes(options.own_batch, options.lookahead)
    if states and free <= states:
        told = (
            f"the states of {options.own_batch} sequences take {format_bytes(states)}, and "
            f"{format_bytes(free)} are free"
        )
        raise QuantkitError(told, "lower --max-batch, or free memory")
    free = loaded.weights.ranks.minimum(
        (free - states) // (options.ranks if device.type == "cpu" else 1)
    )
    plan = partial(
        plan_cache,
        bytes_per_token=loaded.cache_token_bytes
        + (0 if draft is None else draft.cache_token_bytes),
        free_bytes=free,
        device_type=device.type,
        max_batch=options.own_batch,
        context_len=loaded.config.max_position_embeddings,
        max_model_len=options.max_model_len,
        cache_tokens=None
        if options.cache_tokens is None
        else -(-options.cache_tokens // options.dp),
        block_size=loaded.cache_layout.block_size,
    )
    for_steps = long_step_bytes(loaded) or 0
    if (
        options.prefill_tokens is None
        and options.cache_tokens is None
        and 0 < for_steps <= _MOST_FOR_STEPS * free
    ):
        with suppress(QuantkitError):
            return plan(left_bytes=for_steps)
    return plan()


def free_cache_bytes(loaded: LoadedModel, tokens: int) -> int:
    """Bytes that the cache may have of this rank's device. All ranks ask at the same time."""
    if loaded.device.type == "npu":
        warm_up(loaded, min(tokens, loaded.config.max_position_embeddings))
    return free_bytes(loaded.device)


@torch.inference_mode()
def check_finite_logits(loaded: LoadedModel) -> None:
    """Raises QuantkitError where a model computes no numbers behind its first token: answers would
    be empty, and nobody told."""
    if not bool(torch.isfinite(_logits_behind(loaded, 1)).all()):
        path = loaded.checkpoint.path
        told = (
            f"{path} computes logits that are no numbers in "
            f"{str(loaded.dtype).removeprefix('torch.')}"
        )
        raise QuantkitError(told, f"quantkit check {path} names the tensor that is damaged")


def _logits_behind(loaded: LoadedModel, tokens: int) -> Tensor:
    """[1, vocab] of a prompt of so many tokens, over a cache that is let go of."""
    blocks = -(-tokens // loaded.cache_layout.block_size)
    cache = loaded.new_cache(blocks + 1)
    table = torch.arange(1, blocks + 1, device=loaded.device)
    hidden = loaded.model(
        torch.zeros(tokens, dtype=torch.int64, device=loaded.device),
        PrefillContext(cache, [Chunk(0, tokens, table)]),
    )
    return loaded.model.logits(hidden[-1:])


@torch.inference_mode()
def warm_up(loaded: LoadedModel, tokens: int) -> None:
    """Compute a prompt of so many tokens over a cache that is let go of. Raises QuantkitError where
    memory does not even hold that."""
    try:
        _logits_behind(loaded, tokens)
    except torch.OutOfMemoryError as fault:
        told = str(fault).partition("\n")[0]
        raise QuantkitError(
            f"the weights leave too little memory for a prompt of {tokens} tokens ({told})",
            "use more devices (--tp), or a smaller scheme",
        ) from fault
