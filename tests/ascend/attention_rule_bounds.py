"""Calls just inside and just outside every condition of the rules of latent attention's
operators."""

from typing import Any

import torch
from ascend.rule_bounds import I8, I32, I64, B, Change, D, F, H, T

ROTARY, TURN, CACHE = "npu_rotary_mul", "npu_interleave_rope", "npu_kv_rmsnorm_rope_cache"
HEADS = "npu_transpose_batchmatmul"
ATTEND, PROLOG = "npu_fused_infer_attention_score", "npu_mla_prolog_v3"


def attend(
    rows: int = 2,
    heads: int = 16,
    key_heads: int = 1,
    width: int = 128,
    block: int = 16,
    **more: Any,
) -> Change:
    """Without a rotary part."""
    keys = T(3, key_heads, block, width)
    call = {
        "query": T(rows, heads, 1, width),
        "key": keys,
        "value": keys,
        "num_heads": heads,
        "num_key_value_heads": key_heads,
    }
    return (
        call
        | {
            "query_rope": None,
            "key_rope": None,
            "block_size": block,
            "block_table": T(rows, 2, dtype=I32),
        }
        | {
            "actual_seq_lengths_kv": [1] * rows,
            **more,
        }
    )


def rotary(
    heads: int = 16, width: int = 512, block: int = 16, rope: int = 64, **more: Any
) -> Change:
    keys = T(3, 1, block, width)
    call = {
        "query": T(2, heads, 1, width),
        "key": keys,
        "value": keys,
        "num_heads": heads,
        "block_size": block,
    }
    return call | {"query_rope": T(2, heads, 1, rope), "key_rope": T(3, 1, block, rope), **more}


def prolog(
    hidden: int = 1024,
    low: int = 1536,
    heads: int = 2,
    nope: int = 128,
    latent: int = 512,
    **more: Any,
) -> Change:
    """Weights of these sizes that fit each other."""
    weights = {
        "weight_dq": T(hidden, low),
        "weight_uq_qr": T(low, heads * (nope + 64)),
        "weight_uk": T(heads, nope, latent),
    }
    return {"token_x": T(4, hidden), **weights, "weight_dkv_kr": T(hidden, latent + 64), **more}


def prolog_quantized(mode: int, **more: Any) -> Change:
    """Mode 2: everything int8. Mode 1: weight_uq_qr."""
    change: Change = {
        "weight_quant_mode": mode,
        "weight_uq_qr": T(1536, 384, dtype=I8),
        "dequant_scale_w_uq_qr": T(1, 384, dtype=F),
    }
    if mode == 2:
        change |= {
            "token_x": T(4, 1024, dtype=I8),
            "weight_dq": T(1024, 1536, dtype=I8),
            "weight_dkv_kr": T(1024, 576, dtype=I8),
        }
        change |= {
            "dequant_scale_x": T(4, 1, dtype=F),
            "dequant_scale_w_dq": T(1, 1536, dtype=F),
            "dequant_scale_w_dkv_kr": T(1, 576, dtype=F),
        }
    return change | more


INSIDE: list[tuple[str, Change]] = [
    *(
        (HEADS, {"input": T(1, 2, 128, dtype=dtype), "weight": T(2, 128, 128, dtype=dtype)})
        for dtype in (H, F)
    ),
    (HEADS, {"input": T(3, 511, 128), "weight": T(511, 128, 128)}),
    (HEADS, {"input": T(3, 127, 512), "weight": T(127, 128, 512, transposed=True)}),
    (HEADS, {"weight": T(2, 128, 65408)}),
    (HEADS, {"perm_x1": [0, 1, 2], "input": T(128, 3, 512), "weight": T(128, 512, 128)}),
    (HEADS, {"perm_x1": [0, 1, 2], "input": T(2, 3, 65408), "weight": T(2, 65408, 128)}),
    (ATTEND, {"input_layout": "BNSD_NBSD"}),
    (
        ROTARY,
        {"input": T(4, 999, 64, dtype=F), "r1": T(4, 1, 64, dtype=F), "r2": T(4, 1, 64, dtype=F)},
    ),
    (
        ROTARY,
        {
            "input": T(4, 16, 894, dtype=H),
            "r1": T(4, 1, 894, dtype=H),
            "r2": T(4, 1, 894, dtype=H),
            "rotary_mode": "half",
        },
    ),
    (
        TURN,
        {
            "x": T(4, 16, 1, 64, dtype=H),
            "cos": T(4, 1, 1, 64, dtype=H),
            "sin": T(4, 1, 1, 64, dtype=H),
        },
    ),
    (
        CACHE,
        {
            "kv": T(2, 1, 1, 576, dtype=H),
            "gamma": T(512, dtype=H),
            "cos": T(2, 1, 1, 64, dtype=H),
            "sin": T(2, 1, 1, 64, dtype=H),
        }
        | {"k_cache": T(2, 16, 1, 64, dtype=H), "ckv_cache": T(2, 16, 1, 512, dtype=H)},
    ),
    (ATTEND, attend()),
    (ATTEND, attend(heads=64)),
    (ATTEND, attend(heads=256, key_heads=4)),
    (ATTEND, attend(width=512)),
    (ATTEND, attend(width=16)),
    (ATTEND, attend(block=512)),
    (ATTEND, attend(block=48)),
    (ATTEND, attend(heads=8, key_heads=2, key=T(3, 16, 256), value=T(3, 16, 256))),
    (
        ATTEND,
        attend(
            query=T(2, 16, 1, 128, dtype=H),
            key=T(3, 1, 16, 128, dtype=H),
            value=T(3, 1, 16, 128, dtype=H),
        ),
    ),
    (ATTEND, attend(rows=65536)),
    (ATTEND, attend(actual_seq_lengths_kv=[32, 1])),
    (
        ATTEND,
        attend(block=512, block_table=T(2, 512, dtype=I32), actual_seq_lengths_kv=[262144, 1]),
    ),
    *((ATTEND, rotary(heads)) for heads in (1, 2, 64, 128)),
    (ATTEND, rotary(block=128)),
    *(
        (PROLOG, prolog(hidden))
        for hidden in (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
    ),
    *((PROLOG, prolog(heads=heads)) for heads in (1, 4, 8, 16, 32, 64, 128)),
    (PROLOG, prolog(low=2048, rmsnorm_gamma_cq=T(2048))),
    (PROLOG, prolog(nope=192)),
    (PROLOG, {"kv_cache": T(2, 128, 1, 512), "kr_cache": T(2, 128, 1, 64)}),
    (PROLOG, prolog_quantized(1)),
    (PROLOG, prolog_quantized(2)),
]

OUTSIDE: list[tuple[str, Change, str]] = [
    (
        HEADS,
        {"input": T(3, 2, 128, dtype=D), "weight": T(2, 128, 256, dtype=D)},
        "input is a float",
    ),
    (HEADS, {"input": T(1, 3, 2, 128)}, "input is a float"),
    (HEADS, {"weight": T(2, 128, 256, dtype=H)}, "of input's dtype"),
    (HEADS, {"weight": T(2, 128, 256, 1)}, "of input's dtype"),
    (HEADS, {"weight": T(3, 128, 256)}, "heads and K"),
    (HEADS, {"weight": T(2, 256, 256)}, "heads and K"),
    (HEADS, {"input": T(0, 2, 128)}, "empty"),
    (HEADS, {"weight": T(2, 128, 0)}, "empty"),
    (HEADS, {"input": T(3, 2, 192), "weight": T(2, 192, 256)}, "multiples of 128"),
    (HEADS, {"weight": T(2, 128, 192)}, "multiples of 128"),
    (HEADS, {"input": T(3, 512, 128), "weight": T(512, 128, 128)}, "below 65536"),
    (HEADS, {"input": T(3, 128, 512), "weight": T(128, 512, 128)}, "below 65536"),
    (HEADS, {"weight": T(2, 128, 65536)}, "below 65536"),
    *((HEADS, {"perm_x1": order}, "heads come") for order in (None, [1, 2, 0])),
    (HEADS, {"perm_x1": [0, 2, 1], "input": T(2, 3, 128)}, "heads come"),
    *((HEADS, {"perm_x2": order}, "heads come") for order in (None, [0, 2, 1])),
    *((HEADS, {"perm_y": order}, "heads come") for order in (None, [0, 1, 2])),
    (HEADS, {"perm_x1": [0, 1, 2]}, "heads and K"),
    (
        HEADS,
        {"perm_x1": [0, 1, 2], "input": T(2, 3, 65536), "weight": T(2, 65536, 128)},
        "below 65536",
    ),
    *((HEADS, {name: T(256)}, "no bias") for name in ("bias", "scale")),
    (HEADS, {"batch_split_factor": 2}, "no bias"),
    (ROTARY, {"input": T(4, 64)}, "[T, heads, D]"),
    (ROTARY, {"input": T(4, 16, 64, dtype=D)}, "[T, heads, D]"),
    (ROTARY, {"input": T(4, 1000, 64)}, "1000 heads"),
    (ROTARY, {"input": T(4, 16, 896), "r1": T(4, 1, 896), "r2": T(4, 1, 896)}, "below 896"),
    (ROTARY, {"input": T(4, 16, 63), "r1": T(4, 1, 63), "r2": T(4, 1, 63)}, "even"),
    *((ROTARY, {name: T(4, 16, 64)}, "[T, 1, D]") for name in ("r1", "r2")),
    *(
        (ROTARY, {"r1": T(*shape), "r2": T(*shape)}, "[T, 1, D]")
        for shape in ((3, 1, 64), (4, 2, 64), (4, 1, 32))
    ),
    *((ROTARY, {name: T(4, 1, 64, dtype=F)}, "input's dtype") for name in ("r1", "r2")),
    (ROTARY, {"r1": T(4, 1, 64, dtype=F), "r2": T(4, 1, 64, dtype=F)}, "input's dtype"),
    (ROTARY, {"rotary_mode": "quarter"}, "rotary_mode"),
    (ROTARY, {"rotate": T(64, 64)}, "rotary_mode"),
    (TURN, {"x": T(4, 16, 64)}, "[T, heads, 1, 64]"),
    (TURN, {"x": T(4, 16, 1, 32)}, "[T, heads, 1, 64]"),
    (TURN, {"x": T(4, 16, 2, 64)}, "[T, heads, 1, 64]"),
    (
        TURN,
        {
            "x": T(4, 16, 1, 64, dtype=F),
            "cos": T(4, 1, 1, 64, dtype=F),
            "sin": T(4, 1, 1, 64, dtype=F),
        },
        "fp16 or bf16",
    ),
    *((TURN, {name: T(4, 1, 1, 32)}, "[T, 1, 1, 64]") for name in ("cos", "sin")),
    (TURN, {"cos": T(3, 1, 1, 64), "sin": T(3, 1, 1, 64)}, "[T, 1, 1, 64]"),
    *((TURN, {name: T(4, 1, 1, 64, dtype=H)}, "x's dtype") for name in ("cos", "sin")),
    (TURN, {"cos": T(4, 1, 1, 64, dtype=H), "sin": T(4, 1, 1, 64, dtype=H)}, "x's dtype"),
    (TURN, {"x": torch.empty(16, 4, 1, 64, dtype=B, device="meta").transpose(0, 1)}, "contiguous"),
    *(
        (TURN, {name: torch.empty(4, 1, 1, 128, dtype=B, device="meta")[..., ::2]}, "contiguous")
        for name in ("cos", "sin")
    ),
    (CACHE, {"kv": T(2, 1, 1, 575)}, "576"),
    (CACHE, {"kv": T(2, 1, 2, 576)}, "576"),
    (CACHE, {"kv": T(2, 1, 1, 576, dtype=F)}, "fp16 or bf16"),
    (CACHE, {"gamma": T(511)}, "gamma is [512]"),
    (CACHE, {"gamma": T(512, dtype=F)}, "kv's dtype"),
    *((CACHE, {name: T(2, 1, 1, 32)}, "[T, 1, 1, 64]") for name in ("cos", "sin")),
    (CACHE, {"cos": T(3, 1, 1, 64), "sin": T(3, 1, 1, 64)}, "[T, 1, 1, 64]"),
    *((CACHE, {name: T(2, 1, 1, 64, dtype=F)}, "of kv's dtype") for name in ("cos", "sin")),
    (CACHE, {"cos": T(2, 1, 1, 64, dtype=H), "sin": T(2, 1, 1, 64, dtype=H)}, "of kv's dtype"),
    (CACHE, {"index": T(2, dtype=I32)}, "int64"),
    (CACHE, {"index": T(3, dtype=I64)}, "int64"),
    (CACHE, {"k_cache": T(2, 16, 1, 32)}, "caches are"),
    (CACHE, {"k_cache": T(2, 16, 2, 64)}, "caches are"),
    (CACHE, {"ckv_cache": T(2, 16, 1, 256)}, "caches are"),
    (CACHE, {"ckv_cache": T(2, 32, 1, 512)}, "caches are"),
    (CACHE, {"ckv_cache": T(3, 16, 1, 512)}, "caches are"),
    *(
        (CACHE, {name: T(2, 16, 1, width, dtype=F)}, "caches are")
        for name, width in (("k_cache", 64), ("ckv_cache", 512))
    ),
    (
        CACHE,
        {"k_cache": T(2, 16, 1, 64, dtype=F), "ckv_cache": T(2, 16, 1, 512, dtype=F)},
        "caches are",
    ),
    (
        CACHE,
        {"ckv_cache": torch.empty(16, 2, 1, 512, dtype=B, device="meta").transpose(0, 1)},
        "contiguous",
    ),
    (CACHE, {"cache_mode": "PA_NZ"}, "PA"),
    *((CACHE, {name: T(64, dtype=F)}, "not used") for name in ("k_rope_scale", "c_kv_scale", "v")),
    (CACHE, {"is_output_kv": True}, "not used"),
    (
        ATTEND,
        attend(
            query=T(2, 16, 1, 128, dtype=F),
            key=T(3, 1, 16, 128, dtype=F),
            value=T(3, 1, 16, 128, dtype=F),
        ),
        "one dtype",
    ),
    *(
        (ATTEND, attend(**{name: T(3, 1, 16, 128, dtype=H)}), "one dtype")
        for name in ("key", "value")
    ),
    (ATTEND, attend(query=T(2, 16, 1, 128, dtype=H)), "one dtype"),
    (ATTEND, {"input_layout": "BSH"}, "BNSD"),
    (ATTEND, attend(input_layout="BNSD_NBSD"), "BNSD"),
    (ATTEND, {"input_layout": "BNSD_BSND"}, "BNSD"),
    (ATTEND, attend(query=T(2, 16, 2, 128)), "BNSD"),
    (ATTEND, attend(query=T(2, 16, 128)), "BNSD"),
    (
        ATTEND,
        attend(query=torch.empty(16, 2, 1, 128, dtype=B, device="meta").transpose(0, 1)),
        "contiguous",
    ),
    *(
        (ATTEND, attend(**{name: T(3, 1, 128, 16, transposed=True)}), "contiguous")
        for name in ("key", "value")
    ),
    (ATTEND, attend(num_heads=8), "num_heads"),
    (ATTEND, attend(heads=257, key_heads=257), "num_heads"),
    (ATTEND, attend(heads=16, key_heads=3), "evenly"),
    (ATTEND, attend(heads=65), "64 heads"),
    (ATTEND, attend(heads=128), "64 heads"),
    (ATTEND, attend(width=528), "at most 512"),
    (ATTEND, attend(width=24), "multiple of 16"),
    (ATTEND, {"block_table": None}, "no other cache"),
    (ATTEND, {"block_table": T(2, 2, dtype=I64)}, "int32"),
    (ATTEND, {"block_table": T(3, 2, dtype=I32)}, "int32"),
    (ATTEND, attend(key=T(3, 1, 32, 128), value=T(3, 1, 32, 128)), "same shape"),
    (ATTEND, attend(key=T(3, 2, 16, 128), value=T(3, 2, 16, 128)), "same shape"),
    (ATTEND, attend(key=T(3, 1, 16, 64), value=T(3, 1, 16, 64)), "same shape"),
    (ATTEND, attend(heads=8, key_heads=2, key=T(3, 16, 128), value=T(3, 16, 128)), "same shape"),
    (ATTEND, attend(heads=8, key_heads=2, key=T(3, 32, 256), value=T(3, 32, 256)), "same shape"),
    (ATTEND, attend(value=T(4, 1, 16, 128)), "same shape"),
    (ATTEND, rotary(width=256), "rotary part"),
    (ATTEND, rotary(rope=32), "rotary part"),
    (ATTEND, rotary(query_rope=T(2, 16, 1, 32)), "rotary part"),
    (ATTEND, rotary(key_rope=T(3, 1, 16, 32)), "rotary part"),
    (ATTEND, rotary(query_rope=T(2, 8, 1, 64)), "rotary part"),
    (ATTEND, rotary(key_rope=T(4, 1, 16, 64)), "rotary part"),
    (ATTEND, rotary(24), "rotary part"),
    (ATTEND, rotary(256), "rotary part"),
    (
        ATTEND,
        rotary(
            num_key_value_heads=2,
            key=T(3, 2, 16, 512),
            value=T(3, 2, 16, 512),
            key_rope=T(3, 2, 16, 64),
        ),
        "rotary part",
    ),
    (
        ATTEND,
        rotary(query_rope=torch.empty(16, 2, 1, 64, dtype=B, device="meta").transpose(0, 1)),
        "rotary part",
    ),
    (ATTEND, rotary(key_rope=T(3, 1, 64, 16, transposed=True)), "rotary part"),
    (ATTEND, attend(block=528), "block_size"),
    (ATTEND, attend(block=24), "block_size"),
    (ATTEND, attend(block=8), "block_size"),
    *((ATTEND, rotary(block=block), "block_size") for block in (32, 64, 112, 144, 256)),
    (ATTEND, {"actual_seq_lengths_kv": None}, "length per row"),
    (ATTEND, attend(actual_seq_lengths_kv=[1]), "length per row"),
    (ATTEND, attend(actual_seq_lengths_kv=[1, 1, 1]), "length per row"),
    (ATTEND, attend(actual_seq_lengths_kv=[33, 1]), "within its blocks"),
    (
        ATTEND,
        attend(block=512, block_table=T(2, 513, dtype=I32), actual_seq_lengths_kv=[262145, 1]),
        "262144",
    ),
    (ATTEND, attend(rows=65537), "65536"),
    (ATTEND, {"atten_mask": T(2048, 2048, dtype=I8)}, "mask"),
    *((ATTEND, {"sparse_mode": mode}, "sparse_mode") for mode in (1, 3)),
    (ATTEND, {"scale": 1.0}, "scale"),
    *((PROLOG, prolog(hidden), "made for") for hidden in (512, 1025, 8193)),
    *((PROLOG, prolog(low=low), "made for") for low in (1535, 1537, 2049, 1024)),
    *((PROLOG, prolog(heads=heads), "made for") for heads in (3, 12, 127, 256)),
    *((PROLOG, prolog(nope=nope), "made for") for nope in (64, 127, 193)),
    *((PROLOG, prolog(latent=latent), "made for") for latent in (256, 513)),
    (PROLOG, prolog(weight_uq_qr=T(1536, 2 * 193)), "[He, 576]"),
    (PROLOG, prolog(weight_uq_qr=T(1535, 2 * 192)), "[He, 576]"),
    (PROLOG, prolog(weight_dkv_kr=T(1024, 575)), "[He, 576]"),
    (PROLOG, prolog(weight_dkv_kr=T(1023, 576)), "[He, 576]"),
    (PROLOG, prolog(weight_dq=T(2048, 1536)), "[He, 576]"),
    *((PROLOG, prolog_quantized(mode), "weights are bf16 (mode 0)") for mode in (0, 3)),
    (PROLOG, prolog_quantized(2, weight_quant_mode=1), "weights are bf16 (mode 0)"),
    (PROLOG, prolog_quantized(1, weight_quant_mode=2), "weights are bf16 (mode 0)"),
    (PROLOG, prolog(weight_dq=T(1024, 1536, dtype=I8)), "weights are bf16 (mode 0)"),
    (PROLOG, prolog(weight_dkv_kr=T(1024, 576, dtype=I8)), "weights are bf16 (mode 0)"),
    (PROLOG, {"token_x": T(4, 1024, dtype=I8)}, "token_x"),
    (PROLOG, {"token_x": T(1, 4, 1024)}, "token_x"),
    (PROLOG, prolog_quantized(1, token_x=T(4, 1024, dtype=I8)), "token_x"),
    (PROLOG, prolog_quantized(2, token_x=T(4, 1024)), "token_x"),
    *(
        (PROLOG, {f"dequant_scale_{name}": T(*shape, dtype=F)}, "scales are given")
        for name, shape in (
            ("x", (4, 1)),
            ("w_dq", (1, 1536)),
            ("w_dkv_kr", (1, 576)),
            ("w_uq_qr", (1, 384)),
        )
    ),
    *(
        (
            PROLOG,
            prolog_quantized(1, **{f"dequant_scale_{name}": T(*shape, dtype=F)}),
            "scales are given",
        )
        for name, shape in (("x", (4, 1)), ("w_dq", (1, 1536)), ("w_dkv_kr", (1, 576)))
    ),
    (PROLOG, prolog_quantized(1, dequant_scale_w_uq_qr=None), "scales are given"),
    (PROLOG, prolog_quantized(1, dequant_scale_w_uq_qr=T(1, 384)), "scales are given"),
    (PROLOG, prolog_quantized(1, dequant_scale_w_uq_qr=T(1, 1536, dtype=F)), "scales are given"),
    (PROLOG, prolog_quantized(1, dequant_scale_w_uq_qr=T(384, dtype=F)), "scales are given"),
    *(
        (PROLOG, prolog_quantized(2, **{f"dequant_scale_{name}": None}), "scales are given")
        for name in ("x", "w_dq", "w_dkv_kr", "w_uq_qr")
    ),
    *(
        (PROLOG, prolog_quantized(2, **{f"dequant_scale_{name}": T(*shape)}), "scales are given")
        for name, shape in (
            ("x", (4, 1)),
            ("w_dq", (1, 1536)),
            ("w_dkv_kr", (1, 576)),
            ("w_uq_qr", (1, 384)),
        )
    ),
    *(
        (
            PROLOG,
            prolog_quantized(2, **{f"dequant_scale_{name}": T(*shape, dtype=F)}),
            "scales are given",
        )
        for name, shape in (
            ("x", (4,)),
            ("x", (4, 2)),
            ("x", (1024, 1)),
            ("w_dq", (1, 1024)),
            ("w_dq", (1536,)),
        )
    ),
    *(
        (
            PROLOG,
            prolog_quantized(2, **{f"dequant_scale_{name}": T(*shape, dtype=F)}),
            "scales are given",
        )
        for name, shape in (("w_dkv_kr", (1, 1024)), ("w_dkv_kr", (2, 576)), ("w_uq_qr", (1, 1536)))
    ),
    *(
        (PROLOG, {name: T(*shape, dtype=F)}, "are bf16")
        for name, shape in (
            ("weight_uk", (2, 128, 512)),
            ("rmsnorm_gamma_cq", (1536,)),
            ("rmsnorm_gamma_ckv", (512,)),
            ("rope_sin", (4, 64)),
        )
    ),
    *(
        (PROLOG, {name: T(*shape, dtype=F)}, "are bf16")
        for name, shape in (
            ("rope_cos", (4, 64)),
            ("kv_cache", (2, 16, 1, 512)),
            ("kr_cache", (2, 16, 1, 64)),
        )
    ),
    *(
        (PROLOG, {name: T(*shape)}, "angles")
        for name in ("rope_sin", "rope_cos")
        for shape in ((4, 32), (3, 64))
    ),
    (PROLOG, {"rope_sin": T(3, 64), "rope_cos": T(3, 64)}, "angles"),
    (PROLOG, {"rope_sin": T(4, 128), "rope_cos": T(4, 128)}, "angles"),
    (PROLOG, {"kv_cache": T(2, 16, 1, 511)}, "caches are"),
    (PROLOG, {"kv_cache": T(2, 16, 2, 512)}, "caches are"),
    (PROLOG, {"kr_cache": T(2, 16, 1, 63)}, "caches are"),
    (PROLOG, {"kr_cache": T(3, 16, 1, 64)}, "caches are"),
    *(
        (
            PROLOG,
            {"kv_cache": T(2, block, 1, 512), "kr_cache": T(2, block, 1, 64)},
            "blocks of 16 or 128",
        )
        for block in (17, 64, 127, 129)
    ),
    (PROLOG, {"cache_index": None}, "int64"),
    (PROLOG, {"cache_index": T(4, dtype=I32)}, "int64"),
    (PROLOG, {"cache_index": T(5, dtype=I64)}, "int64"),
    (PROLOG, prolog(weight_dq=T(1536, 1024, transposed=True)), "contiguous"),
    (PROLOG, {"cache_mode": "PA_NZ"}, "PA_BSND"),
    *(
        (PROLOG, {name: 1}, "PA_BSND")
        for name in ("kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode")
    ),
    *(
        (PROLOG, {name: T(1536)}, "not used")
        for name in ("smooth_scales_cq", "k_nope_clip_alpha", "actual_seq_len")
    ),
    (PROLOG, {"query_norm_flag": True}, "not used"),
    *((PROLOG, {name: 2.0}, "not used") for name in ("qc_qr_scale", "kc_scale")),
    (PROLOG, {"qc_qr_scale": 2.0, "kc_scale": 2.0}, "not used"),
]
