"""The rules of the operators of latent attention: rotary embedding, cache, attention, and
everything before attention at once."""

import torch
from torch import Tensor

from quantkit_kernels.torch_npu.rule import FLOATS, HALVES, Arguments, Rule

ROTARY_MUL = (
    Rule(
        "input is a float [T, heads, D]", lambda a: a.input.dim() == 3 and a.input.dtype in FLOATS
    ),
    Rule(
        "fewer than 1000 heads, D even and below 896",
        lambda a: a.input.shape[1] < 1000 and a.input.shape[2] < 896 and a.input.shape[2] % 2 == 0,
    ),
    Rule(
        "r1 and r2 are [T, 1, D]",
        lambda a: a.r1.shape == a.r2.shape == (a.input.shape[0], 1, a.input.shape[2]),
    ),
    Rule("r1 and r2 are of input's dtype", lambda a: a.r1.dtype == a.r2.dtype == a.input.dtype),
    Rule(
        "rotary_mode is half or interleave, without a matrix",
        lambda a: a.rotary_mode in ("half", "interleave") and a.rotate is None,
    ),
)


def _rotary_part(a: Arguments) -> bool:
    heads = a.num_query_heads
    return a.query_rope is None or (
        a.query.shape[-1] == 512
        and a.query_rope.shape[-1] == a.key_rope.shape[-1] == 64
        and a.query_rope.shape[:3] == a.query.shape[:3]
        and a.key_rope.shape[:3] == a.key.shape[:3]
        and heads <= 128
        and heads & (heads - 1) == 0
        and a.num_key_value_heads == 1
        and a.query_rope.is_contiguous()
        and a.key_rope.is_contiguous()
    )


def _lengths_fit(a: Arguments) -> bool:
    lengths = a.actual_seq_kvlen
    return (
        lengths is not None
        and len(lengths) == a.query.shape[0]
        and max(lengths) <= min(a.block_table.shape[1] * a.block_size, 262144)
    )


FUSED_INFER_ATTENTION_SCORE = (
    Rule(
        "query, key and value are fp16 or bf16 of one dtype",
        lambda a: a.query.dtype in HALVES and a.query.dtype == a.key.dtype == a.value.dtype,
    ),
    Rule(
        "layout BNSD, or BNSD_NBSD with a rotary part: query [B, heads, 1, D]",
        lambda a: (
            a.input_layout in (("BNSD",) if a.query_rope is None else ("BNSD", "BNSD_NBSD"))
            and a.query.dim() == 4
            and a.query.shape[2] == 1
        ),
    ),
    Rule(
        "everything is contiguous",
        lambda a: a.query.is_contiguous() and a.key.is_contiguous() and a.value.is_contiguous(),
    ),
    Rule("num_query_heads is the query's", lambda a: a.num_query_heads == a.query.shape[1] <= 256),
    Rule("heads share keys evenly", lambda a: a.num_query_heads % a.num_key_value_heads == 0),
    Rule(
        "64 heads share a key at most, 128 with a rotary part",
        lambda a: a.query_rope is not None or a.num_query_heads // a.num_key_value_heads <= 64,
    ),
    Rule(
        "D is at most 512 and a multiple of 16",
        lambda a: a.query.shape[-1] <= 512 and a.query.shape[-1] % 16 == 0,
    ),
    Rule(
        "block_table is int32 [B, blocks]: MLA has no other cache",
        lambda a: (
            a.block_table is not None
            and a.block_table.dtype == torch.int32
            and a.block_table.shape[:1] == a.query.shape[:1]
        ),
    ),
    Rule(
        "key and value are [blocks, key heads, block_size, D] or [blocks, block_size, key heads * "
        "D], the same shape",
        lambda a: (
            tuple(a.key.shape[1:])
            in (
                (a.num_key_value_heads, a.block_size, a.query.shape[-1]),
                (a.block_size, a.num_key_value_heads * a.query.shape[-1]),
            )
            and a.key.shape == a.value.shape
        ),
    ),
    Rule(
        "a rotary part of 64 goes with D = 512, one key head and a power of two of at most 128 "
        "heads",
        _rotary_part,
    ),
    Rule(
        "block_size is a multiple of 16 up to 512, with a rotary part 16 or 128",
        lambda a: a.block_size in ((16, 128) if a.query_rope is not None else range(16, 513, 16)),
    ),
    Rule("actual_seq_kvlen is a length per row, within its blocks and 262144", _lengths_fit),
    Rule("B is at most 65536", lambda a: a.query.shape[0] <= 65536),
    Rule(
        "one query token has neither mask nor sparse_mode",
        lambda a: a.atten_mask is None and a.sparse_mode == 0,
    ),
    Rule("softmax_scale is given: the default is 1", lambda a: a.softmax_scale != 1.0),
)
"""Q_S = 1, paged. The manual lets block_size with a rotary part be any multiple of 16 up to 1024,
and a mask be given. CANN's own check (ops-transformer at c29bc10: 16-bit MLA goes by
fused_infer_attention_score_tiling_v3.cpp to its _check_feature.cpp) refuses a mask, an unpaged
cache, and blocks other than 16 and 128. Of BNSD_NBSD the manual (09fca6f) says in its table of
layouts that Q_S is above 1, and in what it says of MLA that an A2 takes it; vllm-ascend calls it so
with one query token."""

KV_RMSNORM_ROPE_CACHE = (
    Rule(
        "kv is fp16 or bf16 [T, 1, 1, 576]",
        lambda a: a.kv.dtype in HALVES and tuple(a.kv.shape[1:]) == (1, 1, 576),
    ),
    Rule(
        "gamma is [512] of kv's dtype",
        lambda a: tuple(a.gamma.shape) == (512,) and a.gamma.dtype == a.kv.dtype,
    ),
    Rule(
        "cos and sin are [T, 1, 1, 64] of kv's dtype",
        lambda a: (
            tuple(a.cos.shape) == tuple(a.sin.shape) == (a.kv.shape[0], 1, 1, 64)
            and a.cos.dtype == a.sin.dtype == a.kv.dtype
        ),
    ),
    Rule(
        "index is int64 [T]",
        lambda a: a.index.dtype == torch.int64 and a.index.shape == a.kv.shape[:1],
    ),
    Rule(
        "caches are [blocks, block, 1, 64] and [blocks, block, 1, 512] of kv's dtype",
        lambda a: (
            tuple(a.k_cache.shape[2:]) == (1, 64)
            and tuple(a.ckv_cache.shape) == (*a.k_cache.shape[:2], 1, 512)
            and a.k_cache.dtype == a.ckv_cache.dtype == a.kv.dtype
        ),
    ),
    Rule(
        "everything is contiguous",
        lambda a: all(one.is_contiguous() for one in vars(a).values() if isinstance(one, Tensor)),
    ),
    Rule("cache_mode is PA: a slot for each token", lambda a: a.cache_mode == "PA"),
    Rule(
        "caches are not quantized, what is stored is not given back: not used here",
        lambda a: (
            a.k_rope_scale is None and a.c_kv_scale is None and a.v is None and not a.is_output_kv
        ),
    ),
)

INTERLEAVE_ROPE = (
    Rule(
        "x is fp16 or bf16 [T, heads, 1, 64]",
        lambda a: a.x.dtype in HALVES and a.x.dim() == 4 and tuple(a.x.shape[2:]) == (1, 64),
    ),
    Rule(
        "cos and sin are [T, 1, 1, 64]",
        lambda a: tuple(a.cos.shape) == tuple(a.sin.shape) == (a.x.shape[0], 1, 1, 64),
    ),
    Rule("cos and sin are of x's dtype", lambda a: a.cos.dtype == a.sin.dtype == a.x.dtype),
    Rule(
        "everything is contiguous",
        lambda a: a.x.is_contiguous() and a.cos.is_contiguous() and a.sin.is_contiguous(),
    ),
)


def _heads_and_k(a: Arguments) -> tuple[int, int]:
    """Of input, as perm_x1 says: heads come first or second."""
    return a.input.shape[0 if list(a.perm_x1 or ())[:1] == [0] else 1], a.input.shape[2]


def _input_is_below(a: Arguments) -> bool:
    heads, k = _heads_and_k(a)
    return bool((k if list(a.perm_x1 or ())[:1] == [0] else heads * k) < 65536)


TRANSPOSE_BATCHMATMUL = (
    Rule(
        "input is a float [T, heads, K] or [heads, T, K]",
        lambda a: a.input.dim() == 3 and a.input.dtype in FLOATS,
    ),
    Rule(
        "weight is [heads, K, N] of input's dtype",
        lambda a: a.weight.dim() == 3 and a.weight.dtype == a.input.dtype,
    ),
    Rule("weight has input's heads and K", lambda a: tuple(a.weight.shape[:2]) == _heads_and_k(a)),
    Rule("nothing is empty", lambda a: a.input.numel() > 0 and a.weight.numel() > 0),
    Rule(
        "K and N are multiples of 128",
        lambda a: a.weight.shape[1] % 128 == 0 and a.weight.shape[2] % 128 == 0,
    ),
    Rule(
        "N is below 65536, and K, times the heads where tokens come first",
        lambda a: _input_is_below(a) and a.weight.shape[2] < 65536,
    ),
    Rule(
        "heads come first or second in input, second in output, first in weight",
        lambda a: (
            list(a.perm_x1 or ()) in ([1, 0, 2], [0, 1, 2])
            and list(a.perm_x2 or ()) == [0, 1, 2]
            and list(a.perm_y or ()) == [1, 0, 2]
        ),
    ),
    Rule(
        "output is not quantized or split, no bias",
        lambda a: a.bias is None and a.scale is None and a.batch_split_factor == 1,
    ),
)

PROLOG_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
PROLOG_Q_LORA = (1536, 2048)
PROLOG_NOPE = (128, 192)
PROLOG_LATENT, PROLOG_ROPE = 512, 64
PROLOG_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PROLOG_WEIGHTS = {
    0: (torch.bfloat16,) * 3,
    1: (torch.bfloat16, torch.int8, torch.bfloat16),
    2: (torch.int8,) * 3,
}
"""By weight_quant_mode: the dtypes of weight_dq, weight_uq_qr and weight_dkv_kr. FP8 modes are for
newer chips, 4-bit ones do not exist."""


def _prolog_sizes(a: Arguments) -> bool:
    heads, nope, latent = a.weight_uk.shape
    return (
        a.token_x.shape[-1] in PROLOG_HIDDEN
        and a.weight_dq.shape[1] in PROLOG_Q_LORA
        and heads in PROLOG_HEADS
        and nope in PROLOG_NOPE
        and latent == PROLOG_LATENT
    )


def _prolog_weights_fit(a: Arguments) -> bool:
    hidden, q_lora = a.weight_dq.shape
    heads, nope, latent = a.weight_uk.shape
    return (
        a.token_x.shape[-1] == hidden
        and tuple(a.weight_uq_qr.shape) == (q_lora, heads * (nope + PROLOG_ROPE))
        and tuple(a.weight_dkv_kr.shape) == (hidden, latent + PROLOG_ROPE)
    )


def _prolog_scales(a: Arguments) -> bool:
    every = (a.dequant_scale_x, a.dequant_scale_w_dq, a.dequant_scale_w_dkv_kr)
    uq = a.dequant_scale_w_uq_qr
    if a.weight_quant_mode == 0:
        return uq is None and all(scale is None for scale in every)
    fits = (
        uq is not None
        and uq.dtype == torch.float32
        and tuple(uq.shape) == (1, a.weight_uq_qr.shape[1])
    )
    if a.weight_quant_mode == 1:
        return fits and all(scale is None for scale in every)
    shapes = ((a.token_x.shape[0], 1), (1, a.weight_dq.shape[1]), (1, a.weight_dkv_kr.shape[1]))
    return fits and all(
        scale is not None and scale.dtype == torch.float32 and tuple(scale.shape) == shape
        for scale, shape in zip(every, shapes)
    )


# The manual's sizes; CANN of 2025 (ops-transformer at c29bc10, mla_prolog_tiling_check.cpp) had
# hidden sizes 6144, 7168 and 7680, low rank 1536, head size 128 and blocks of 16 or 128, and only
# for the blocks is ours the narrower.
MLA_PROLOG_V3 = (
    Rule("hidden size, low rank, heads and head size are ones it was made for", _prolog_sizes),
    Rule(
        "weights are [He, Hcq], [Hcq, N * (D + 64)], [N, D, 512] and [He, 576]", _prolog_weights_fit
    ),
    Rule(
        "weights are bf16 (mode 0), bf16 but for int8 weight_uq_qr (1), or int8 (2)",
        lambda a: (
            (a.weight_dq.dtype, a.weight_uq_qr.dtype, a.weight_dkv_kr.dtype)
            == PROLOG_WEIGHTS.get(a.weight_quant_mode)
        ),
    ),
    Rule(
        "token_x is [T, He], int8 in mode 2 and bf16 else",
        lambda a: (
            a.token_x.dim() == 2
            and a.token_x.dtype == (torch.int8 if a.weight_quant_mode == 2 else torch.bfloat16)
        ),
    ),
    Rule("fp32 scales are given for what is int8, and for nothing else", _prolog_scales),
    Rule(
        "weight_uk, gains, angles and caches are bf16",
        lambda a: all(
            one.dtype == torch.bfloat16
            for one in (
                a.weight_uk,
                a.rmsnorm_gamma_cq,
                a.rmsnorm_gamma_ckv,
                a.rope_sin,
                a.rope_cos,
                a.kv_cache,
                a.kr_cache,
            )
        ),
    ),
    Rule(
        "angles are [T, 64]",
        lambda a: (
            tuple(a.rope_sin.shape) == tuple(a.rope_cos.shape) == (a.token_x.shape[0], PROLOG_ROPE)
        ),
    ),
    Rule(
        "caches are [blocks, block, 1, 512] and [blocks, block, 1, 64], blocks of 16 or 128",
        lambda a: (
            tuple(a.kv_cache.shape[2:]) == (1, PROLOG_LATENT)
            and tuple(a.kr_cache.shape) == (*a.kv_cache.shape[:2], 1, PROLOG_ROPE)
            and a.kv_cache.shape[1] in (16, 128)
        ),
    ),
    Rule(
        "cache_index is int64 [T]",
        lambda a: (
            a.cache_index is not None
            and a.cache_index.dtype == torch.int64
            and a.cache_index.shape == a.token_x.shape[:1]
        ),
    ),
    Rule(
        "everything is contiguous",
        lambda a: all(one.is_contiguous() for one in vars(a).values() if isinstance(one, Tensor)),
    ),
    Rule(
        "caches and query are not quantized, blocks are PA_BSND: not used here",
        lambda a: (
            (a.cache_mode, a.kv_cache_quant_mode, a.query_quant_mode, a.ckvkr_repo_mode)
            == ("PA_BSND", 0, 0, 0)
        ),
    ),
    Rule(
        "smooth scales, clips, factors and the normed query are not used here",
        lambda a: (
            a.smooth_scales_cq is None
            and a.k_nope_clip_alpha is None
            and a.actual_seq_len is None
            and not a.query_norm_flag
            and a.qc_qr_scale == a.kc_scale == 1.0
        ),
    ),
)
