"""The operators of functional.py over torch_npu's fused ones. Where an operator's rules exclude the
arguments (a model smaller than those it was made for), the plain torch of the reference runs on the
NPU instead."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quantkit_kernels.paged import (
    CacheLayout,
    Latents,
    Norms,
    PagedLatents,
    Rotation,
    pairs_together,
)
from quantkit_kernels.reference import functional as reference
from quantkit_kernels.routing import Routing
from quantkit_kernels.torch_npu.calls import bind, call
from quantkit_kernels.torch_npu.rule import HALVES
from quantkit_kernels.torch_npu.rules import violated

LATENT, ROPE = 512, 64
"""Sizes of DeepSeek-V3's latent and rotary key."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if violated("npu_rms_norm", bind("npu_rms_norm", (x, weight, eps), {})):
        return reference.rms_norm(x, weight, eps)
    result: Tensor = call("npu_rms_norm", x, weight, eps)[0]
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if violated("npu_add_rms_norm", bind("npu_add_rms_norm", (x, residual, weight, eps), {})):
        return reference.add_rms_norm(x, residual, weight, eps)
    normed, _, total = call("npu_add_rms_norm", x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return reference.silu_and_mul(x)
    result: Tensor = call("npu_swiglu", x.contiguous())
    return result


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    if not routing.is_common:
        return reference.route(logits, bias, routing)
    ids, weights = choose(logits, bias, routing)
    return reference.with_shared(ids, weights, logits.shape[1], routing.num_joined_experts)


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """`route` without the joined experts. npu_moe_gating_top_k divides sigmoid weights by their sum
    and softmax ones not; the other two cases are plain torch."""
    kwargs = {
        "bias": bias,
        "k_group": routing.topk_group,
        "group_count": routing.n_group,
        "group_select_mode": 1,
        "norm_type": 1 if routing.scoring_func == "sigmoid" else 0,
        "routed_scaling_factor": routing.routed_scaling_factor,
        "eps": 1e-20,
    }
    args = (logits.float(), routing.num_experts_per_tok)
    divides = routing.scoring_func == "sigmoid"
    if divides != routing.norm_topk_prob or violated(
        "npu_moe_gating_top_k", bind("npu_moe_gating_top_k", args, kwargs)
    ):
        return reference.route(logits, bias, replace(routing, num_joined_experts=0))
    weights, ids, _ = call("npu_moe_gating_top_k", *args, **kwargs)
    return ids, weights


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    return route(F.linear(x.float(), router), bias, routing)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return rotated(x, Rotation(cos[positions], sin[positions], interleaved))


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, D] by the angles of its tokens [T, D/2]: npu_rotary_mul, in float32 as the
    tables are; it wants each angle twice."""
    doubled = [
        angles.repeat_interleave(2, dim=-1) if rotation.interleaved else angles.repeat(1, 2)
        for angles in rotation[:2]
    ]
    operator = "npu_rotary_mul"
    args = (
        x.float(),
        *(angles.unsqueeze(1) for angles in doubled),
        "interleave" if rotation.interleaved else "half",
    )
    if x.numel() == 0 or violated(operator, bind(operator, args, {})):
        return reference.rotated(x, rotation)
    result: Tensor = call(operator, *args)
    return result.to(x.dtype)


STEPS = reference.AttentionSteps(rms_norm, rotated)


def cache_layout(kv_lora: int, rope_dim: int, dtype: torch.dtype) -> CacheLayout:
    """In two tensors at DeepSeek-V3's sizes, which are the only ones its operators have. Blocks of
    128 suit every one of them."""
    apart = (kv_lora, rope_dim) == (LATENT, ROPE) and dtype in HALVES
    return CacheLayout((kv_lora, rope_dim) if apart else (kv_lora + rope_dim,), 128)


def mla_prepare(
    qkv_a: Tensor, norms: Norms, rotation: Rotation, cache: Latents, slots: Tensor
) -> Tensor:
    if isinstance(cache, Tensor):
        return reference.mla_prepare(qkv_a, norms, rotation, cache, slots, STEPS)
    q_a, kv = qkv_a.split([norms.q.shape[0], LATENT + ROPE], dim=-1)
    if not rotation.interleaved:  # the operator takes pairs of neighbours
        kv = torch.cat([kv[:, :LATENT], pairs_together(kv[:, LATENT:])], dim=-1)
    latents, keys = (part.unsqueeze(2) for part in cache)
    rows = kv.contiguous()[:, None, None]
    call(
        "npu_kv_rmsnorm_rope_cache",
        rows,
        norms.k,
        *_four(rotation),
        slots,
        keys,
        latents,
        epsilon=norms.eps,
        cache_mode="PA",
    )
    return rms_norm(q_a, norms.q, norms.eps)


def mla_decode(
    q: Tensor, kv_b: Tensor, rotation: Rotation, pages: PagedLatents, scale: float
) -> Tensor:
    nope = q.shape[2] - (2 * rotation.cos.shape[1] if isinstance(pages.cache, Tensor) else ROPE)
    w_uk, w_uv = absorbed_weights(kv_b, nope)
    absorbed, q_pe = by_head(q[..., :nope], w_uk, order=[1, 0, 2]), q[..., nope:]
    if isinstance(pages.cache, Tensor):
        q_pe = rotated(q_pe, rotation)
    else:
        neighbours = (
            (q_pe if rotation.interleaved else pairs_together(q_pe)).unsqueeze(2).contiguous()
        )
        q_pe = call("npu_interleave_rope", neighbours, *_four(rotation)).squeeze(2)
    return values(attend(absorbed, q_pe, pages, scale), w_uv)


_ABSORBED = WeakTensorKeyDictionary()


def absorbed_weights(kv_b: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """W_UK [heads, nope, kv_lora] and W_UV [heads, kv_lora, V], contiguous: aclnn copies a weight
    that is not, at every call. Made once for a kv_b, where a layer is prepared or its first prompt
    computed, before the cache is given its memory."""
    if kv_b not in _ABSORBED:
        _ABSORBED[kv_b] = (
            kv_b[:, :nope].contiguous(),
            kv_b[:, nope:].transpose(1, 2).contiguous(),
        )
    w_uk, w_uv = _ABSORBED[kv_b]
    return w_uk, w_uv


def values(attended: Tensor, w_uv: Tensor) -> Tensor:
    """attended [heads, B, kv_lora] times W_UV -> [B, heads, V]."""
    return by_head(attended, w_uv, order=[0, 1, 2])


def by_head(x: Tensor, weight: Tensor, order: list[int]) -> Tensor:
    """x times each head's weight [heads, K, N] -> [T, heads, N], tokens first in the same launch.
    order: how x becomes [heads, T, K]."""
    operator, permuted = (
        "npu_transpose_batchmatmul",
        {"perm_x1": order, "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]},
    )
    if violated(operator, bind(operator, (x, weight), permuted)):
        return torch.bmm(x.permute(order), weight).transpose(0, 1)
    result: Tensor = call(operator, x, weight, **permuted)
    return result


def attend(absorbed: Tensor, q_pe: Tensor, pages: PagedLatents, scale: float) -> Tensor:
    """Absorbed attention by npu_fused_infer_attention_score_v2 over the blocks where they lie:
    absorbed [B, heads, kv_lora], q_pe [B, heads, R] in the cache's order of channels -> [heads, B,
    kv_lora], as the product with W_UV takes it.

    A cache in two tensors goes in as DeepSeek-V3's latent and rotary parts, and comes out heads
    first as vllm-ascend asks for it (BNSD_NBSD); one in one tensor as keys of at most 512, whose
    first channels are the values. The lengths are the host's: a captured graph receives them before
    each replay (accelerator.py).
    """
    cache, block_table, seq_lens, lengths = pages
    operator = "npu_fused_infer_attention_score_v2"
    heads, kv_lora = absorbed.shape[1:]
    known = list(seq_lens.tolist() if lengths is None else lengths)
    kwargs = {
        "block_table": block_table.to(torch.int32),
        "actual_seq_kvlen": known,
        "num_query_heads": heads,
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "input_layout": "BNSD",
    }
    if isinstance(cache, Tensor):
        query, keys = torch.cat([absorbed, q_pe], dim=-1), cache.unsqueeze(1)
    else:
        query, keys = absorbed, cache[0].unsqueeze(1)
        kwargs |= {
            "query_rope": q_pe.unsqueeze(2).contiguous(),
            "key_rope": cache[1].unsqueeze(1),
            "input_layout": "BNSD_NBSD",
        }
    kwargs["block_size"] = keys.shape[2]
    args = (query.unsqueeze(2).contiguous(), keys, keys)
    if isinstance(cache, Tensor) and violated(operator, bind(operator, args, kwargs)):
        return reference.attend(query, pages, scale, kv_lora).transpose(0, 1)
    attended: Tensor = call(operator, *args, **kwargs)[0].squeeze(2)
    heads_first = attended[..., :kv_lora].transpose(0, 1) if isinstance(cache, Tensor) else attended
    # A row of length 0 attends to nothing: the manual does not say what the operator gives then.
    return heads_first if all(known) else heads_first.masked_fill((seq_lens == 0)[:, None], 0.0)


def _four(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Doubled angles [T, R] as the operators want them, [T, 1, 1, R]."""
    return rotation.cos[:, None, None], rotation.sin[:, None, None]
