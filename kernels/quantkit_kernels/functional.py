"""The operators of a decode step that hold no weight layout: norms, activation, routing, rotary embedding, latent attention.

Each checks its arguments, picks a backend ("auto": the fastest usable on the tensors' device) and returns new tensors. Arithmetic is
float32 whatever the dtype of the tensors; results are rounded once.
"""

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require

SCORINGS = ("sigmoid", "softmax")


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x float [..., H]; weight float [H]; returns [..., H] of x's dtype."""
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    result: Tensor = backends.find("rms_norm", backend, x.device).rms_norm(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum. x, residual float [..., H], one dtype; weight float [H]; returns two of x's shape and dtype.

    The sum is rounded to x's dtype before it is normed, so both results agree on what the residual stream holds.
    """
    check_tensor("residual", residual, tuple(x.shape), (x.dtype,))
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES)
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    normed, total = backends.find("add_rms_norm", backend, x.device).add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up of x = [gate, up]. x float [..., 2I]; returns [..., I] of x's dtype."""
    require(x.dtype in FLOAT_DTYPES, f"x: dtype {x.dtype}, expected a float dtype")
    require(x.shape[-1] % 2 == 0, f"x: last dimension {x.shape[-1]} is odd, expected gate and up side by side")
    result: Tensor = backends.find("silu_and_mul", backend, x.device).silu_and_mul(x)
    return result


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to (DeepSeek-V3's router; without bias and groups also those of Mixtral and Qwen3-MoE).

    logits float [T, E]; bias float32 [E] or None (e_score_correction_bias): it takes part in the choice, never in the weights.
    Experts come in n_group groups of E/n_group; a group's score is the sum of its best two; only the best topk_group groups stay.
    Returns topk_ids int64 [T, top_k] and topk_weights float32 [T, top_k], best choice first. The weights are the scores (sigmoid, or
    softmax over all experts), divided by their sum (+ 1e-20) with norm_topk_prob, times routed_scaling_factor.
    """
    check_tensor("logits", logits, (None, None), FLOAT_DTYPES)
    experts = logits.shape[1]
    if bias is not None:
        check_tensor("bias", bias, (experts,), (torch.float32,))
    require(scoring in SCORINGS, f"scoring: {scoring!r}, expected {' or '.join(SCORINGS)}")
    require(n_group >= 1 and experts % n_group == 0, f"n_group: {experts} experts do not split into {n_group} groups")
    require(1 <= topk_group <= n_group, f"topk_group: {topk_group}, expected 1..{n_group}")
    require(n_group == 1 or experts // n_group >= 2, f"n_group: groups of {experts // n_group} expert, expected at least 2")
    kept = experts // n_group * topk_group
    require(1 <= top_k <= kept, f"top_k: {top_k}, expected 1..{kept} (the experts of {topk_group} of {n_group} groups)")
    ids, weights = backends.find("route", backend, logits.device).route(
        logits, bias, top_k, n_group, topk_group, scoring, norm_topk_prob, routed_scaling_factor
    )
    return ids, weights


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> Tensor:
    """Rotary embedding over interleaved pairs: (x[2i], x[2i+1]) turned by the angle of pair i at the token's position.

    x float [T, heads, D]; positions int [T]; cos, sin float32 [max_positions, D/2], the table of angles. Returns [T, heads, D] of x's
    dtype, in the same interleaved order. A position outside the table is refused on the CPU and undefined on a device.
    """
    check_tensor("x", x, (None, None, None), FLOAT_DTYPES)
    require(x.shape[2] % 2 == 0, f"x: head dimension {x.shape[2]} is odd")
    check_tensor("positions", positions, (x.shape[0],), INDEX_DTYPES)
    check_tensor("cos", cos, (None, x.shape[2] // 2), (torch.float32,))
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    result: Tensor = backends.find("rope", backend, x.device).rope(x, positions, cos, sin)
    return result


def mla_decode(
    q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, *, scale: float, kv_lora_rank: int, backend: str = "auto"
) -> Tensor:
    """Absorbed MLA attention of one query token per row over the cached latents.

    q float [B, heads, D], D = kv_lora_rank + rope dimension: the query times W_UK, then its rotary part.
    cache float [num_blocks, block_size, D], any float dtype: the normed latent, then the rotary key, of one token per slot.
    block_table int [B, max_blocks]: token t of row b is in cache[block_table[b, t // block_size], t % block_size]. Entries past the
    sequence must name some block; what is stored there does not matter, not even NaN.
    seq_lens int [B]: tokens to attend to, the newest included; a row of length 0 gives zeros.
    Returns [B, heads, kv_lora_rank] of q's dtype: softmax(scale * q . latents) over latents[:kv_lora_rank], still to be multiplied by W_UV.

    A contiguous cache [B, max_len, D] is the case of one block per row: block_table = arange(B)[:, None]. Several query tokens of one
    sequence are several rows with the same table and rising seq_lens.
    """
    check_tensor("q", q, (None, None, None), FLOAT_DTYPES)
    check_tensor("cache", cache, (None, None, q.shape[2]), FLOAT_DTYPES)
    check_tensor("block_table", block_table, (q.shape[0], None), INDEX_DTYPES)
    check_tensor("seq_lens", seq_lens, (q.shape[0],), INDEX_DTYPES)
    require(0 < kv_lora_rank <= q.shape[2], f"kv_lora_rank: {kv_lora_rank}, expected 1..{q.shape[2]}")
    result: Tensor = backends.find("mla_decode", backend, q.device).mla_decode(q, cache, block_table, seq_lens, scale, kv_lora_rank)
    return result
