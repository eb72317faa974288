"""The operators of functional.py in plain torch, float32 inside. Arguments arrive checked."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


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
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if topk_group < n_group:
        groups = choice.view(choice.shape[0], n_group, -1)
        kept = groups.topk(2, dim=-1).values.sum(dim=-1).topk(topk_group, dim=-1).indices
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, kept, False)
        # Minus infinity, not zero: with a negative bias a kept expert may score below zero.
        choice = groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(choice.shape)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * routed_scaling_factor


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D/2]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos_t - odd * sin_t, even * sin_t + odd * cos_t], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def mla_decode(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int) -> Tensor:
    slots = torch.arange(block_table.shape[1] * cache.shape[1], device=q.device)
    valid = slots < seq_lens.unsqueeze(1)  # [B, slots]
    # Slots past the end are zeroed, not only masked: a probability of 0 times a stored NaN would still be NaN.
    latents = cache[block_table].flatten(1, 2).float().masked_fill(~valid.unsqueeze(-1), 0.0)  # [B, slots, D]
    scores = (q.float() * scale) @ latents.transpose(1, 2)  # [B, heads, slots]
    masked = ~valid.unsqueeze(1)
    # The second mask turns the NaN of an empty row into zeros.
    probabilities = scores.masked_fill(masked, float("-inf")).softmax(dim=-1).masked_fill(masked, 0.0)
    return (probabilities @ latents[..., :kv_lora_rank]).to(q.dtype)
