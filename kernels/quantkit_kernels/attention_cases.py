"""More cases of the self-check (function_cases.py): linear, compressed and sparse attention, and residual
streams, at the sizes of Qwen3-Next, DeepSeek-V4-Flash and V3.2."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.codes import decode, empty_index_keys, encode_index, store_index_keys
from quantkit_kernels.compressed import (
    EntryPages,
    HeadNorm,
    RecentTokens,
    compressed_attend,
    rotate_heads,
    rotate_queries,
)
from quantkit_kernels.delta import (
    DeltaInputs,
    DeltaSpan,
    DeltaSpans,
    DeltaStates,
    DeltaWeights,
    delta_prefill,
    delta_step,
)
from quantkit_kernels.indexer import IndexNorm, IndexPages, index_prepare, index_topk
from quantkit_kernels.paged import Rotation
from quantkit_kernels.streams import (
    MixingWeights,
    StreamProduct,
    merge_streams,
    mix_streams,
    weigh_streams,
)

Random = Callable[..., Tensor]
"""Random numbers of a shape, of the activations' dtype where none is given."""
Make = Callable[..., Any]
"""A case of an operator, a function of its inputs, and these."""
_SINGLE = torch.float32


def attention_cases(case: Make, random: Random, tokens: int) -> Iterator[Any]:
    device = random(1).device
    yield from _linear_attention(case, random, tokens, device)
    yield from _windows(case, random, tokens, device)
    yield from _residual_streams(case, random, tokens)
    yield from _indexer(case, random, tokens, device)


def _linear_attention(
    case: Make, random: Random, tokens: int, device: torch.device
) -> Iterator[Any]:
    heads, group = (16, 2, 128), (16, 128)
    weights = DeltaWeights(
        random(8192, 4, dtype=_SINGLE), random(32, dtype=_SINGLE).exp(), random(32, dtype=_SINGLE),
        random(128), 1e-6,
    )  # fmt: skip
    states = DeltaStates(
        random(2, tokens + 1, 3, 8192, dtype=_SINGLE),
        random(2, tokens + 1, 32, 128, 128, dtype=_SINGLE),
        torch.full((2, tokens + 1), tokens, device=device),
    )
    places = torch.arange(1, tokens + 1, device=device)
    spans = DeltaSpans.of([DeltaSpan(1, tokens, tokens)], device)

    def step(*inputs: Tensor, backend: str) -> Tensor:
        where = (places, torch.full_like(places, tokens))
        return delta_step(DeltaInputs(*inputs), weights, states, *where, backend=backend)

    def prompt(*inputs: Tensor, backend: str) -> Tensor:
        return delta_prefill(DeltaInputs(*inputs), weights, states, spans, backend=backend)

    inputs = DeltaInputs(
        random(tokens, *group), random(tokens, *group), random(tokens, *heads),
        random(tokens, *heads), random(tokens, 16, 2, dtype=_SINGLE),
        random(tokens, 16, 2, dtype=_SINGLE),
    )  # fmt: skip
    yield case("delta_step", step, *inputs, nbytes=tokens * states.memory[0, 0].nbytes * 2)
    yield case("delta_prefill", prompt, *inputs)


def _windows(case: Make, random: Random, tokens: int, device: torch.device) -> Iterator[Any]:
    sinks = random(64, dtype=_SINGLE)
    rotation = Rotation(random(tokens, 32, dtype=_SINGLE), random(tokens, 32, dtype=_SINGLE), True)
    first, table = (
        torch.arange(tokens, device=device) * 128,
        torch.arange(tokens * 4, device=device),
    )

    def rotated(x: Tensor, backend: str) -> Tensor:
        return rotate_heads(x, rotation, HeadNorm(None, 1e-6), backend=backend)

    def attended(q: Tensor, kv: Tensor, entries: Tensor, backend: str) -> Tensor:
        recent = RecentTokens(kv, first, 128, 128)
        pages = EntryPages(entries, table.view(tokens, 4), 64, 4)
        at = torch.full_like(first, 255)
        return compressed_attend(q, at, recent, pages, None, sinks, scale=0.1, backend=backend)

    def both(q: Tensor, key: Tensor, gain: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        norm = HeadNorm(None, 1e-6)
        return rotate_queries(q, key, rotation, norm, HeadNorm(gain, 1e-6), backend=backend)

    yield case("rotate_heads", rotated, random(tokens, 64, 512))
    yield case("rotate_queries", both, random(tokens, 64, 512), random(tokens, 512), random(512))
    yield case(
        "compressed_attend", attended, random(tokens, 64, 512), random(tokens * 128, 512),
        random(tokens * 64, 512),
    )  # fmt: skip


def _residual_streams(case: Make, random: Random, tokens: int) -> Iterator[Any]:
    streams, (count, wide) = random(tokens, 4, 1024), (24, 4096)
    product = StreamProduct(
        random(count, wide, dtype=_SINGLE) / wide**0.5, random(count, dtype=_SINGLE),
        random(3, dtype=_SINGLE), 1e-6, 1e-6, 20,
    )  # fmt: skip
    end, gain = (
        product._replace(fn=product.fn[:4], base=product.base[:4], scale=product.scale[:1]),
        random(1024),
    )

    def weighed(streams: Tensor, gain: Tensor, backend: str) -> tuple[Tensor, ...]:
        normed, weights = weigh_streams(streams, product, gain, 1e-6, backend=backend)
        assert weights.mixing is not None, "streams that are mixed"
        return normed, weights.post, weights.mixing

    def merged(streams: Tensor, gain: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        return merge_streams(streams, end, gain, 1e-6, backend=backend)

    def mixed(streams: Tensor, output: Tensor, *weights: Tensor, backend: str) -> Tensor:
        return mix_streams(streams, output, MixingWeights(*weights), backend=backend)

    _, weights_now = weigh_streams(streams, product, gain, 1e-6, backend="reference")
    yield case("weigh_streams", weighed, streams, gain, nbytes=product.fn.nbytes)
    yield case("merge_streams", merged, streams, gain)
    yield case("mix_streams", mixed, streams, streams[:, 0], *weights_now)


def _indexer(case: Make, random: Random, tokens: int, device: torch.device) -> Iterator[Any]:
    width, seen = 128, 4096
    norm = IndexNorm(random(width, dtype=_SINGLE), random(width, dtype=_SINGLE), 1e-6)
    keys, slots = random(seen // 64, 64, width), torch.arange(tokens, device=device)
    table = torch.arange(seen // 64, device=device, dtype=torch.int32)[None]
    angles = random(tokens, 32, dtype=_SINGLE)

    def prepare_index(q: Tensor, k: Tensor, *, backend: str) -> tuple[Tensor, Tensor]:
        cache, rotation = (
            torch.zeros_like(keys[:1]).to(q.dtype),
            Rotation(angles.cos(), angles.sin()),
        )
        out = index_prepare(q, k, norm, rotation, cache, slots, backend=backend)
        return out, cache[0, :tokens]

    def select(q: Tensor, weights: Tensor, *, backend: str) -> Tensor:
        """The scores of what is selected: tokens of nearly equal ones may change places."""
        own = keys.to(q.dtype)
        found = index_topk(
            q, weights, IndexPages(own, table), slots + seen - tokens, 2048, backend=backend
        )
        picked = own.flatten(0, 1)[found.slots.long()].float()
        return (weights[:, None] @ (q.float() @ picked.mT).relu_()).sort().values

    codes = empty_index_keys((seen // 64, 64), width, device)
    store_index_keys(codes, torch.arange(seen, device=device), keys.flatten(0, 1))

    def select_by_codes(q: Tensor, weights: Tensor, *, backend: str) -> Tensor:
        """The same over keys in FP8."""
        found = index_topk(
            q, weights, IndexPages(codes, table), slots + seen - tokens, 2048, backend=backend
        )
        picked = decode(*codes).flatten(0, 1)[found.slots.long()]
        rounded = decode(*encode_index(q))
        return (weights[:, None] @ (rounded @ picked.mT).relu_()).sort().values

    yield case("index_prepare", prepare_index, random(tokens, 64, width), random(tokens, width))
    yield case(
        "index_topk", select, random(tokens, 64, width), random(tokens, 64, dtype=_SINGLE),
        nbytes=keys.nbytes,
    )  # fmt: skip
    yield case(
        "index_topk", select_by_codes, random(tokens, 64, width), random(tokens, 64, dtype=_SINGLE),
        nbytes=sum(part.nbytes for part in codes),
    )  # fmt: skip
