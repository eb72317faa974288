"""The paged KV cache, in blocks that sequences allocate and free.

For latent attention a token is its normed latent and its rotated shared key (`cache_width` values),
in one tensor or in two as the kernel backend reads them; for grouped-query attention its keys and,
in a separate tensor, its values. In 8 bits it is codes with scales (quantkit_kernels/codes.py).
Blocks are numbered once for all layers: block b of a sequence is block b in every layer. Block 0 is
never allocated: padding rows of a captured batch write there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from quantkit_kernels import (
    CODES,
    CodedIndexKeys,
    CodedKeys,
    CodedLatents,
    CodeSteps,
    IndexKeys,
    KeySteps,
    KeyValues,
    Latents,
    why_no_codes,
)
from torch import Tensor

from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.cache.compressed_kv import CompressedKVCache, PooledIndexCache
from quantkit.executor.cache.sequence_state import (
    KeptTwice,
    RecurrentStates,
    RotatingCache,
    StateCheckpoints,
)
from quantkit.models.context import NO_CODE_SCALES

BLOCK_SIZE = 64
"""Tokens per block: large enough that block tables stay short, small enough that a sequence wastes
little."""

_CACHE_SHARE = {"cuda": 0.9, "npu": 0.9, "cpu": 0.25}
"""Share of the free memory after loading that the cache may take; the rest is for activations (and
on a CPU for other processes)."""


class CacheCodes(NamedTuple):
    """An 8-bit cache. dtype: of codes. kv_heads: heads with their own scales for keys and values; 0
    for latents, which have one scale per token."""

    dtype: torch.dtype
    kv_heads: int


def cache_dtype(cache: str | None) -> torch.dtype | None:
    """The dtype of an 8-bit cache by its name; None for the model's 16 bits. Raises QuantkitError
    for other names."""
    if cache not in (None, *CODES):
        raise UsageError(
            f"a cache of {cache!r} is not supported",
            f"use --cache {' or '.join(CODES)}, or leave it out for 16 bits",
        )
    return CODES.get(cache or "")


def check_cache_dtype(cache: str | None, device: torch.device) -> torch.dtype | None:
    """As `cache_dtype`; also raises QuantkitError if attention on `device` cannot read such a
    cache."""
    codes = cache_dtype(cache)
    reason = None if codes is None else why_no_codes(device)
    if reason is not None:
        raise QuantkitError(
            f"no cache of {cache} on {device.type}: {reason}", "leave --cache out, for 16 bits"
        )
    return codes


@dataclass(frozen=True)
class OtherCaches:
    """What layers keep that is not a vector per token. recurrent_states: of linear attention.
    compressed_kv: of compressed attention. rotating_cache: inputs of short convolutions.
    pooled_index: index keys of groups of tokens."""

    recurrent_states: RecurrentStates | None = None
    compressed_kv: CompressedKVCache | None = None
    rotating_cache: RotatingCache | None = None
    pooled_index: PooledIndexCache | None = None

    @property
    def kept(self) -> list[KeptTwice]:
        """Of each running sequence."""
        every = (self.recurrent_states, self.compressed_kv, self.rotating_cache, self.pooled_index)
        return [one for held in every if held is not None for one in held.kept]


class PagedCache:
    """Storage: `layers[i]` is [num_blocks, block_size, width], or one tensor for each width in
    `parts`; with `codes`, `CodedLatents`, or `CodedKeys` with concatenated heads. dtype: of what is
    neither code nor scale.

    code_scales: calibrated scales of codes, by layer.
    index_dim: width of the index keys of sparse attention, of `dtype` or, with `codes`, FP8 codes;
    0 without.
    layer_index: of a model with layers that keep nothing here, the index in `layers` of each other
    layer. others: what layers keep instead, or in addition; checkpoints: copies of what these keep
    of a sequence, for a prefix cache.
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
        codes: CacheCodes | None = None,
        code_scales: Mapping[int, CodeSteps] = NO_CODE_SCALES,
        index_dim: int = 0,
        layer_index: Mapping[int, int] | None = None,
        others: OtherCaches = OtherCaches(),
        checkpoints: int = 0,
    ) -> None:
        assert sum(parts) in (0, width), (width, parts)
        assert codes is None or parts, "codes are in a tensor of their own"

        def storage(kind: torch.dtype, *sizes: int) -> tuple[Tensor, ...]:
            """A tensor for each layer."""
            return torch.empty(
                num_layers, num_blocks, block_size, *sizes, dtype=kind, device=device
            ).unbind()

        self.layers: list[Latents | CodedKeys]
        if codes is None:
            tensors = zip(*(storage(dtype, part) for part in parts or (width,)))
            self.layers = [(one[0], one[1]) if parts else one[0] for one in tensors]
        elif codes.kv_heads:
            sides = [storage(codes.dtype, part) for part in parts] + [
                storage(torch.float32, codes.kv_heads) for _ in parts
            ]
            self.layers = [CodedKeys(*one) for one in zip(*sides)]
        else:
            latents = zip(
                storage(codes.dtype, parts[0]), storage(dtype, parts[1]), storage(torch.float32)
            )
            self.layers = [CodedLatents(*one) for one in latents]
        self._index: tuple[IndexKeys, ...] = ()
        if index_dim and codes is None:
            self._index = storage(dtype, index_dim)
        elif index_dim:
            index = zip(storage(torch.float8_e4m3fn, index_dim), storage(torch.float32))
            self._index = tuple(CodedIndexKeys(*one) for one in index)
        self.num_blocks, self.block_size, self.width = num_blocks, block_size, width
        self.parts, self.codes, self.code_scales = parts, codes, code_scales
        self.dtype, self.device = dtype, torch.device(device)
        self._layer_index, self._others = layer_index, others
        self.checkpoints = StateCheckpoints(others.kept, checkpoints)

    @property
    def nbytes(self) -> int:
        tensors = [
            part
            for layer in (*self.layers, *self._index)
            for part in ((layer,) if isinstance(layer, Tensor) else layer)
        ]
        paged = (one for one in (self._others.compressed_kv, self._others.pooled_index) if one)
        parts = sum(part.nbytes for part in tensors)
        return parts + sum(one.nbytes for one in paged)

    @property
    def doubles_angles(self) -> bool:
        """Whether operators on this layout of latents read each rotation angle twice
        (quantkit_kernels/paged.py)."""
        return bool(self.parts) and self.codes is None

    @property
    def prefills_per_sequence(self) -> bool:
        """Whether layers prefill sequence by sequence, not by tables alone: index keys, compressed
        KV, short convolutions."""
        others = self._others
        caches = (others.compressed_kv, others.rotating_cache, others.pooled_index)
        return any(one is not None for one in caches) or bool(self._index)

    @property
    def read_in_place(self) -> bool:
        """Whether prompts attend to the cache in place, as to keys and values in 16 bits: latents
        are expanded first, codes decoded."""
        return bool(self.parts) and self.codes is None

    def latents(self, layer: int) -> Latents:
        stored = self.layers[layer if self._layer_index is None else self._layer_index[layer]]
        assert not isinstance(stored, CodedKeys), "a cache of latents"
        return stored

    def index_keys(self, layer: int) -> IndexKeys:
        """Index keys of a layer."""
        return self._index[layer]

    def heads(self, layer: int, head_dim: int) -> KeyValues:
        """Keys and values of grouped-query attention, each [num_blocks, block_size, kv_heads,
        head_dim]."""
        stored = self.layers[layer if self._layer_index is None else self._layer_index[layer]]
        keys, values = (part.unflatten(-1, (-1, head_dim)) for part in stored[:2])
        return (
            CodedKeys(keys, values, *stored.scales)
            if isinstance(stored, CodedKeys)
            else (keys, values)
        )

    def latent_step(self, layer: int) -> Tensor | None:
        """Calibrated scale of latent codes, if any."""
        step = self.code_scales.get(layer)
        assert not isinstance(step, KeySteps), "a cache of latents"
        return step

    def key_steps(self, layer: int) -> KeySteps | None:
        """Calibrated scales per channel of keys and values, if any."""
        steps = self.code_scales.get(layer)
        assert not isinstance(steps, Tensor), "a cache of keys and values"
        return steps

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have states of linear attention."""
        return self._others.recurrent_states is not None

    @property
    def recurrent_states(self) -> RecurrentStates:
        assert self._others.recurrent_states is not None, "a model with linear attention"
        return self._others.recurrent_states

    @property
    def rotating_cache(self) -> RotatingCache:
        assert self._others.rotating_cache is not None, "a model with short convolutions"
        return self._others.rotating_cache

    @property
    def pooled_index(self) -> PooledIndexCache:
        assert self._others.pooled_index is not None, (
            "a model whose index keys are of groups of tokens"
        )
        return self._others.pooled_index

    @property
    def compressed_kv(self) -> CompressedKVCache:
        assert self._others.compressed_kv is not None, "a model with compressed attention"
        return self._others.compressed_kv


class BlockAllocator:
    """Free blocks; the most recently freed, still in hardware caches, are taken first."""

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
    """Size of the cache; `num_blocks` includes the padding block. checkpoints: of states, where a
    prefix cache needs them."""

    num_blocks: int
    block_size: int
    max_model_len: int
    checkpoints: int = 0

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
    """Size the cache: as requested, else what `max_batch` full contexts need, at most a share of
    the free memory.

    context_len: positions the model was built for. bytes_per_token: over all layers. left_bytes:
    free memory to leave, where the share leaves less. Raises QuantkitError if what was requested
    does not fit in memory.
    """
    budget = (
        min(int(free_bytes * _CACHE_SHARE[device_type]), free_bytes - left_bytes) // bytes_per_token
    )
    requested = max_model_len or context_len
    if cache_tokens is None:
        tokens = min(
            max_batch * -(-requested // block_size) * block_size, budget
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
    return CachePlan(blocks + 1, block_size, min(requested, blocks * block_size))
