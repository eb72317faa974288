"""What memory is left for the cache of a loaded model.

On an NPU the operators themselves take memory that no header tells: CANN's grouped product of 16-bit activations by 4-bit weights keeps a
16-bit copy of all experts of a layer, attention and collectives have buffers of their own. So a prompt is computed once, as long as a step
computes, before the cache is sized: what that took stays with the allocator, and what is free afterwards is free.
"""

import torch

from quantkit.amounts import size
from quantkit.devices import free_bytes
from quantkit.errors import QuantkitError
from quantkit.executor.cache import CachePlan, plan_cache
from quantkit.executor.context import Chunk, PrefillContext
from quantkit.executor.eagle_head import LoadedHead
from quantkit.executor.load import LoadedModel
from quantkit.executor.options import EngineOptions

PREFILL_TOKENS = {"cuda": 4096, "npu": 2048, "cpu": 512}
"""Prompt tokens of a step: weights are read and decoded once for all of them, and whoever comes meanwhile waits for them. 16,384 tokens of
one of four ranks of R1 take an H200 1.54 s in steps of 2048, 1.38 of 4096, 1.35 of 8192."""


def prefill_tokens(device: torch.device) -> int:
    """Of a step, where nobody chose."""
    return PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"])


def plan_beside(loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | LoadedHead | None = None) -> CachePlan:
    """The same on every rank: what fits on the one with the least memory. draft: what guesses, whose cache has as many blocks."""
    device = loaded.device
    if isinstance(draft, LoadedModel):
        free_beside(draft, options.prefill_tokens or prefill_tokens(device))
    free = free_beside(loaded, options.prefill_tokens or prefill_tokens(device))
    states = loaded.sequence_bytes(options.own_batch, options.lookahead)
    if states and free <= states:
        told = f"the states of {options.own_batch} sequences take {size(states)}, and {size(free)} are free"
        raise QuantkitError(told, "lower --max-batch, or free memory")
    free -= states
    return plan_cache(
        bytes_per_token=loaded.cache_token_bytes + (0 if draft is None else draft.cache_token_bytes),
        free_bytes=loaded.weights.ranks.minimum(free // (options.ranks if device.type == "cpu" else 1)),
        device_type=device.type,
        max_batch=options.own_batch,
        context_len=loaded.config.max_position_embeddings,
        max_model_len=options.max_model_len,
        cache_tokens=None if options.cache_tokens is None else -(-options.cache_tokens // options.dp),
        block_size=loaded.cache_layout.block_size,
    )


def free_beside(loaded: LoadedModel, tokens: int) -> int:
    """Bytes that the cache may have of this rank's device. All ranks ask at the same time."""
    if loaded.device.type == "npu":
        warm_up(loaded, min(tokens, loaded.config.max_position_embeddings))
    return free_bytes(loaded.device)


@torch.inference_mode()
def warm_up(loaded: LoadedModel, tokens: int) -> None:
    """Compute a prompt of so many tokens over a cache that is let go of. Raises QuantkitError where memory does not even hold that."""
    blocks = -(-tokens // loaded.cache_layout.block_size)
    try:
        cache = loaded.new_cache(blocks + 1)
        table = torch.arange(1, blocks + 1, device=loaded.device)
        hidden = loaded.model(
            torch.zeros(tokens, dtype=torch.int64, device=loaded.device), PrefillContext(cache, [Chunk(0, tokens, table)])
        )
        loaded.model.logits(hidden[-1:])
    except torch.OutOfMemoryError as fault:
        told = str(fault).partition("\n")[0]
        raise QuantkitError(
            f"the weights leave too little memory for a prompt of {tokens} tokens ({told})", "use more devices (--tp), or a smaller scheme"
        ) from fault
