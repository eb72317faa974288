"""Random weights of every grid, and the exact results to hold an operator against: what the check,
the benchmark and the tests share."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.codes import (
    CodedKeys,
    CodedLatents,
    KeyValues,
    empty_keys,
    empty_latents,
    store_keys,
    store_latents,
)
from quantkit_kernels.linear import (
    E2M1_MAX,
    E4M3_MAX,
    quantize_rows,
    round_to_mx,
    round_to_nvfp4,
)
from quantkit_kernels.paged import PagedKeys, PagedLatents, Rotation, by_slot, entries
from quantkit_kernels.prompts import Prompts
from quantkit_kernels.reference.grouped import picked
from quantkit_kernels.weights import (
    W8A16,
    Dense,
    DenseMx4,
    DenseMx8,
    Fp4,
    Fp4Mx4,
    Int4,
    Int4Int8,
    Int8,
    MxInputs,
    NarrowInt8,
    Weight,
    dequantize,
)

GRIDS = (
    *("int4-asym-32", "int4-asym-64", "int4-asym-128", "int4-sym-128"),
    *("int8", "w8a16-32", "w8a16-128", "w8a16-channel", "fp4", "dense"),
)
MX_GRIDS = {"fp4-mx4": Fp4Mx4, "dense-mx4": DenseMx4, "dense-mx8": DenseMx8}
"""Whose inputs are rounded to MXFP4 or MXFP8, by the grid of the weight and the bits."""
# By norm ratio: what rounding of the result, and inside 16-bit operators of operands and scales
# too, explains.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_weight(grid: str, n: int, k: int, rng: torch.Generator) -> Weight:
    """A weight W[n, k] whose product with unit activations is about one, with every code in use. It
    lives on the generator's device.

    grid: one of GRIDS or MX_GRIDS, "int8-narrow", or "fp4-w4a4", whose inputs are rounded for
    values up to 4.
    """
    device = rng.device
    if grid in MX_GRIDS:
        return MX_GRIDS[grid](*random_weight(grid.partition("-")[0], n, k, rng))
    if grid == "dense":
        return Dense(torch.randn(n, k, generator=rng, device=device) / k**0.5)
    if grid == "int8":
        scale = (0.5 + torch.rand(n, 1, generator=rng, device=device)) / (70 * k**0.5)
        return Int8(
            torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=rng, device=device), scale
        )
    if grid.startswith("w8a16"):
        group = grid.removeprefix("w8a16-")
        groups = 1 if group == "channel" else k // int(group)
        scale = (0.5 + torch.rand(n, groups, generator=rng, device=device)) / (70 * k**0.5)
        return W8A16(
            torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=rng, device=device), scale
        )
    if grid == "int8-narrow":
        scale = (0.5 + torch.rand(n, 1, generator=rng, device=device)) / (5 * k**0.5)
        return NarrowInt8(
            torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=rng, device=device), scale
        )
    if grid in ("fp4", "fp4-w4a4"):
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng, device=device)
        scale = (0.25 + 3 * torch.rand(n, k // 16, generator=rng, device=device)).to(
            torch.float8_e4m3fn
        )
        divisor = (
            torch.tensor(E2M1_MAX * E4M3_MAX / 4, device=device) if grid == "fp4-w4a4" else None
        )
        return Fp4(codes, scale, torch.tensor(0.2 / k**0.5, device=device), divisor)
    _, symmetry, group = grid.split("-")
    groups = k // int(group)
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=rng, device=device)
    scale = (0.5 + torch.rand(n, groups, generator=rng, device=device)) / (5 * k**0.5)
    zero_point = None
    if symmetry == "asym":
        zero_point = torch.randint(
            -8, 8, (n, groups), dtype=torch.int8, generator=rng, device=device
        )
    return Int4(codes, scale, zero_point)


def exact_linear(x: Tensor, weight: Weight) -> Tensor:
    """x[M, K] @ W.T in float64, from the values that the codes represent, over activations rounded
    as the operator states."""
    if isinstance(weight, (Int8, Int4Int8)):
        codes, scale = quantize_rows(x)
        return (codes.double() * scale.double()) @ dequantize(weight, torch.float64).T
    if isinstance(weight, MxInputs):
        levels, scales = round_to_mx(x, weight.input_bits)
        x = (levels.double() * scales.double().unsqueeze(-1)).flatten(-2)
    elif isinstance(weight, Fp4) and weight.input_divisor is not None:
        levels, scales = round_to_nvfp4(x, weight.input_divisor)
        x = (levels.double() * scales.double().unsqueeze(-1)).flatten(
            -2
        ) / weight.input_divisor.double()
    return x.double() @ dequantize(weight, torch.float64).T


def exact_expert(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """One expert over x[M, H] in float64; what enters `down` is rounded to x's dtype, as an
    operator's intermediate is."""
    between = torch.nn.functional.silu(exact_linear(x, gate)) * exact_linear(x, up)
    return exact_linear(between.to(x.dtype), down)


def distance(out: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of `exact`; infinite where `out` holds NaN."""
    assert out.shape == exact.shape, (out.shape, exact.shape)
    ratio = (
        torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact)
    ).item()
    return ratio if ratio == ratio else float("inf")


class LatentAttention(NamedTuple):
    """One call of mla_decode, its positional arguments, and what it must give, float64."""

    arguments: tuple[Tensor, Tensor, Rotation, PagedLatents]
    scale: float
    exact: Tensor


def latent_attention(
    lengths: list[int],
    heads: int,
    block_size: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    interleaved: bool = True,
    codes: torch.dtype | None = None,
) -> LatentAttention:
    """Random rows of these lengths over scattered blocks, one table twice as wide as needed;
    whatever belongs to no token is NaN.

    sizes: of a head's part without position, of its rotary part, of its value, of the latent. Cache
    and probabilities are of `dtype`, but
    bfloat16 with float32. codes: of a cache in 8 bits, whose tokens differ in size; what must be
    given is of the values of the codes.
    """
    nope, rope_dim, value, latent = sizes
    rows, width = len(lengths), latent + rope_dim
    max_blocks = max(1, -(-max(lengths) // block_size))
    blocks = (torch.randperm(rows * max_blocks, device=device) + 1).view(rows, max_blocks)
    cache = torch.full((rows * max_blocks + 1, block_size, width), float("nan"), device=device)
    cache = cache.to(torch.bfloat16 if dtype == torch.float32 else dtype)
    q = torch.randn(rows, heads, nope + rope_dim, device=device).to(dtype)
    kv_b = (torch.randn(heads, nope + value, latent, device=device) * latent**-0.5).to(dtype)
    angles = torch.rand(rows, rope_dim // 2, device=device) * 6
    scale = (nope + rope_dim) ** -0.5
    exact = torch.zeros(rows, heads, value, dtype=torch.float64, device=device)
    up_k, up_v = kv_b.double().split([nope, value], dim=1)
    for row, length in enumerate(lengths):
        tokens = torch.arange(length, device=device)
        stored = torch.randn(length, width, device=device) * _sizes(length, 1, codes, device)
        cache[blocks[row, tokens // block_size], tokens % block_size] = stored.to(cache.dtype)
    laid_out = cache if codes is None else code_latents(cache, latent, codes)
    for row, length in enumerate(lengths):
        tokens = torch.arange(length, device=device)
        seen = entries(
            by_slot(laid_out), blocks[row, tokens // block_size] * block_size + tokens % block_size
        ).double()
        if length:
            absorbed = torch.einsum("hn,hnl->hl", q[row, :, :nope].double(), up_k)
            rotated = _rotated(q[row, :, nope:].double(), angles[row].double(), interleaved)
            probabilities = (torch.cat([absorbed, rotated], dim=-1) @ seen.T * scale).softmax(-1)
            exact[row] = torch.einsum("hl,hvl->hv", probabilities @ seen[:, :latent], up_v)
    table = torch.cat([blocks, torch.zeros_like(blocks)], dim=1).int()
    rotation, pages = (
        Rotation(angles.cos(), angles.sin(), interleaved),
        PagedLatents(laid_out, table, torch.tensor(lengths, device=device)),
    )
    return LatentAttention((q, kv_b, rotation, pages), scale, exact)


def code_latents(cache: Tensor, kv_lora: int, codes: torch.dtype) -> CodedLatents:
    """A cache in one tensor as codes."""
    room = empty_latents(
        (cache.shape[0], cache.shape[1]),
        kv_lora,
        cache.shape[2] - kv_lora,
        codes,
        cache.dtype,
        cache.device,
    )
    flat = cache.flatten(0, 1)
    store_latents(
        room, torch.arange(len(flat), device=cache.device), flat[:, :kv_lora], flat[:, kv_lora:]
    )
    return room


def code_keys(keys: Tensor, values: Tensor, codes: torch.dtype) -> CodedKeys:
    """Keys and values as codes."""
    room = empty_keys(tuple(keys.shape), codes, keys.device)
    store_keys(
        room,
        torch.arange(keys.shape[0] * keys.shape[1], device=keys.device),
        keys.flatten(0, 1),
        values.flatten(0, 1),
    )
    return room


def _sizes(
    tokens: int, dims: int, codes: torch.dtype | None, device: str | torch.device
) -> Tensor | float:
    """What tokens [tokens, ..] are multiplied with where their scales are to differ."""
    return 1.0 if codes is None else torch.randn(tokens, *[1] * dims, device=device).mul(0.5).exp()


def _rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [heads, D] by angles [D/2]."""
    first, second = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    sides = (
        first * angles.cos() - second * angles.sin(),
        first * angles.sin() + second * angles.cos(),
    )
    return torch.stack(sides, dim=-1).flatten(-2) if interleaved else torch.cat(sides, dim=-1)


class GroupedAttention(NamedTuple):
    """Queries of the last `news[b]` tokens of each sequence, one sequence after the other; their
    cache; and what they attend to, float64.

    For one query a row: `gqa_decode(q, pages)`; else `gqa_prefill(q, pages.cache, prompts)`.
    """

    q: Tensor
    pages: PagedKeys
    prompts: Prompts
    scale: float
    exact: Tensor


def grouped_attention(
    lengths: list[int],
    news: list[int],
    heads: tuple[int, int],
    width: int,
    block_size: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    window: int = 0,
    sinks: Tensor | None = None,
    codes: torch.dtype | None = None,
) -> GroupedAttention:
    """Random sequences of these lengths over scattered blocks, one table twice as wide as needed;
    whatever belongs to no token is NaN.

    heads: of queries, of keys. The cache is of `dtype`, but bfloat16 with float32. codes: as
    `latent_attention`.
    """
    kv_heads, rows = heads[1], len(lengths)
    max_blocks = max(1, -(-max(lengths) // block_size))
    blocks = (torch.randperm(rows * max_blocks, device=device) + 1).view(rows, max_blocks)
    shape = (rows * max_blocks + 1, block_size, kv_heads, width)
    keys, values = (
        torch.full((2, *shape), float("nan"), device=device)
        .to(torch.bfloat16 if dtype == torch.float32 else dtype)
        .unbind()
    )
    q, scale = torch.randn(sum(news), heads[0], width, device=device).to(dtype), width**-0.5
    exact = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for table, length in zip(blocks, lengths):
        tokens = torch.arange(length, device=device)
        for side in (keys, values):
            stored = torch.randn(length, kv_heads, width, device=device) * _sizes(
                length, 2, codes, device
            )
            side[table[tokens // block_size], tokens % block_size] = stored.to(side.dtype)
    cache: KeyValues = (keys, values) if codes is None else code_keys(keys, values, codes)
    row = 0
    for table, length, new in zip(blocks, lengths, news):
        tokens = torch.arange(length, device=device)
        at = (table[tokens // block_size], tokens % block_size)
        k, v = (
            side.double().repeat_interleave(heads[0] // kv_heads, dim=1).transpose(0, 1)
            for side in picked(cache, at)
        )
        ages = tokens[length - new :, None] - tokens
        hidden = (ages < 0) | (ages >= (window or length + 1))
        part = slice(row, row + new)
        if length:
            scores = (q[part].double().transpose(0, 1) @ k.mT * scale).masked_fill(
                hidden, float("-inf")
            )
            if sinks is not None:
                scores = torch.cat(
                    [scores, sinks.double().view(-1, 1, 1).expand(-1, new, 1)], dim=-1
                )
            exact[part] = (scores.softmax(-1)[..., :length] @ v).transpose(0, 1)
        row += new
    table = torch.cat([blocks, torch.zeros_like(blocks)], dim=1).int()
    prompts = Prompts.of([(length - new, new) for length, new in zip(lengths, news)], table)
    scales = cache.scales if isinstance(cache, CodedKeys) else None
    pages = PagedKeys(*cache[:2], table, torch.tensor(lengths, device=device), scales=scales)
    return GroupedAttention(q, pages, prompts, scale, exact)
