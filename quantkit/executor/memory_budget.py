"""Memory for the cache of a loaded model, and the prompt tokens of a step that fit.

On an NPU the operators themselves take memory that cannot be known in advance: CANN's grouped
product of 16-bit activations by 4-bit weights keeps a 16-bit copy of all experts of a layer, and
attention and collectives have their own buffers. So a prompt of a step's length is computed before
the cache is sized: what it took stays with the allocator, and what is free afterwards is free.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantkit.common.devices import free_bytes
from quantkit.common.errors import QuantkitError
from quantkit.common.sizes import format_bytes
from quantkit.executor.cache.cache import CachePlan, plan_cache
from quantkit.executor.options import EngineOptions
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext
from quantkit.executor.speculation.eagle_head import LoadedEagleHead
from quantkit.executor.weights.load import LoadedModel
from quantkit.models.architecture import KeyValueCache, LatentCache
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.ngram_table import read_by_ids, recent_ids

PREFILL_TOKENS = {"cuda": 4096, "npu": 2048, "cpu": 1024}
"""Prompt tokens of a step: weights are read and decoded once for all of them, and requests that
arrive meanwhile wait for them."""
LONG_PREFILL_TOKENS = 8192
"""On a CUDA device with memory for it: for models with keys and values, whose decoding sequences
then wait for fewer prompts between two tokens, and for mixture-of-experts models with latent KV,
where every step expands all latents of a prompt again. 16,384 tokens of one of four ranks of R1
take an H200 1.174 s in steps of 4096, 1.148 in steps of 8192."""
LONGEST_PREFILL_TOKENS = 32768
"""Of mixture-of-experts models with keys and values, where what a cache leaves holds them and
prefill_tuner.py finds them faster: weights are read, or decoded, for more tokens at once. 32
prompts of 8192 of eight layers of gpt-oss-20b take an H200 1.24 s in steps of so many, 1.40 in
steps of 8192."""
_GRAPHS_BYTES = 3 << 29
"""Memory of captured steps, in addition to that of a launched step."""
_ROWS, _MLP_ROWS, _EXPERT_ROWS, _DECODED_ROWS, _EXPANDED_BYTES = 8, 16, 2.6, 4.0, 1 << 30
"""Activations of a step, in rows of the hidden size: per token; per token more in a dense MLP
(gate, up and their product: Qwen3-8B has 9); per (token, expert) pair, padding included; the same
where weights are decoded first (gpt-oss: its input, gate, up and their product); and latent KV
expanded at a time. 3.7 GB for R1: one of four ranks took 2.4 in prompts of 8192 to 61,440
tokens."""
_SELECTION_BYTES = 3 << 28
"""Of sparse attention: an indexer's scores, held 256 MiB at a time, and twice 2,048 selected tokens
for each of a step."""
_MAX_STEP_SHARE = 0.25
"""The largest share of free memory that a cache leaves to long steps."""
_CHECKPOINT_SHARE, _CHECKPOINTS_PER_REQUEST = 1 / 16, 4
"""Checkpoints of states take at most this share of free memory, unless one alone takes more, and
are at most so many for each request of a batch."""


def default_step_tokens(device: torch.device) -> int:
    """Default prompt tokens of a step on a device."""
    return PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"])


def default_chunk_tokens(
    loaded: LoadedModel,
    plan: CachePlan,
    draft: LoadedModel | LoadedEagleHead | None = None,
    longest: int = LONG_PREFILL_TOKENS,
) -> int:
    """Default prompt tokens of a step: `longest` if they fit on the rank with the least memory,
    next to the planned cache and the draft's."""
    usual, needed = default_step_tokens(loaded.device), long_step_bytes(loaded, longest)
    if needed is None:
        return usual
    token_bytes = loaded.cache_token_bytes + (0 if draft is None else draft.cache_token_bytes)
    left = free_bytes(loaded.device) - plan.num_blocks * plan.block_size * token_bytes
    return longest if loaded.weights.ranks.minimum(left) >= needed else usual


def long_step_bytes(loaded: LoadedModel, tokens: int = LONG_PREFILL_TOKENS) -> int | None:
    """Memory of a step of so many tokens, which are long ones; None for models and devices without
    such steps."""
    config, cache, net = loaded.config, loaded.config.cache, loaded.config.recurrent
    if tokens > LONG_PREFILL_TOKENS and (
        config.routing is None or not isinstance(cache, KeyValueCache)
    ):
        return None
    if (
        loaded.device.type != "cuda"
        or loaded.weights.expert_ranks.size > 1
        or not (net is None or isinstance(net, DeltaNet))
    ):
        return None
    row, at_once = config.hidden_size * loaded.dtype.itemsize, 0
    if isinstance(cache, LatentCache):
        if config.routing is None:
            return None
        at_once = _EXPANDED_BYTES + (_SELECTION_BYTES if cache.index_dim else 0)
    elif not isinstance(cache, KeyValueCache) or cache.index_dim:
        return None
    mlp_rows: float = _MLP_ROWS
    decoded = loaded.weights.decoded_bytes
    if config.routing is not None:  # the shared expert, too
        pairs = config.routing.num_experts_per_tok + 1
        mlp_rows = pairs * (_DECODED_ROWS if decoded else _EXPERT_ROWS)
    return (
        tokens * _ROWS * row
        + max(int(tokens * mlp_rows * row) + decoded, at_once)
        + (tokens * net.prompt_bytes(loaded.weights.parallel.size) if net else 0)
        + _GRAPHS_BYTES
    )


def plan_kv_cache(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | LoadedEagleHead | None = None
) -> CachePlan:
    """What fits on the rank with the least memory, the same on every rank. draft: its cache has as
    many blocks. By default the cache leaves room for long steps, if the requested context still
    fits."""
    device = loaded.device
    tokens = options.chunk_tokens or default_step_tokens(device)
    if isinstance(draft, LoadedModel):
        free_cache_bytes(draft, tokens)
    free = free_cache_bytes(loaded, tokens)
    states = loaded.sequence_bytes(options.own_batch, options.lookahead)
    if states and free <= states:
        raise QuantkitError(
            f"the states of {options.own_batch} sequences take {format_bytes(states)}, and "
            f"{format_bytes(free)} are free",
            "lower --max-batch, or free memory",
        )
    free = loaded.weights.ranks.minimum(
        (free - states) // (options.ranks if device.type == "cpu" else 1)
    )
    checkpoints = _num_checkpoints(loaded, options, free)
    free -= checkpoints * loaded.checkpoint_bytes(options.lookahead)
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
        options.chunk_tokens is None
        and options.cache_tokens is None
        and 0 < for_steps <= _MAX_STEP_SHARE * free
    ):
        with suppress(QuantkitError):
            return replace(plan(left_bytes=for_steps), checkpoints=checkpoints)
    free -= loaded.weights.decoded_bytes
    return replace(plan(free_bytes=free), checkpoints=checkpoints)


def _num_checkpoints(loaded: LoadedModel, options: EngineOptions, free: int) -> int:
    """Copies of states that a prefix cache keeps of `free` bytes on every rank."""
    one = loaded.checkpoint_bytes(options.lookahead)
    if not (options.prefix_cache and one):
        return 0
    if one >= free:
        raise QuantkitError(
            f"a prefix cache needs room for a checkpoint of the model's states, "
            f"{format_bytes(one)}, and {format_bytes(free)} are free",
            "lower --max-batch, or run it without --prefix-cache",
        )
    most = _CHECKPOINTS_PER_REQUEST * options.own_batch
    return max(1, min(most, int(free * _CHECKPOINT_SHARE) // one))


def free_cache_bytes(loaded: LoadedModel, tokens: int) -> int:
    """Free bytes of this rank's device. All ranks call it at the same time."""
    if loaded.device.type == "npu":
        warm_up(loaded, min(tokens, loaded.config.max_position_embeddings))
    return free_bytes(loaded.device)


@torch.inference_mode()
def check_finite_logits(loaded: LoadedModel) -> None:
    """Raises QuantkitError where the logits of a first token are not finite: outputs would be empty
    without an error."""
    if not bool(torch.isfinite(_logits_after(loaded, 1)).all()):
        path, dtype = loaded.checkpoint.path, str(loaded.dtype).removeprefix("torch.")
        raise QuantkitError(
            f"{path} computes logits that are not numbers in {dtype}",
            f"quantkit check {path} names the tensor that is damaged",
        )


def _logits_after(loaded: LoadedModel, tokens: int) -> Tensor:
    """[1, vocab] after a prompt of so many tokens, over a temporary cache."""
    blocks = -(-tokens // loaded.cache_layout.block_size)
    cache = loaded.new_cache(blocks + 1)
    table = torch.arange(1, blocks + 1, device=loaded.device)
    token_ids = torch.zeros(tokens, dtype=torch.int64)
    read = read_by_ids(partial(recent_ids, token_ids, 0), loaded.device)
    hidden = loaded.model(
        token_ids.to(loaded.device), PrefillContext(cache, [Chunk(0, tokens, table)], read)
    )
    return loaded.model.logits(hidden[-1:])


@torch.inference_mode()
def warm_up(loaded: LoadedModel, tokens: int) -> None:
    """Compute a prompt of so many tokens over a temporary cache. Raises QuantkitError if that does
    not fit in memory."""
    try:
        _logits_after(loaded, tokens)
    except torch.OutOfMemoryError as fault:
        reason = str(fault).partition("\n")[0]
        raise QuantkitError(
            f"the weights leave too little memory for a prompt of {tokens} tokens ({reason})",
            "use more devices (--tp), or a smaller scheme",
        ) from fault
