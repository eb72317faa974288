"""The acceptance test of a new machine: every operator of every usable backend at DeepSeek-R1
shapes, its error and its speed.

A device runs the shapes whole. The CPU runs them with fewer output features and experts, so that
the check stays under a minute; K, which decides the rounding, is R1's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit_kernels import functional, grouped, prompts
from quantkit_kernels.attention_cases import attention_cases
from quantkit_kernels.backends import BACKENDS, BY_NAME_ONLY, module, why_unusable
from quantkit_kernels.experts import ExpertsBuilder
from quantkit_kernels.gating import Gating
from quantkit_kernels.linear import prepare
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
from quantkit_kernels.prolog import MlaProlog, MlaWeights, prepare_mla_prolog
from quantkit_kernels.routing import Routing, moe_gate, route, route_chosen
from quantkit_kernels.samples import (
    TOLERANCE,
    GroupedAttention,
    LatentAttention,
    distance,
    exact_expert,
    exact_linear,
    grouped_attention,
    latent_attention,
    random_weight,
)
from quantkit_kernels.sizes import R1_LINEARS
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from quantkit_kernels.weights import Weight, rows, shape

GRIDS = ("int4-asym-128", "int8", "fp4", "dense")
NARROW = "int8-narrow"
"""Experts with activations of 8 bits and codes of 4, where a backend holds them in 4."""
LINEARS = {name: R1_LINEARS[name] for name in ("q_a+kv_a", "q_b", "o")} | {
    "gate_up": R1_LINEARS["shared_gu"],
    "down": R1_LINEARS["shared_dn"],
}
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 256, 8
_SAMPLED_ROWS = 512


@dataclass(frozen=True)
class Measurement:
    """One operator on one backend. `fraction` is of the device's measured read bandwidth, for
    operators that stream weights or a cache."""

    operator: str
    backend: str
    case: str
    error: float
    tolerance: float
    microseconds: float
    gigabytes_per_second: float
    fraction: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def check(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Iterator[Measurement]:
    """Yields one measurement per operator, backend and case as it is made. Inputs are fresh random
    numbers at every run."""
    target = torch.device(device)
    bandwidth = read_bandwidth(target)
    rng = torch.Generator(target)
    rng.seed()
    yield from _linears(target, dtype, rng, bandwidth)
    yield from _experts(target, dtype, rng, bandwidth)
    yield from _prologs(target, dtype, rng, bandwidth)
    yield from functions(target, dtype, rng, bandwidth)


def _backends(
    operator: str, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]
) -> list[str]:
    """Those that run the operator as its scheme says; the slow reference only where nothing else
    does, Triton's interpreter never: at these sizes it takes hours."""
    others = [
        name
        for name in BACKENDS
        if name not in BY_NAME_ONLY and (name, device.type) != ("triton", "cpu")
    ]
    usable = [
        name for name in others if why_unusable(operator, name, device, dtype, shapes) is None
    ]
    chosen = [
        name
        for name in usable
        if name not in ("reference", "expanded")
        or (name == "expanded" and operator.endswith("_dense"))
    ]
    return chosen or ["reference"]


def _linears(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    whole = device.type != "cpu"
    for grid in GRIDS:
        operator = f"linear_{grid.split('-')[0]}"
        for name, (n, k) in LINEARS.items():
            weight = random_weight(grid, n if whole else min(n, 1024), k, rng)
            for backend in _backends(operator, device, dtype, (shape(weight),)):
                linear = prepare(weight, backend=backend, dtype=dtype)
                for m in (1, 16, 128) if whole else (1, 16):
                    x = torch.randn(m, k, generator=rng, device=device).to(dtype)
                    sampled = rows(weight, 0, _SAMPLED_ROWS)
                    error = distance(linear(x)[:, :_SAMPLED_ROWS], exact_linear(x, sampled))
                    copies = [
                        prepare(weight, backend=backend, dtype=dtype)
                        for _ in range(copies_beyond_cache(linear.nbytes, device) - 1)
                    ]
                    calls = (
                        [_call(one, x) for one in (linear, *copies)]
                        if whole
                        else [_call(linear, x)]
                    )
                    seconds = seconds_per_call(calls, device)
                    yield _measured(
                        operator,
                        backend,
                        f"{name} M={m}",
                        error,
                        dtype,
                        seconds,
                        linear.nbytes,
                        bandwidth,
                    )


def _experts(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    whole = device.type != "cpu"
    count, intermediate, top_k = (EXPERTS, INTERMEDIATE, TOP_K) if whole else (4, 256, 2)
    shapes = ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
    for grid in (*GRIDS, NARROW):
        operator = f"experts_{grid.split('-')[0]}"
        few = [
            [
                random_weight(grid, n, k, rng)
                for n, k in (shapes[1][::-1], shapes[1][::-1], shapes[1])
            ]
            for _ in range(4)
        ]
        for backend in _backends(operator, device, dtype, shapes):
            if grid == NARROW and not getattr(module(backend), "NARROW_EXPERTS", False):
                continue
            builder = ExpertsBuilder(count, backend=backend, dtype=dtype, device=device)
            for index in range(count):
                builder.add(index, *few[index % 4])
            experts = builder.finish()
            for tokens in (1, 16, 64) if whole else (1, 8):
                x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
                ids = (
                    torch.rand(tokens, count, generator=rng, device=device)
                    .topk(top_k, dim=-1)
                    .indices
                )
                weights = torch.rand(tokens, top_k, generator=rng, device=device)
                error = distance(experts(x, ids, weights), exact_experts(x, ids, weights, few))
                seconds = seconds_per_call([_call(experts, x, ids, weights)], device)
                nbytes = experts.nbytes * ids.unique().numel() // count
                name = f"{'W4A8 ' if grid == NARROW else ''}E={count} T={tokens}"
                yield _measured(operator, backend, name, error, dtype, seconds, nbytes, bandwidth)


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, few: list[list[Weight]]) -> Tensor:
    """In float64; expert e has the weights few[e % 4]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for index, (gate, up, down) in enumerate(few):
        share = (weights.double() * (ids % len(few) == index)).sum(dim=-1, keepdim=True)
        out += share * exact_expert(x, gate, up, down)
    return out


def _prologs(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    """One of eight ranks' share of a layer, against the reference on float32 copies."""
    whole, tokens = device.type != "cpu", 8
    hidden, heads = (HIDDEN, 16) if whole else (1024, 2)
    for grid in ("int8", "dense"):
        q_a, q_b, kv_a = (
            random_weight(grid, n, k, rng)
            for n, k in ((1536, hidden), (heads * 192, 1536), (576, hidden))
        )
        kv_b = torch.randn(heads, 256, 512, generator=rng, device=device) / 512**0.5
        gains = [1 + 0.1 * torch.randn(size, generator=rng, device=device) for size in (1536, 512)]
        kv_b, gains = kv_b.to(dtype), [gain.to(dtype) for gain in gains]
        x, slots = (
            torch.randn(tokens, hidden, generator=rng, device=device).to(dtype),
            torch.arange(tokens, device=device),
        )
        # Angles that 16 bits hold: an operator may want them so.
        angles = [
            table.to(dtype).float()
            for table in _angles(torch.rand(tokens, 32, generator=rng, device=device) * 6)
        ]
        wide = MlaWeights(q_a, q_b, kv_a, kv_b.float(), *(gain.float() for gain in gains))
        exact = _prolog_results(wide, x.float(), angles, slots, "reference")[1]
        for backend in _backends("mla_prolog", device, dtype, ()):
            weights = MlaWeights(q_a, q_b, kv_a, kv_b, gains[0], gains[1])
            prolog, found = _prolog_results(weights, x, angles, slots, backend)
            error = max(
                distance(one, other.double()) for one, other in zip(found[0], exact[0], strict=True)
            )
            copies = [
                _prolog_results(weights, x, angles, slots, backend)
                for _ in range(copies_beyond_cache(prolog.nbytes, device) - 1)
            ]
            calls = [
                _call(one.query, *arguments) for one, (_, arguments) in ((prolog, found), *copies)
            ]
            seconds = seconds_per_call(calls, device)
            yield _measured(
                "mla_prolog",
                backend,
                f"{grid} heads={heads} T={tokens}",
                error,
                dtype,
                seconds,
                prolog.nbytes,
                bandwidth,
            )


def _prolog_results(
    weights: MlaWeights, x: Tensor, angles: list[Tensor], slots: Tensor, backend: str
) -> tuple[MlaProlog, tuple[tuple[Tensor, ...], tuple[Any, ...]]]:
    """A backend's prolog; what it computes, channels in pairs; and the arguments it was called
    with."""
    prolog = prepare_mla_prolog(weights, 64, eps=1e-6, backend=backend, dtype=x.dtype)
    rotation, cache = _laid_out(
        angles[0], angles[1], torch.zeros(1, 128, 576, dtype=x.dtype, device=x.device), backend
    )
    absorbed, q_pe = prolog.query(x, rotation, cache, slots)
    if isinstance(cache, Tensor):
        latents, keys = cache.split([512, 64], dim=-1)
    else:
        latents, keys, q_pe = cache[0], pairs_together(cache[1]), pairs_together(q_pe)
    return prolog, (
        (absorbed, q_pe, latents[0, : len(x)], keys[0, : len(x)]),
        (x, rotation, cache, slots),
    )


def _laid_out(cos: Tensor, sin: Tensor, cache: Tensor, backend: str) -> tuple[Rotation, Latents]:
    """Angles and cache of R1's sizes as a backend reads them."""
    reader = (
        "auto" if why_unusable("mla_decode", backend, cache.device) else backend
    )  # the decode operator defines the cache layout
    if len(cache_layout(512, 64, cache.dtype, cache.device, backend=reader).widths) == 1:
        return Rotation(cos, sin), cache
    return Rotation(*doubled_angles(cos, sin, cache.dtype)), split_latents(cache, 512, True)


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


def functions(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    """The operators without packed weights."""
    for case in (
        *_small_cases(device, dtype, rng),
        *_attention_cases(device, dtype),
        *_grouped_cases(device, dtype, rng),
        _latent_prompt(device, dtype),
    ):
        for backend in _backends(case.operator, device, dtype, ()):
            calls = case.calls(backend)
            error = max(
                distance(out, exact) for out, exact in zip(calls[0](), case.exact, strict=True)
            )
            seconds = seconds_per_call(calls, device)
            yield _measured(
                case.operator, backend, case.name, error, dtype, seconds, case.nbytes, bandwidth
            )


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
        *_angles(angles),
    )
    slots = torch.arange(tokens, device=device)

    gains, tables, qkv_a = (
        (random(1536), random(512)),
        _angles(angles[:tokens]),
        random(tokens, 2112),
    )

    def prepare_and_look(
        one: Tensor, two: tuple[Tensor, Tensor], backend: str
    ) -> Callable[[], tuple[Tensor, ...]]:
        rotation, cache = _laid_out(
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
                rotation, cache = _laid_out(
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
    rotation = Rotation(*_angles(angles))

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
    angles = _angles(torch.rand(2 * new, 32, device=device) * 6)
    q, kv_b = (
        torch.randn(2 * new, heads, 192, device=device).to(dtype),
        (torch.randn(heads, 256, 512, device=device) / 512**0.5).to(dtype),
    )
    cache, both = (
        torch.randn(blocks.numel(), 128, 576, device=device).to(dtype),
        prompts.Prompts.of(spans, blocks),
    )

    def attend(query: Tensor, weight: Tensor, cached: Tensor, backend: str) -> tuple[Tensor, ...]:
        laid_out = _laid_out(*angles, cached, backend)[1]
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


def _angles(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.cos(), values.sin()


def _results(
    run: Callable[..., Tensor | tuple[Tensor, ...]], first: int, *inputs: Any, **how: Any
) -> tuple[Tensor, ...]:
    found = run(*inputs, **how)
    return (found,) if isinstance(found, Tensor) else found[first:]


def _call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _measured(
    operator: str,
    backend: str,
    case: str,
    error: float,
    dtype: torch.dtype,
    seconds: float,
    nbytes: int,
    bandwidth: float,
) -> Measurement:
    # An int8 step is 1/127 of a row's largest value: what is rounded twice may fall either way.
    tolerance = 2e-2 if operator in ("experts_int8", "mla_prolog") else TOLERANCE[dtype]
    rate = nbytes / seconds
    return Measurement(
        operator, backend, case, error, tolerance, seconds * 1e6, rate / 1e9, rate / bandwidth
    )
