"""The operators of functional.py over torch_npu's fused ones. Where an operator's rules exclude the arguments (a model smaller than those
it was made for), the plain torch of the reference runs on the NPU instead."""

import torch
from torch import Tensor

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


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """npu_moe_gating_top_k divides sigmoid weights by their sum and softmax ones not; the other two cases are plain torch."""
    kwargs = {
        "bias": bias,
        "k_group": topk_group,
        "group_count": n_group,
        "group_select_mode": 1,
        "norm_type": 1 if scoring == "sigmoid" else 0,
        "routed_scaling_factor": routed_scaling_factor,
        "eps": 1e-20,
    }
    args = (logits.float(), top_k)
    divides = scoring == "sigmoid"
    if divides != norm_topk_prob or violated("npu_moe_gating_top_k", bind("npu_moe_gating_top_k", args, kwargs)):
        return plain.route(logits, bias, top_k, n_group, topk_group, scoring, norm_topk_prob, routed_scaling_factor)
    weights, ids, _ = call("npu_moe_gating_top_k", *args, **kwargs)
    return ids.long(), weights


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """npu_rotary_mul on pairs side by side, in float32 as the tables are; it wants the angle of a pair twice."""
    tables = [table[positions].repeat_interleave(2, dim=-1).unsqueeze(1) for table in (cos, sin)]
    operator = "npu_rotary_mul"
    args = (x.float(), *tables, "interleave")
    if x.numel() == 0 or violated(operator, bind(operator, args, {})):
        return plain.rope(x, positions, cos, sin)
    turned: Tensor = call(operator, *args)
    return turned.to(x.dtype)


def mla_decode(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    """Absorbed attention by npu_fused_infer_attention_score over gathered latents.

    The operator reads the latent and the rotary key from two contiguous tensors, so a row's blocks are gathered and split first, at
    twice the cache's traffic. A mask and not a list of lengths tells the end: lengths would have to come from the host, which a captured
    graph cannot wait for. Sizes of DeepSeek-V3 (512 + 64) go in as its latent and rotary parts; others as one vector of at most 512.
    """
    latents = cache[block_table].flatten(1, 2).to(q.dtype).unsqueeze(1)  # [B, 1, slots, D]
    past_end = torch.arange(latents.shape[2], device=q.device) >= seq_lens.unsqueeze(1)  # [B, slots]
    # What is stored past the end may be NaN, which a mask alone would not stop.
    latents = latents.masked_fill(past_end[:, None, :, None], 0.0)
    query = q.unsqueeze(2)  # [B, heads, 1, D]
    kwargs = {
        "atten_mask": past_end[:, None, None, :],
        "num_heads": q.shape[1],
        "num_key_value_heads": 1,
        "scale": scale,
        "input_layout": "BNSD",
    }
    if kv_lora_rank == 512:
        latents, key_rope = (part.contiguous() for part in latents.split([kv_lora_rank, q.shape[2] - kv_lora_rank], dim=-1))
        query, query_rope = (part.contiguous() for part in query.split([kv_lora_rank, q.shape[2] - kv_lora_rank], dim=-1))
        kwargs |= {"query_rope": query_rope, "key_rope": key_rope}
    operator = "npu_fused_infer_attention_score"
    args = (query.contiguous(), latents, latents)
    if violated(operator, bind(operator, args, kwargs)):
        return plain.mla_decode(q, cache, block_table, seq_lens, scale, kv_lora_rank)
    attended: Tensor = call(operator, *args, **kwargs)[0]
    # A row of length 0 attends to nothing: the operator does not say what it gives then.
    return attended.squeeze(2)[..., :kv_lora_rank].masked_fill((seq_lens == 0)[:, None, None], 0.0)
