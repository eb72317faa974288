"""The paged cache: what each layer keeps of every token, in blocks that sequences take and give back.

For latent attention a token is its normed latent and its rotated shared key (`cache_width` values), in one tensor or in two as the kernel
backend reads them; for grouped-query attention its keys and, in a tensor of their own, its values. Blocks are numbered once for all layers:
block b of a sequence is block b in every layer. Block 0 belongs to nobody: padding rows of a captured batch write there.
"""

from dataclasses import dataclass

import torch
from quantkit_kernels.latents import Latents, parts_of
from torch import Tensor

from quantkit.errors import QuantkitError

BLOCK_SIZE = 64
"""Tokens per block: large enough that block tables stay short, small enough that a sequence wastes little."""

_CACHE_SHARE = {"cuda": 0.9, "npu": 0.9, "cpu": 0.25}
"""Share of the memory left after loading that the cache may take; the rest is for activations (and on a CPU for everybody else)."""


class PagedCache:
    """Storage: `layers[i]` is [num_blocks, block_size, width], or a tensor for each of `parts`, the widths that lie apart."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        width: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parts: tuple[int, ...] = (),
    ) -> None:
        assert sum(parts) in (0, width), (width, parts)
        storage = [torch.empty(num_layers, num_blocks, block_size, part, dtype=dtype, device=device) for part in parts or (width,)]
        self.layers: list[Latents] = [(one[0], one[1]) if parts else one[0] for one in zip(*(part.unbind(0) for part in storage))]
        self.num_blocks, self.block_size, self.width, self.parts = num_blocks, block_size, width, parts
        self.dtype, self.device = dtype, torch.device(device)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for layer in self.layers for part in parts_of(layer))

    def heads(self, layer: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of grouped-query attention, each [num_blocks, block_size, kv_heads, head_dim]."""
        keys, values = (part.unflatten(-1, (-1, head_dim)) for part in self.layers[layer])
        return keys, values


class BlockAllocator:
    """Which blocks are free. The most recently freed are taken first: they are the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, 0, -1))
        self.num_blocks = num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), (count, len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))


@dataclass(frozen=True)
class CachePlan:
    """How many tokens fit: `num_blocks` counts the padding block."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size


def plan_cache(
    *,
    bytes_per_token: int,
    free_bytes: int,
    device_type: str,
    max_batch: int,
    context_len: int,
    max_model_len: int | None,
    cache_tokens: int | None,
    block_size: int = BLOCK_SIZE,
) -> CachePlan:
    """Size the cache: what was asked for, else all that `max_batch` full contexts need, at most a share of the free memory.

    context_len: positions the model was built for. bytes_per_token: over all layers. Raises QuantkitError where what was asked for
    does not fit the model or the memory.
    """
    if max_model_len is not None and max_model_len > context_len:
        raise QuantkitError(f"context of {max_model_len} tokens asked for, the model has {context_len}", "lower --max-model-len")
    budget = int(free_bytes * _CACHE_SHARE[device_type]) // bytes_per_token
    wanted = max_model_len or context_len
    if cache_tokens is None:
        tokens = min(max_batch * -(-wanted // block_size) * block_size, budget)  # sequences share no block
        remedy = "lower --max-model-len, or free memory"
    else:
        if cache_tokens > budget:
            raise QuantkitError(f"a cache of {cache_tokens} tokens asked for, {budget} fit in memory", "lower --cache-tokens")
        tokens, remedy = cache_tokens, "raise --cache-tokens or lower --max-model-len"
    blocks = max(-(-tokens // block_size), 1)
    if max_model_len is not None and blocks * block_size < max_model_len:
        raise QuantkitError(f"the cache holds {blocks * block_size} tokens, fewer than the context of {max_model_len}", remedy)
    return CachePlan(blocks + 1, block_size, min(wanted, blocks * block_size))
