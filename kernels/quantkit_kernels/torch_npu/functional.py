"""The operators of functional.py over torch_npu's fused ones. Where an operator's rules exclude the arguments (a model smaller than those
it was made for), the plain torch of the reference runs on the NPU instead."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.functional import Choice
from quantkit_kernels.reference import functional as plain
from quantkit_kernels.torch_npu.calls import bind, call
from quantkit_kernels.torch_npu.rules import violated


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if violated("npu_rms_norm", bind("npu_rms_norm", (x, weight, eps), {})):
        return plain.rms_norm(x, weight, eps)
    result: Tensor = call("npu_rms_norm", x, weight, eps)[0]
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if violated("npu_add_rms_norm", bind("npu_add_rms_norm", (x, residual, weight, eps), {})):
        return plain.add_rms_norm(x, residual, weight, eps)
    normed, _, total = call("npu_add_rms_norm", x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return plain.silu_and_mul(x)
    result: Tensor = call("npu_swiglu", x.contiguous())
    return result


def route(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """npu_moe_gating_top_k divides sigmoid weights by their sum and softmax ones not; the other two cases are plain torch."""
    kwargs = {
        "bias": bias,
        "k_group": choice.topk_group,
        "group_count": choice.n_group,
        "group_select_mode": 1,
        "norm_type": 1 if choice.scoring == "sigmoid" else 0,
        "routed_scaling_factor": choice.routed_scaling_factor,
        "eps": 1e-20,
    }
    args = (logits.float(), choice.top_k)
    divides = choice.scoring == "sigmoid"
    if divides != choice.norm_topk_prob or violated("npu_moe_gating_top_k", bind("npu_moe_gating_top_k", args, kwargs)):
        return plain.route(logits, bias, choice)
    weights, ids, _ = call("npu_moe_gating_top_k", *args, **kwargs)
    return plain.with_shared(ids.long(), weights, logits.shape[1], choice.num_shared)


def moe_gate(x: Tensor, router: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    return route(F.linear(x.float(), router), bias, choice)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return turned(x, cos[positions], sin[positions], interleaved)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] by the angles of its tokens [T, D/2]: npu_rotary_mul, in float32 as the tables are; it wants each angle twice."""
    doubled = [angles.repeat_interleave(2, dim=-1) if interleaved else angles.repeat(1, 2) for angles in (cos, sin)]
    operator = "npu_rotary_mul"
    args = (x.float(), *(angles.unsqueeze(1) for angles in doubled), "interleave" if interleaved else "half")
    if x.numel() == 0 or violated(operator, bind(operator, args, {})):
        return plain.turned(x, cos, sin, interleaved)
    result: Tensor = call(operator, *args)
    return result.to(x.dtype)


def mla_prepare(
    qkv_a: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    q_a, latent, k_pe = qkv_a.split([q_norm.shape[0], kv_norm.shape[0], 2 * cos.shape[1]], dim=-1)
    entries = torch.cat([rms_norm(latent, kv_norm, eps), turned(k_pe.unsqueeze(1), cos, sin, interleaved).squeeze(1)], dim=-1)
    cache.view(-1, cache.shape[2]).index_copy_(0, slots, entries.to(cache.dtype))
    return rms_norm(q_a, q_norm, eps)


def mla_decode(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    interleaved: bool,
) -> Tensor:
    absorbed, q_pe = plain.absorbed(q, kv_b, cos), turned(q[..., -2 * cos.shape[1] :], cos, sin, interleaved)
    return plain.values(_attend(absorbed, q_pe, cache, block_table, seq_lens, scale), q, kv_b, cos)


def _attend(absorbed: Tensor, q_pe: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """Absorbed attention by npu_fused_infer_attention_score over gathered latents.

    The operator reads the latent and the rotary key from two contiguous tensors, so a row's blocks are gathered and split first, at
    twice the cache's traffic. A mask and not a list of lengths tells the end: lengths would have to come from the host, which a captured
    graph cannot wait for. Sizes of DeepSeek-V3 (512 + 64) go in as its latent and rotary parts; others as one vector of at most 512.
    """
    heads, kv_lora_rank = absorbed.shape[1:]
    latents = cache[block_table].flatten(1, 2).to(absorbed.dtype).unsqueeze(1)  # [B, 1, slots, D]
    past_end = torch.arange(latents.shape[2], device=q_pe.device) >= seq_lens.unsqueeze(1)  # [B, slots]
    # What is stored past the end may be NaN, which a mask alone would not stop.
    latents = latents.masked_fill(past_end[:, None, :, None], 0.0)
    kwargs = {
        "atten_mask": past_end[:, None, None, :],
        "num_heads": heads,
        "num_key_value_heads": 1,
        "scale": scale,
        "input_layout": "BNSD",
    }
    if kv_lora_rank == 512:
        query = absorbed
        latents, key_rope = (part.contiguous() for part in latents.split([kv_lora_rank, q_pe.shape[2]], dim=-1))
        kwargs |= {"query_rope": q_pe.unsqueeze(2).contiguous(), "key_rope": key_rope}
    else:
        query = torch.cat([absorbed, q_pe], dim=-1)
    operator = "npu_fused_infer_attention_score"
    args = (query.unsqueeze(2).contiguous(), latents, latents)
    if violated(operator, bind(operator, args, kwargs)):
        return plain.attend(torch.cat([absorbed, q_pe], dim=-1), cache, block_table, seq_lens, scale, kv_lora_rank)
    attended: Tensor = call(operator, *args, **kwargs)[0]
    # A row of length 0 attends to nothing: the operator does not say what it gives then.
    return attended.squeeze(2)[..., :kv_lora_rank].masked_fill((seq_lens == 0)[:, None, None], 0.0)
