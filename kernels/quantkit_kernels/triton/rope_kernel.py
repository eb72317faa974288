# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Rotary embedding, and what attention does before it: norms, rotation, and writing to the cache.
Arithmetic is float32."""

import triton
import triton.language as tl

from quantkit_kernels.triton.codes_kernel import encoded, scale_of
from quantkit_kernels.triton.weights_kernel import rounded, wait_for_input


@triton.jit
def partner_of(channel, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other channel of a pair, the pair's number, and 1 for the first channel, which loses what
    the second gains: -1."""
    if INTERLEAVED:
        first = channel % 2 == 0
        partner = tl.where(first, channel + 1, channel - 1)
        pair = channel // 2
    else:
        first = channel < R // 2
        partner = tl.where(first, channel + R // 2, channel - R // 2)
        pair = tl.where(first, channel, channel - R // 2)
    return partner, pair, tl.where(first, -1.0, 1.0)


@triton.jit
def rope(
    x, positions, cosines, sines, y, heads, token_stride, head_stride,
    R: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x [T, heads, R] rotated to y, contiguous. WIDTH: a power of two, at least R."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    partner, pair, sign = partner_of(channel, R, INTERLEAVED)
    inside = (head[:, None] < heads) & (channel[None, :] < R)
    angle = tl.load(positions + token).to(tl.int64) * (R // 2) + pair
    cosine = tl.load(cosines + angle, mask=channel < R, other=0.0)
    sine = tl.load(sines + angle, mask=channel < R, other=0.0) * sign
    row = x + token * token_stride + head[:, None] * head_stride
    one = tl.load(row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    to = y + (token * heads + head[:, None]) * R + channel[None, :]
    tl.store(
        to, rounded(one * cosine[None, :] + other * sine[None, :], y.dtype.element_ty), mask=inside
    )


@triton.jit
def rotary_angles(
    positions, frequencies, cosines, sines, angles, group, factor,
    PAIRS: tl.constexpr, ANGLES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per ANGLES of all tokens' angles."""
    wait_for_input(PDL)
    at = tl.program_id(0) * ANGLES + tl.arange(0, ANGLES)
    inside = at < angles
    position = tl.load(positions + at // PAIRS, mask=inside, other=0) // group * group
    frequency = tl.load(frequencies + at % PAIRS, mask=inside, other=0.0)
    angle = position.to(tl.float32) * frequency
    tl.store(cosines + at, tl.cos(angle) * factor, mask=inside)
    tl.store(sines + at, tl.sin(angle) * factor, mask=inside)


@triton.jit
def mla_prepare(
    qkv_a, q_norm, k_norm, cosines, sines, slots, q_a, latents, keys, scales, latent_token,
    key_token, eps, largest_key,
    Q: tl.constexpr, K: tl.constexpr, R: tl.constexpr, Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr, R_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and half: the query part normed to q_a; the latent normed and the rotary
    key rotated, to the token's slot. Slots are latent_token numbers of `latents` apart, key_token
    of `keys`. CODES: codes_kernel.py; then keys are divided by their token's scale, and are no
    larger than largest_key."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = qkv_a + token * (Q + K + R)
    TYPE: tl.constexpr = qkv_a.dtype.element_ty
    if tl.program_id(1) == 0:
        at = tl.arange(0, Q_WIDTH)
        some = tl.load(row + at, mask=at < Q, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(some * some, 0) / Q + eps)
        gain = tl.load(q_norm + at, mask=at < Q, other=0.0).to(tl.float32)
        tl.store(q_a + token * Q + at, rounded(some * factor * gain, TYPE), mask=at < Q)
    else:
        slot = tl.load(slots + token)
        place = tl.arange(0, K_WIDTH)
        latent = tl.load(row + Q + place, mask=place < K, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / K + eps)
        latent *= tl.load(k_norm + place, mask=place < K, other=0.0).to(tl.float32)
        latent = rounded(latent, TYPE).to(tl.float32)
        channel = tl.arange(0, R_WIDTH)
        partner, pair, sign = partner_of(channel, R, INTERLEAVED)
        angle = token * (R // 2) + pair
        cosine = tl.load(cosines + angle, mask=channel < R, other=0.0)
        sine = tl.load(sines + angle, mask=channel < R, other=0.0) * sign
        one = tl.load(row + Q + K + channel, mask=channel < R, other=0.0).to(tl.float32)
        other = tl.load(row + Q + K + partner, mask=channel < R, other=0.0).to(tl.float32)
        rotated = rounded(one * cosine + other * sine, TYPE).to(tl.float32)
        if CODES:
            scale = tl.maximum(
                scale_of(tl.max(tl.abs(latent), 0), CODES),
                tl.div_rn(tl.max(tl.abs(rotated), 0), largest_key),
            )
            tl.store(
                latents + slot * latent_token + place, encoded(latent, scale, CODES), mask=place < K
            )
            rotated = tl.div_rn(rotated, scale)
            tl.store(scales + slot, scale)
        else:
            tl.store(
                latents + slot * latent_token + place,
                rounded(latent, latents.dtype.element_ty),
                mask=place < K,
            )
        tl.store(
            keys + slot * key_token + channel,
            rounded(rotated, keys.dtype.element_ty),
            mask=channel < R,
        )


@triton.jit
def gqa_prepare(
    qkv, q_norm, k_norm, cosines, sines, slots, q, keys, values, key_scales, value_scales, heads,
    kv_heads, eps,
    D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr, CODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and head, of queries, keys and values. D: a head's channels, of which the
    first R turn; WIDTH: a power of two.
    CODES: codes_kernel.py."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    TYPE: tl.constexpr = qkv.dtype.element_ty
    channel = tl.arange(0, WIDTH)
    inside = channel < D
    row = qkv + token * (heads + 2 * kv_heads) * D + head * D
    one = tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    if head >= heads + kv_heads:
        store_head(
            one, values, value_scales, slot * kv_heads + head - heads - kv_heads, channel, D, CODES
        )
    else:
        partner, pair, sign = partner_of(channel, R, INTERLEAVED)
        turns = channel < R
        other = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            factor = tl.rsqrt(tl.sum(one * one, 0) / D + eps)
            gains = k_norm
            if head < heads:
                gains = q_norm
            one = rounded(
                one * factor * tl.load(gains + channel, mask=inside, other=0.0).to(tl.float32), TYPE
            ).to(tl.float32)
            other = rounded(
                other * factor * tl.load(gains + partner, mask=turns, other=0.0).to(tl.float32),
                TYPE,
            ).to(tl.float32)
        angle = token * (R // 2) + pair
        cosine = tl.load(cosines + angle, mask=turns, other=1.0)
        sine = tl.load(sines + angle, mask=turns, other=0.0) * sign
        rotated = rounded(one * cosine + other * sine, TYPE)
        if head < heads:
            tl.store(q + (token * heads + head) * D + channel, rotated, mask=inside)
        else:
            store_head(
                rotated.to(tl.float32),
                keys,
                key_scales,
                slot * kv_heads + head - heads,
                channel,
                D,
                CODES,
            )


@triton.jit
def store_head(some, side, scales, place, channel, D: tl.constexpr, CODES: tl.constexpr):
    """A head's numbers, float32 and zeros from D on, to its place among the heads of a cache's
    side."""
    if CODES:
        scale = scale_of(tl.max(tl.abs(some), 0), CODES)
        tl.store(side + place * D + channel, encoded(some, scale, CODES), mask=channel < D)
        tl.store(scales + place, scale)
    else:
        tl.store(side + place * D + channel, rounded(some, side.dtype.element_ty), mask=channel < D)
