"""Attention of prompts: many new tokens of several sequences at once, over what is cached of each.

A token sees its sequence's cached tokens up to itself, so its result does not depend on how a
prompt was cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor, require
from quantkit_kernels.codes import CodedLatents, KeyValues
from quantkit_kernels.grouped import check_cache, check_sinks
from quantkit_kernels.indexer import TopTokens
from quantkit_kernels.paged import Latents, Rotation, check_rotation, parts_of


@dataclass(frozen=True)
class Prompts:
    """New tokens of B sequences, flat, one sequence after the other. They are in the cache already.

    spans: of each sequence the position of its first new token, and how many are new. On the
    device: block_table int32 [B, n], as
    `gqa_decode` has it; starts int32 [B + 1], where each sequence's new tokens begin; seq_lens
    int32 [B], tokens cached.
    """

    spans: Sequence[tuple[int, int]]
    block_table: Tensor
    starts: Tensor
    seq_lens: Tensor
    _found: dict[tuple[int, int], list["PromptPart"]] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], block_table: Tensor) -> "Prompts":
        device = block_table.device
        starts = torch.tensor([0, *(length for _, length in spans)]).cumsum(0)
        seq_lens = torch.tensor([start + length for start, length in spans], dtype=torch.int32)
        return cls(
            tuple(spans),
            block_table.int().contiguous(),
            starts.int().to(device),
            seq_lens.to(device),
        )

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.spans)

    @property
    def longest(self) -> int:
        """No sequence has more new tokens."""
        return max(length for _, length in self.spans)

    def parts(self, block_size: int, room: int) -> list["PromptPart"]:
        """The cached tokens of all sequences, one sequence after the other, `room` at a time. Found
        once, not by every layer."""
        if (block_size, room) not in self._found:
            self._found[block_size, room] = list(self._parts(block_size, room))
        return self._found[block_size, room]

    def _parts(self, block_size: int, room: int) -> Iterator["PromptPart"]:
        device = self.block_table.device
        seen = [torch.arange(start + length, device=device) for start, length in self.spans]
        slots = torch.cat(
            [
                table[at // block_size].long() * block_size + at % block_size
                for table, at in zip(self.block_table, seen)
            ]
        )
        for first in range(0, len(slots), room):
            last, before, limits = min(first + room, len(slots)), 0, []
            for one in seen:
                limits.append(
                    [min(max(end - before, 0), len(one)) for end in (first, last)]
                    + [before - first]
                )
                before += len(one)
            yield PromptPart(
                slots[first:last],
                *torch.tensor(limits, dtype=torch.int32).T.contiguous().to(device),
            )


class PromptPart(NamedTuple):
    """Cached tokens in a row: slots int64 [n], block * block_size + offset of each. int32 [B] each:
    firsts, lasts: tokens firsts[b] .. lasts[b] - 1 of sequence b are among them; rows: token t of
    it is number rows[b] + t."""

    slots: Tensor
    firsts: Tensor
    lasts: Tensor
    rows: Tensor


class SpansNow(list[tuple[int, int]]):
    """Spans that are others in every pass: a graph would keep those of its capture, so there they
    may not be asked for."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this attention of prompts wants their lengths on the host")
        return super().__iter__()


@dataclass(frozen=True)
class PaddedPrompts(Prompts):
    """Prompts of one size, whose spans and tensors are filled anew for every pass: what a graph of
    prompts is captured over.

    size: new tokens of all sequences, padding included, which is a sequence too. part: all their
    cached tokens, for attention that expands or decodes these; its slots may be more than there are
    tokens.
    """

    size: int = 0
    part: PromptPart | None = None

    @property
    def tokens(self) -> int:
        return self.size

    @property
    def longest(self) -> int:
        return self.size

    def parts(self, block_size: int, room: int) -> list[PromptPart]:
        """As of `Prompts`. RuntimeError where the cached tokens are more than are taken at a
        time."""
        if self.part is None or len(self.part.slots) > room:
            raise RuntimeError(f"attention of prompts takes {room} cached tokens at a time")
        return [self.part]


def gqa_prefill(
    q: Tensor,
    cache: KeyValues,
    prompts: Prompts,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Grouped-query attention: q float [T, heads, D] over cache, keys and values as in `PagedKeys`
    -> [T, heads, D] of q's dtype.

    window: a token sees itself and at most window - 1 before it; 0 for all. sinks: as in
    `gqa_decode`.
    """
    check_cache(q, cache, window)
    _check_prompts(q, prompts)
    result: Tensor
    if sinks is None:
        result = backends.find("gqa_prefill", backend, q.device).gqa_prefill(
            q, cache, prompts, scale, window
        )
    else:
        check_sinks(sinks, q)
        result = backends.find_with_sinks("gqa_prefill", backend, q.device).gqa_prefill(
            q, cache, prompts, scale, window, sinks
        )
    return result


def mla_prefill(
    q: Tensor,
    kv_b: Tensor,
    rotation: Rotation,
    cache: Latents,
    prompts: Prompts,
    *,
    scale: float,
    selected: TopTokens | None = None,
    backend: str = "auto",
) -> Tensor:
    """MLA over cached latents that are expanded to keys and values: least arithmetic where many
    tokens are computed.

    q float [T, heads, N + R], its rotary part not yet rotated; kv_b of q's dtype [heads, N + V,
    kv_lora] as `mla_decode` has it; cache as in `PagedLatents`. The rotation has float32 angles [T,
    R/2] also where the cache is in two tensors. selected: of each token those that it attends to,
    where `takes_selected`. Returns [T, heads, V] of q's dtype.
    """
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    _check_prompts(q, prompts)
    check_tensor("kv_b", kv_b, (q.shape[1], None, None), (q.dtype,))
    rope_dim = check_rotation(rotation, q.shape[0])
    nope = q.shape[2] - rope_dim
    require(
        0 < nope < kv_b.shape[1],
        f"kv_b: {kv_b.shape[1]} rows a head, expected more than the {nope} of W_UK",
    )
    width = sum(
        part.shape[-1]
        for part in (cache[:2] if isinstance(cache, CodedLatents) else parts_of(cache))
    )
    require(
        width == kv_b.shape[2] + rope_dim,
        f"cache: {width} values a token, expected {kv_b.shape[2]} and {rope_dim}",
    )
    found = backends.find("mla_prefill", backend, q.device)
    if selected is None:
        result: Tensor = found.mla_prefill(q, kv_b, rotation, cache, prompts, scale)
        return result
    cached = sum(start + length for start, length in prompts.spans)
    taken = takes_selected(q, kv_b, rope_dim, cached, backend=backend)
    require(taken, "selected: of no such attention")
    result = found.mla_prefill(q, kv_b, rotation, cache, prompts, scale, selected)
    return result


def takes_selected(
    q: Tensor, kv_b: Tensor, rotary: int, cached: int, *, backend: str = "auto"
) -> bool:
    """Whether `mla_prefill` of q and kv_b reads a selection among `cached` tokens, those of all
    sequences."""
    found = backends.find("mla_prefill", backend, q.device)
    check = getattr(found, "takes_selected", None)
    return check is not None and bool(check(q, kv_b, rotary, cached))


def _check_prompts(q: Tensor, prompts: Prompts) -> None:
    require(
        q.shape[0] == prompts.tokens, f"q: {q.shape[0]} tokens, the prompts have {prompts.tokens}"
    )
    check_tensor("block_table", prompts.block_table, (len(prompts.spans), None), (torch.int32,))
