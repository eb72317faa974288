"""The operators of functional.py in plain torch, float32 inside. Arguments arrive checked."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.codes import CodedLatents, store_latents
from quantkit_kernels.gating import Gating, sigmoid, softplus
from quantkit_kernels.hadamard import block_hadamard
from quantkit_kernels.linear import round_to_mx
from quantkit_kernels.paged import (
    CacheLayout,
    Latents,
    Norms,
    PagedLatents,
    Rotation,
    entries,
    parts_of,
)
from quantkit_kernels.routing import Routing


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gate_and_mul(x: Tensor, gating: Gating) -> Tensor:
    return gating(*x.chunk(2, dim=-1))


def gate_and_rotate(x: Tensor, gating: Gating, block: int) -> Tensor:
    return block_hadamard(gating(*x.float().chunk(2, dim=-1)), block).to(x.dtype)


def mx_rounded(x: Tensor, bits: int) -> Tensor:
    levels, scales = round_to_mx(x, bits)
    return levels.mul_(scales.unsqueeze(-1)).flatten(-2).to(x.dtype)


def likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    gate = sigmoid(logits[:, routing.n_routed_experts :].float())
    logits = logits[:, : routing.n_routed_experts]
    scores = _SCORES[routing.scoring_func](logits.float())
    wanted = scores if bias is None else scores + bias
    if routing.topk_group < routing.n_group:
        groups = wanted.unflatten(1, (routing.n_group, -1))
        kept = groups.topk(2, dim=-1).values.sum(dim=-1).topk(routing.topk_group, dim=-1).indices
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, kept, False
        )
        # Minus infinity, not zero: with a negative bias a kept expert may score below zero.
        wanted = groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(wanted.shape)
    ids = wanted.topk(routing.num_experts_per_tok, dim=-1).indices
    weights = _weights(scores, ids, routing)
    ids, weights = with_shared(ids, weights, logits.shape[1], routing.num_joined_experts)
    if routing.joined_gate:
        weights[:, -1:] = gate
    return ids, weights


def route_chosen(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    return _weights(_SCORES[routing.scoring_func](logits.float()), ids, routing)


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid,
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sqrtsoftplus": lambda logits: softplus(logits).sqrt(),
}


def _weights(scores: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    weights = scores.gather(1, ids)
    if routing.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routing.routed_scaling_factor


def with_shared(
    ids: Tensor, weights: Tensor, experts: int, num_shared: int
) -> tuple[Tensor, Tensor]:
    """The routing with the shared experts' columns."""
    if num_shared == 0:
        return ids, weights
    for expert in range(experts, experts + num_shared):
        ids = F.pad(ids, (0, 1), value=expert)
    return ids, F.pad(weights, (0, num_shared), value=1.0)


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    return route(float32_linear(x, router), bias, routing)


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return rotated(x, Rotation(cos[positions], sin[positions], interleaved))


def rotary_angles(
    positions: Tensor, frequencies: Tensor, factor: float, group: int
) -> tuple[Tensor, Tensor]:
    firsts = positions if group == 1 else positions // group * group
    angles = firsts[:, None] * frequencies
    if factor == 1:  # NPUs compute by this: two launches fewer per decode step
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, D] by the angles of its tokens [T, D/2]; D may be 0."""
    if not x.shape[-1]:
        return x
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    if rotation.interleaved:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return (
            torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
            .flatten(-2)
            .to(x.dtype)
        )
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class AttentionSteps(NamedTuple):
    """What the operators of attention here are made of: another backend gives its own."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotated: Callable[[Tensor, Rotation], Tensor]


PLAIN = AttentionSteps(rms_norm, rotated)


def cache_layout(kv_lora: int, rope_dim: int, dtype: torch.dtype) -> CacheLayout:
    return CacheLayout((kv_lora + rope_dim,), 64)


def mla_prepare(
    qkv_a: Tensor,
    norms: Norms,
    rotation: Rotation,
    cache: Latents,
    slots: Tensor,
    steps: AttentionSteps = PLAIN,
    code_step: Tensor | None = None,
) -> Tensor:
    q_a, latent, k_pe = qkv_a.split(
        [norms.q.shape[0], norms.k.shape[0], 2 * rotation.cos.shape[1]], dim=-1
    )
    latent = steps.rms_norm(latent, norms.k, norms.eps)
    key = steps.rotated(k_pe.unsqueeze(1), rotation).squeeze(1)
    if isinstance(cache, CodedLatents):
        store_latents(cache, slots, latent, key, code_step)
    else:
        assert isinstance(cache, Tensor), "one tensor, as cache_layout says"
        cache.view(-1, cache.shape[2]).index_copy_(
            0, slots, torch.cat([latent, key], dim=-1).to(cache.dtype)
        )
    return steps.rms_norm(q_a, norms.q, norms.eps)


def mla_decode(
    q: Tensor, kv_b: Tensor, rotation: Rotation, pages: PagedLatents, scale: float
) -> Tensor:
    nope = q.shape[2] - 2 * rotation.cos.shape[1]
    query = torch.cat([absorbed(q[..., :nope], kv_b), rotated(q[..., nope:], rotation)], dim=-1)
    return values(attend(query, pages, scale, kv_b.shape[2]), kv_b, nope)


def attend(query: Tensor, pages: PagedLatents, scale: float, kv_lora_rank: int) -> Tensor:
    """query [B, heads, D], absorbed and rotated -> what the probabilities make of the latents [B,
    heads, kv_lora_rank]."""
    cache, block_table = pages.cache, pages.block_table
    assert isinstance(cache, Tensor | CodedLatents), "one tensor or codes, as cache_layout says"
    slots = torch.arange(block_table.shape[1] * parts_of(cache)[0].shape[1], device=query.device)
    valid = slots < pages.seq_lens.unsqueeze(1)  # [B, slots]
    # Slots past the end are zeroed, not only masked: a probability of 0 times a stored NaN would
    # still be NaN.
    latents = (
        entries(cache, block_table).flatten(1, 2).float().masked_fill(~valid.unsqueeze(-1), 0.0)
    )  # [B, slots, D]
    scores = (query.float() * scale) @ latents.transpose(1, 2)  # [B, heads, slots]
    masked = ~valid.unsqueeze(1)
    # The second mask turns the NaN of an empty row into zeros.
    probabilities = (
        scores.masked_fill(masked, float("-inf")).softmax(dim=-1).masked_fill(masked, 0.0)
    )
    return (probabilities @ latents[..., :kv_lora_rank]).to(query.dtype)


def absorbed(q_nope: Tensor, kv_b: Tensor) -> Tensor:
    """q_nope W_UK [B, heads, kv_lora]. q_nope [B, heads, N]; kv_b as `mla_decode` has it."""
    return torch.bmm(q_nope.transpose(0, 1), kv_b[:, : q_nope.shape[2]]).transpose(0, 1)


def values(attended: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """attended [B, heads, kv_lora] times W_UV [B, heads, V]."""
    return torch.bmm(attended.transpose(0, 1), kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)
