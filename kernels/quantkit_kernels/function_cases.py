"""Cases of the self-check (self_check.py): operators without packed weights, at the sizes of
DeepSeek-R1 and, for grouped-query attention, of Qwen3-8B."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import functional, grouped, prompts
from quantkit_kernels.attention_cases import attention_cases
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.paged import (
    Latents,
    Norms,
    PagedKeys,
    PagedLatents,
    Rotation,
    cache_layout,
    doubled_angles,
    pairs_together,
    split_latents,
)
from quantkit_kernels.routing import Routing, moe_gate, route, route_chosen
from quantkit_kernels.samples import (
    GroupedAttention,
    LatentAttention,
    grouped_attention,
    latent_attention,
)
from quantkit_kernels.sizes import EXPERTS, HIDDEN, TOP_K
from quantkit_kernels.timing import copies_beyond_cache


class Case(NamedTuple):
    """An operator without packed weights: its call on a backend, what it must give, and the bytes
    that it cannot but read.

    calls: of a backend, the first for its results, the others the same over other memory, to be
    timed in turn, so that what is streamed comes from memory and not from a cache.
    """

    operator: str
    name: str
    calls: Callable[[str], list[Callable[[], tuple[Tensor, ...]]]]
    exact: tuple[Tensor, ...]
    nbytes: int = 0


def function_cases(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Iterator[Case]:
    yield from _small_cases(device, dtype, rng)
    yield from _attention_cases(device, dtype)
    yield from _grouped_cases(device, dtype, rng)
    yield _latent_prompt(device, dtype)


def _small_cases(device: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Iterator[Case]:
    tokens = 8

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng, device=device).to(dtype)

    def case(
        operator: str,
        run: Callable[..., Tensor | tuple[Tensor, ...]],
        *inputs: Tensor,
        first: int = 0,
        nbytes: int = 0,
    ) -> Case:
        """With its exact results: these are the same few lines of torch in any precision, so the
        reference on float32 copies is exact enough to judge by. Results before number `first` are
        left out."""
        results = partial(_results, run, first)
        exact = results(*(one.float() for one in inputs), backend="reference")

        def calls(backend: str) -> list[Callable[[], tuple[Tensor, ...]]]:
            return [partial(results, *inputs, backend=backend)]

        return Case(operator, f"T={tokens}", calls, tuple(one.double() for one in exact), nbytes)

    x, residual, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    yield case("rms_norm", partial(functional.rms_norm, eps=1e-6), x, weight)
    yield case("add_rms_norm", partial(functional.add_rms_norm, eps=1e-6), x, residual, weight)
    yield case("silu_and_mul", functional.silu_and_mul, x)
    yield case("gate_and_mul", partial(functional.gate_and_mul, gating=Gating(1.702, 7.0, 1.0)), x)
    yield case("mx_rounded", partial(functional.mx_rounded, bits=8), x)
    yield case("gate_and_rotate", partial(functional.gate_and_rotate, gating=SILU, block=128), x)
    logits, router = (
        random(tokens, EXPERTS, dtype=torch.float32),
        random(EXPERTS, HIDDEN, dtype=torch.float32) / HIDDEN**0.5,
    )
    bias = random(EXPERTS, dtype=torch.float32) * 0.1
    rule = Routing(EXPERTS, TOP_K, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    joined = replace(rule, num_joined_experts=1)
    yield case("likeliest", functional.likeliest, logits)
    yield case("float32_linear", functional.float32_linear, x, router)
    yield from attention_cases(case, random, tokens)
    yield case("route", partial(route, routing=rule), logits, bias, first=1)
    chosen = logits.topk(TOP_K).indices

    def weighed_table(logits: Tensor, backend: str) -> Tensor:
        return route_chosen(logits, chosen, rule, backend=backend)

    yield case("route_chosen", weighed_table, logits)
    yield case(
        "moe_gate",
        partial(moe_gate, routing=joined),
        x,
        router,
        bias,
        first=1,
        nbytes=router.nbytes,
    )
    positions, angles = torch.arange(tokens, device=device), random(64, 32, dtype=torch.float32)
    yield case(
        "rope",
        lambda q, c, s, backend: functional.rope(q, positions, c, s, backend=backend),
        random(tokens, 128, 64),
        *cos_sin(angles),
    )
    yield case(
        "rotary_angles",
        lambda frequencies, backend: functional.rotary_angles(
            positions, frequencies, backend=backend
        ),
        angles[0],
    )
    slots = torch.arange(tokens, device=device)

    gains, tables, qkv_a = (
        (random(1536), random(512)),
        cos_sin(angles[:tokens]),
        random(tokens, 2112),
    )

    def prepare_and_look(
        one: Tensor, two: tuple[Tensor, Tensor], backend: str
    ) -> Callable[[], tuple[Tensor, ...]]:
        rotation, cache = rotation_and_cache(
            *tables, torch.zeros(1, 128, 576, dtype=one.dtype, device=device), backend
        )

        def run() -> tuple[Tensor, ...]:
            q_a = functional.mla_prepare(
                one, Norms(*two, 1e-6), rotation, cache, slots, backend=backend
            )
            if isinstance(cache, Tensor):
                return q_a, cache[0, :tokens]
            return q_a, torch.cat([cache[0], pairs_together(cache[1])], dim=-1)[0, :tokens]

        return run

    exact = prepare_and_look(qkv_a.float(), (gains[0].float(), gains[1].float()), "reference")()
    doubles = tuple(one.double() for one in exact)
    yield Case(
        "mla_prepare",
        f"T={tokens}",
        lambda backend: [prepare_and_look(qkv_a, gains, backend)],
        doubles,
    )


def _attention_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """R1's latent attention, whole and as one of four ranks has it."""
    shapes = (
        ((128, 8, 640), (32, 1, 640), (32, 32, 640), (32, 1, 30000))
        if device.type != "cpu"
        else ((128, 2, 640),)
    )
    block_size = cache_layout(512, 64, dtype, device).block_size
    for heads, batch, length in shapes:
        one = latent_attention(
            [length] * batch, heads, block_size, (128, 64, 128, 512), dtype, device
        )
        nbytes = batch * length * 576 * 2 + one.arguments[1].nbytes
        lengths = [length] * batch

        def calls(
            backend: str,
            one: LatentAttention = one,
            nbytes: int = nbytes,
            lengths: list[int] = lengths,
        ) -> list[Any]:
            found = []
            for _ in range(copies_beyond_cache(nbytes, device)):
                q, kv_b, rotation, pages = one.arguments
                assert isinstance(pages.cache, Tensor)
                rotation, cache = rotation_and_cache(
                    rotation.cos.clone(), rotation.sin.clone(), pages.cache.clone(), backend
                )
                copied = PagedLatents(
                    cache, pages.block_table.clone(), pages.seq_lens.clone(), lengths
                )
                decode = partial(functional.mla_decode, scale=one.scale, backend=backend)
                found.append(
                    partial(_results, decode, 0, q.clone(), kv_b.clone(), rotation, copied)
                )
            return found

        yield Case(
            "mla_decode", f"heads={heads} T={batch} of {length}", calls, (one.exact,), nbytes
        )


def _grouped_cases(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Iterator[Case]:
    """Grouped-query attention of Qwen3-8B: 32 heads of 128 that share 8 keys."""
    heads, width, whole = (32, 8), 128, device.type != "cpu"
    tokens, shape = 8, (1, 128, heads[1], width)
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * width, generator=rng, device=device).to(
        dtype
    )
    gains = tuple(torch.rand(2, width, generator=rng, device=device).to(dtype).unbind())
    angles, slots = (
        torch.rand(tokens, width // 2, generator=rng, device=device) * 6,
        torch.arange(tokens, device=device),
    )
    rotation = Rotation(*cos_sin(angles))

    def prepare_and_look(
        one: Tensor, two: tuple[Tensor, ...], backend: str
    ) -> Callable[[], tuple[Tensor, ...]]:
        keys, values = torch.zeros(2, *shape, dtype=one.dtype, device=device).unbind()

        def run() -> tuple[Tensor, ...]:
            q = grouped.gqa_prepare(
                one, Norms(two[0], two[1], 1e-6), rotation, (keys, values), slots, backend=backend
            )
            return q, keys[0, :tokens], values[0, :tokens]

        return run

    exact = prepare_and_look(qkv.float(), tuple(gain.float() for gain in gains), "reference")()
    doubles = tuple(one.double() for one in exact)
    yield Case(
        "gqa_prepare",
        f"T={tokens}",
        lambda backend: [prepare_and_look(qkv, gains, backend)],
        doubles,
    )
    for batch, length in ((1, 4096), (32, 1024)) if whole else ((2, 640),):
        one = grouped_attention([length] * batch, [1] * batch, heads, width, 128, dtype, device)
        nbytes, lengths = batch * length * 2 * heads[1] * width * 2, [length] * batch

        def calls(
            backend: str,
            one: GroupedAttention = one,
            nbytes: int = nbytes,
            lengths: list[int] = lengths,
        ) -> list[Any]:
            decode = partial(grouped.gqa_decode, scale=one.scale, backend=backend)
            found = []
            for _ in range(copies_beyond_cache(nbytes, device)):
                keys, values, block_table, seq_lens = (tensor.clone() for tensor in one.pages[:4])
                found.append(
                    partial(
                        _results,
                        decode,
                        0,
                        one.q.clone(),
                        PagedKeys(keys, values, block_table, seq_lens, lengths),
                    )
                )
            return found

        yield Case("gqa_decode", f"heads=32/8 T={batch} of {length}", calls, (one.exact,), nbytes)
    new, seen = (1024, 4096) if whole else (40, 200)
    prompt = grouped_attention([seen, new], [new, new], heads, width, 128, dtype, device)

    def prefill(backend: str) -> tuple[Tensor, ...]:
        return (
            prompts.gqa_prefill(
                prompt.q, prompt.pages.cache, prompt.prompts, scale=prompt.scale, backend=backend
            ),
        )

    name = f"heads=32/8 T={new} of {seen}, {new}"
    yield Case("gqa_prefill", name, lambda backend: [partial(prefill, backend)], (prompt.exact,))


def _latent_prompt(device: torch.device, dtype: torch.dtype) -> Case:
    """Prompts over R1's latents, as one of eight ranks has them."""
    heads, new, seen = (16, 1024, 4096) if device.type != "cpu" else (2, 40, 200)
    spans = [(seen - new, new), (0, new)]
    blocks = torch.randperm(2 * -(-seen // 128), device=device).view(2, -1)
    angles = cos_sin(torch.rand(2 * new, 32, device=device) * 6)
    q, kv_b = (
        torch.randn(2 * new, heads, 192, device=device).to(dtype),
        (torch.randn(heads, 256, 512, device=device) / 512**0.5).to(dtype),
    )
    cache, both = (
        torch.randn(blocks.numel(), 128, 576, device=device).to(dtype),
        prompts.Prompts.of(spans, blocks),
    )

    def attend(query: Tensor, weight: Tensor, cached: Tensor, backend: str) -> tuple[Tensor, ...]:
        laid_out = rotation_and_cache(*angles, cached, backend)[1]
        return (
            prompts.mla_prefill(
                query, weight, Rotation(*angles), laid_out, both, scale=0.07, backend=backend
            ),
        )

    exact = attend(q.float(), kv_b.float(), cache.float(), "reference")[0].double()
    return Case(
        "mla_prefill",
        f"heads={heads} T={new} of {seen}, {new}",
        lambda backend: [partial(attend, q, kv_b, cache, backend)],
        (exact,),
    )


def cos_sin(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.cos(), values.sin()


def _results(
    run: Callable[..., Tensor | tuple[Tensor, ...]], first: int, *inputs: Any, **how: Any
) -> tuple[Tensor, ...]:
    found = run(*inputs, **how)
    return (found,) if isinstance(found, Tensor) else found[first:]


def rotation_and_cache(
    cos: Tensor, sin: Tensor, cache: Tensor, backend: str
) -> tuple[Rotation, Latents]:
    """Angles and cache of R1's sizes as a backend reads them."""
    reader = (
        "auto" if why_unusable("mla_decode", backend, cache.device) else backend
    )  # the decode operator defines the cache layout
    if len(cache_layout(512, 64, cache.dtype, cache.device, backend=reader).widths) == 1:
        return Rotation(cos, sin), cache
    return Rotation(*doubled_angles(cos, sin, cache.dtype)), split_latents(cache, 512, True)
