"""The paged cache: what each layer keeps of every token, in blocks that sequences take and give
back.

For latent attention a token is its normed latent and its rotated shared key (`cache_width` values),
in one tensor or in two as the kernel backend reads them; for grouped-query attention its keys and,
in a tensor of their own, its values. In 8 bits it is codes with scales (quantkit_kernels/codes.py).
Blocks are numbered once for all layers: block b of a sequence is block b in every layer. Block 0
belongs to nobody: padding rows of a captured batch write there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from quantkit_kernels import (
    CODES,
    CodedKeys,
    CodedLatents,
    CodeSteps,
    KeySteps,
    KeyValues,
    Latents,
    why_no_codes,
)
from torch import Tensor

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.cache.compressed_kv import CompressedKVCache
from quantkit.executor.cache.sequence_state import RecurrentStates, RotatingCache
from quantkit.models.context import NO_CODE_SCALES

BLOCK_SIZE = 64
"""Tokens per block: large enough that block tables stay short, small enough that a sequence wastes
little."""

_CACHE_SHARE = {"cuda": 0.9, "npu": 0.9, "cpu": 0.25}
"""Share of the memory left after loading that the cache may take; the rest is for activations (and
on a CPU for everybody else)."""


class CacheCodes(NamedTuple):
    """How a cache is kept in 8 bits. dtype: of codes. kv_heads: heads whose keys and values have
    scales of their own; 0 for latents, which have one for a token."""

    dtype: torch.dtype
    kv_heads: int


def cache_dtype(cache: str | None) -> torch.dtype | None:
    """The dtype of a cache in 8 bits by its name; None for the model's 16 bits. Raises
    QuantkitError for other names."""
    if cache not in (None, *CODES):
        raise UsageError(
            f"a cache of {cache!r} is not known",
            f"use --cache {' or '.join(CODES)}, or leave it out for 16 bits",
        )
    return CODES.get(cache or "")


def check_cache_dtype(cache: str | None, device: torch.device) -> torch.dtype | None:
    """As `cache_dtype`; raises QuantkitError too where attention on `device` does not read such a
    cache."""
    codes = cache_dtype(cache)
    reason = None if codes is None else why_no_codes(device)
    if reason is not None:
        raise QuantkitError(
            f"no cache of {cache} on {device.type}: {reason}", "leave --cache out, for 16 bits"
        )
    return codes


class PagedCache:
    """Storage: `layers[i]` is [num_blocks, block_size, width], or a tensor for each of `parts`, the
    widths that lie apart; where there is a coding `CodedLatents`, or `CodedKeys` whose heads lie
    side by side. dtype: of what is neither code nor scale.

    steps: of codes, by layer, where they are known.
    index_dim: width of the index keys beside latents, [num_blocks, block_size, index_dim] of
    `dtype` a layer; 0 for a model without.
    entries: what a model of compressed attention keeps, whose layers keep nothing here. recent:
    what short convolutions read.
    places: of a model some of whose layers keep nothing here, the number that each other layer has;
    states: what those keep.
    """

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
        coding: CacheCodes | None = None,
        steps: Mapping[int, CodeSteps] = NO_CODE_SCALES,
        index_dim: int = 0,
        places: Mapping[int, int] | None = None,
        states: RecurrentStates | None = None,
        entries: CompressedKVCache | None = None,
        recent: RotatingCache | None = None,
    ) -> None:
        assert sum(parts) in (0, width), (width, parts)
        assert coding is None or parts, "what is coded lies apart from what is not"

        def storage(kind: torch.dtype, *sizes: int) -> tuple[Tensor, ...]:
            """A tensor for each layer."""
            return torch.empty(
                num_layers, num_blocks, block_size, *sizes, dtype=kind, device=device
            ).unbind()

        self.layers: list[Latents | CodedKeys]
        if coding is None:
            plain = zip(*(storage(dtype, part) for part in parts or (width,)))
            self.layers = [(one[0], one[1]) if parts else one[0] for one in plain]
        elif coding.kv_heads:
            sides = [storage(coding.dtype, part) for part in parts] + [
                storage(torch.float32, coding.kv_heads) for _ in parts
            ]
            self.layers = [CodedKeys(*one) for one in zip(*sides)]
        else:
            latents = zip(
                storage(coding.dtype, parts[0]), storage(dtype, parts[1]), storage(torch.float32)
            )
            self.layers = [CodedLatents(*one) for one in latents]
        self._index = storage(dtype, index_dim) if index_dim else ()
        self.num_blocks, self.block_size, self.width, self.parts, self.coding = (
            num_blocks,
            block_size,
            width,
            parts,
            coding,
        )
        self.dtype, self.device = dtype, torch.device(device)
        self.steps = steps
        self._places, self._states, self._entries, self._recent = places, states, entries, recent

    @property
    def nbytes(self) -> int:
        kept = [
            part
            for layer in self.layers
            for part in ((layer,) if isinstance(layer, Tensor) else layer)
        ]
        return sum(part.nbytes for part in (*kept, *self._index)) + (
            self._entries.nbytes if self._entries else 0
        )

    @property
    def doubles_angles(self) -> bool:
        """Whether latents lie as those operators read them that want each angle twice
        (quantkit_kernels/latents.py)."""
        return bool(self.parts) and self.coding is None

    @property
    def prefills_per_sequence(self) -> bool:
        """Whether layers read prompts sequence after sequence, and not by tables alone: states,
        index keys, entries."""
        return any(one is not None for one in (self._states, self._entries, self._recent)) or bool(
            self._index
        )

    @property
    def read_in_place(self) -> bool:
        """Whether prompts attend to tokens where they lie, as keys and values in 16 bits: latents
        are expanded first, codes decoded."""
        return bool(self.parts) and self.coding is None

    def latents(self, layer: int) -> Latents:
        """Of latent attention."""
        stored = self.layers[layer]
        assert not isinstance(stored, CodedKeys), "a cache of latents"
        return stored

    def index_keys(self, layer: int) -> Tensor:
        """What the indexer of a layer reads, [num_blocks, block_size, index_dim]."""
        return self._index[layer]

    def heads(self, layer: int, head_dim: int) -> KeyValues:
        """Keys and values of grouped-query attention, each [num_blocks, block_size, kv_heads,
        head_dim]."""
        stored = self.layers[layer if self._places is None else self._places[layer]]
        keys, values = (part.unflatten(-1, (-1, head_dim)) for part in stored[:2])
        return (
            CodedKeys(keys, values, *stored.scales)
            if isinstance(stored, CodedKeys)
            else (keys, values)
        )

    def latent_step(self, layer: int) -> Tensor | None:
        """What a code of a latent is worth, where it is known."""
        step = self.steps.get(layer)
        assert not isinstance(step, KeySteps), "a cache of latents"
        return step

    def key_steps(self, layer: int) -> KeySteps | None:
        """What a code of each channel of keys and values is worth, where it is known."""
        steps = self.steps.get(layer)
        assert not isinstance(steps, Tensor), "a cache of keys and values"
        return steps

    def need_states(self) -> RecurrentStates:
        """Of a model that has layers with a state."""
        assert self._states is not None, "made without"
        return self._states

    def need_recent(self) -> RotatingCache:
        """Of a model with short convolutions."""
        assert self._recent is not None, "made without"
        return self._recent

    def need_entries(self) -> CompressedKVCache:
        """Of a model of compressed attention."""
        assert self._entries is not None, "made without"
        return self._entries


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
    left_bytes: int = 0,
) -> CachePlan:
    """Size the cache: what was asked for, else all that `max_batch` full contexts need, at most a
    share of the free memory.

    context_len: positions the model was built for. bytes_per_token: over all layers. left_bytes: of
    the free memory that are left, where the share leaves less. Raises QuantkitError where what was
    asked for does not fit in memory.
    """
    budget = (
        min(int(free_bytes * _CACHE_SHARE[device_type]), free_bytes - left_bytes) // bytes_per_token
    )
    wanted = max_model_len or context_len
    if cache_tokens is None:
        tokens = min(
            max_batch * -(-wanted // block_size) * block_size, budget
        )  # sequences share no block
        remedy = "lower --max-model-len, or free memory"
    else:
        if cache_tokens > budget:
            raise QuantkitError(
                f"a cache of {cache_tokens} tokens asked for, {budget} fit in memory",
                "lower --cache-tokens",
            )
        tokens, remedy = cache_tokens, "raise --cache-tokens or lower --max-model-len"
    blocks = max(-(-tokens // block_size), 1)
    if max_model_len is not None and blocks * block_size < max_model_len:
        raise QuantkitError(
            f"the cache holds {blocks * block_size} tokens, fewer than the context of "
            f"{max_model_len}",
            remedy,
        )
    return CachePlan(blocks + 1, block_size, min(wanted, blocks * block_size))
