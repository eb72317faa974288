"""Arguments that no operator takes are refused by a line that names the argument."""

import pytest
import torch
from kernel_weights import layer, random_experts
from quantkit_kernels import (
    W8A16,
    Dense,
    DenseMx8,
    Int4,
    Int8,
    KeySteps,
    Norms,
    PagedKeys,
    PagedLatents,
    Prompts,
    Rotation,
    Routing,
    StreamProduct,
    add_rms_norm,
    gqa_decode,
    gqa_prefill,
    gqa_prepare,
    likeliest,
    mla_decode,
    mla_prefill,
    mla_prepare,
    prepare,
    prepare_dense,
    prepare_fp4,
    prepare_int4,
    rms_norm,
    rope,
    route,
    silu_and_mul,
    weigh_streams,
)
from quantkit_kernels.codes import empty_keys, empty_latents
from quantkit_kernels.linear import laid_out
from quantkit_kernels.samples import random_weight
from quantkit_kernels.weights import stack

CPU, INT8 = torch.device("cpu"), torch.int8


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


X, SLOT, TABLE, LENGTH = (
    zeros(2, 8),
    zeros(1, dtype=torch.int64),
    zeros(1, 1, dtype=torch.int32),
    ones(1, dtype=torch.int32),
)
ANGLES, NORMS = Rotation(zeros(1, 2), zeros(1, 2)), Norms(ones(2), ones(4), 1e-6)
KV_B, KEYS = zeros(2, 6, 4), zeros(2, 4, 2, 8)
LATENTS = empty_latents((1, 4), 4, 4, INT8, torch.bfloat16, CPU)
CODES, E4M3 = zeros(16, 128, dtype=INT8), ones(16, 8).to(torch.float8_e4m3fn)
ZERO, NIBBLES = zeros(16, 1, dtype=INT8), zeros(16, 128, dtype=torch.uint8)
NVFP4 = random_weight("fp4-w4a4", 32, 128, torch.Generator().manual_seed(4))
STEP, STEPS = torch.tensor(0.02), KeySteps(*(0.01 * ones(2, 2, 8)))
CODED = empty_keys((1, 4, 2, 8), INT8, CPU)


def decode_latents(cache, kv_b=KV_B):
    return mla_decode(zeros(1, 2, 8), kv_b, ANGLES, PagedLatents(cache, TABLE, LENGTH), scale=1.0)


def decode_keys(keys=KEYS, values=KEYS, window=0):
    pages = PagedKeys(keys, values, TABLE, LENGTH)
    return gqa_decode(zeros(1, 4, 8), pages, scale=1.0, window=window)


def cache_latents(qkv_a, cache, step=None):
    return mla_prepare(qkv_a, NORMS, ANGLES, cache, SLOT, code_step=step)


def cache_keys(qkv, cache, steps=None):
    return gqa_prepare(qkv, None, ANGLES, cache, SLOT, code_steps=steps)


def ask_experts(ids, weights):
    made = random_experts("dense", 3, 32, 16, torch.Generator().manual_seed(6))
    return layer(made, "auto", torch.float32)(zeros(2, 32), ids, weights)


STREAMS = StreamProduct(zeros(24, 32), zeros(24), zeros(3), 1e-6, 1e-6, 20)
REFUSED = [
    ("weight: shape", lambda: rms_norm(X, ones(4), 1e-6)),
    ("residual", lambda: add_rms_norm(X, zeros(2, 4), ones(8), 1e-6)),
    ("odd", lambda: silu_and_mul(zeros(2, 7))),
    ("n_group", lambda: route(X, None, Routing(8, 2, n_group=3))),
    ("num_experts_per_tok: 5", lambda: route(X, None, Routing(8, 5, n_group=4, topk_group=2))),
    ("scoring_func: 'relu'", lambda: route(X, None, Routing(8, 2, scoring_func="relu"))),
    ("logits: shape", lambda: route(X, None, Routing(9, 2))),
    ("positions", lambda: rope(zeros(2, 1, 4), zeros(3).long(), ones(4, 2), ones(4, 2))),
    ("fn: shape", lambda: weigh_streams(zeros(2, 4, 16), STREAMS, zeros(16), 1e-6)),
    ("backend", lambda: likeliest(X, backend="cpu")),
    ("qkv_a: shape", lambda: cache_latents(zeros(1, 9), zeros(1, 4, 8))),
    ("not contiguous", lambda: cache_latents(zeros(1, 10), zeros(4, 1, 8).expand(4, 2, 8))),
    ("code_step: the cache holds no", lambda: cache_latents(zeros(1, 10), zeros(1, 4, 8), STEP)),
    ("code_step: shape", lambda: cache_latents(zeros(1, 10), LATENTS, ones(1))),
    ("cache: shape", lambda: decode_latents(zeros(1, 4, 6))),
    ("kv_b: 4 rows", lambda: decode_latents(zeros(1, 4, 8), KV_B[:, :4])),
    ("keys: shape", lambda: decode_keys(KEYS[..., :4])),
    ("share 3 key heads", lambda: decode_keys(*[KEYS[:, :, :1].repeat(1, 1, 3, 1)] * 2)),
    ("window: -1", lambda: decode_keys(window=-1)),
    (
        "the prompts have 2",
        lambda: gqa_prefill(zeros(1, 4, 8), (KEYS, KEYS), Prompts.of([(0, 2)], TABLE), scale=1.0),
    ),
    (
        "cache: 9 values",
        lambda: mla_prefill(
            zeros(1, 4, 6),
            zeros(4, 6, 6),
            Rotation(zeros(1, 1), zeros(1, 1)),
            zeros(2, 4, 9),
            Prompts.of([(0, 1)], TABLE),
            scale=1.0,
        ),
    ),
    ("not heads next to 2 of 8", lambda: cache_keys(zeros(1, 36), (KEYS, KEYS))),
    (
        "code_steps: the cache holds no codes",
        lambda: cache_keys(zeros(1, 48), (KEYS, KEYS), steps=STEPS),
    ),
    ("groups of 32, 64, 128", lambda: prepare_int4(CODES, ones(16, 8), None)),
    ("multiple of 16", lambda: prepare_fp4(NIBBLES[:, :120], E4M3, torch.tensor(1.0))),
    ("global_scale", lambda: prepare_fp4(NIBBLES, E4M3, ones(2))),
    ("dtype", lambda: prepare_dense(zeros(16, 16), dtype=torch.float64)),
    ("'dense' is now called 'expanded'", lambda: prepare_dense(zeros(16, 16), backend="dense")),
    ("multiples of 16", lambda: prepare_int4(CODES[:8], ones(8, 1), None, backend="cpu")),
    ("not known", lambda: prepare_dense(zeros(16, 16), backend="fast")),
    ("2 groups for 96 input features", lambda: prepare(W8A16(CODES[:, :96], ones(16, 2)))),
    ("cannot stack", lambda: stack(Int4(CODES, ones(16, 1), ZERO), Int8(CODES, ones(16, 1)))),
    (
        "differ in group size",
        lambda: stack(W8A16(CODES[:, :96], ones(16, 1)), W8A16(CODES[:, :96], ones(16, 3))),
    ),
    ("inputs are rounded differently", lambda: stack(NVFP4, NVFP4._replace(input_divisor=None))),
    ("inputs are rounded differently", lambda: stack(DenseMx8(ones(2, 32)), Dense(ones(2, 32)))),
    ("not a multiple of 32", lambda: prepare(DenseMx8(ones(2, 48)), backend="reference")),
    ("input_divisor", lambda: prepare(NVFP4._replace(input_divisor=ones(2)), backend="reference")),
    (
        "torch_npu cannot round inputs of fp4",
        lambda: laid_out("torch_npu", NVFP4, torch.bfloat16, CPU),
    ),
    (
        r"expected \[..., 32\]",
        lambda: prepare_dense(zeros(16, 32), dtype=torch.float32)(zeros(2, 16)),
    ),
    ("float32", lambda: prepare_dense(zeros(16, 32), dtype=torch.float32)(zeros(2, 32).half())),
    ("topk_ids", lambda: ask_experts(torch.tensor([[0], [3]]), ones(2, 1))),
    ("topk_ids: shape", lambda: ask_experts(zeros(3, 1).long(), ones(3, 1))),
]


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: f"{row}-{REFUSED[row][0]}")
def test_wrong_arguments(row):
    words, call = REFUSED[row]
    with pytest.raises(ValueError, match=words):
        call()
