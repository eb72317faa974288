"""The calls of backend torch_npu against torch_npu 2.13.0 itself: its schemas, and the shapes its Meta functions give.

Runs where torch_npu is installed over do-nothing libraries (stand_ins.py); no NPU and no CANN.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401
from quantkit_kernels.torch_npu import NEEDS, calls, layout
from quantkit_kernels.torch_npu.rules import RULES
from torch import Tensor

META = torch.device("meta")
WITHOUT_META = {"npu_format_cast"}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def test_the_doubles_schemas_are_torch_npus() -> None:
    ours = (Path(__file__).parents[1] / "npu_schemas.txt").read_text().splitlines()
    assert ours == [str(getattr(torch.ops.npu, name).default._schema) for name in RULES]


@pytest.mark.parametrize("name", RULES)
def test_an_npu_has_the_kernel_a_cpu_has_not(name: str) -> None:
    # has_kernel asks for the device's dispatch key; the device itself is never touched.
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "PrivateUse1")
    assert not calls.has_kernel(name, torch.device("cpu"))
    assert calls.has_kernel(name, torch.device("meta")) == (name not in WITHOUT_META)


def test_every_needed_operator_has_rules() -> None:
    assert {name for names in NEEDS.values() for name in names} <= RULES.keys()


# R1 under tensor parallel 8: q_a + kv_a, q_b, o, shared gate and up, shared down.
DENSE = [(2112, 7168), (3072, 1536), (7168, 2048), (512, 7168), (7168, 256)]


@pytest.mark.parametrize(("n", "k"), DENSE)
@pytest.mark.parametrize("rows", [1, 32])
def test_dense_products(n: int, k: int, rows: int) -> None:
    x = meta(rows, k)
    scale = meta(k // 128, n)
    y = calls.weight_quant_matmul(x, meta(k, n // layout.CARRIED, dtype=torch.int32), scale, scale, 128)
    assert (y.shape, y.dtype) == ((rows, n), torch.bfloat16)
    codes, row_scale = calls.dynamic_quant(x)
    assert (codes.shape, codes.dtype, row_scale.shape, row_scale.dtype) == ((rows, k), torch.int8, (rows,), torch.float32)
    y = calls.quant_matmul(codes, row_scale, meta(k, n, dtype=torch.int8), meta(n, dtype=torch.float32), torch.bfloat16)
    assert (y.shape, y.dtype) == ((rows, n), torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("kind", ["int4", "int8", "dense"])
def test_experts_of_one_layer(tokens: int, kind: str) -> None:
    quantize = kind == "int8"
    rows, places, counts, scale = calls.init_routing(meta(tokens, 7168), meta(tokens, 8, dtype=torch.int32), 256, quantize)
    assert (rows.shape, rows.dtype) == ((tokens * 8, 7168), torch.int8 if quantize else torch.bfloat16)
    assert (places.shape, places.dtype) == ((tokens * 8,), torch.int32)
    assert (counts.shape, counts.dtype) == ((256,), torch.int64)
    scales: dict[str, Any]
    if quantize:
        weight = meta(256, 7168, 512, dtype=torch.int8)
        scales = {"scale": meta(256, 512), "per_token_scale": scale}
    elif kind == "dense":
        weight, scales = meta(256, 7168, 512), {}
    else:
        weight = meta(256, 7168, 512 // layout.CARRIED, dtype=torch.int32)
        scales = {"antiquant_scale": meta(256, 56, 512), "antiquant_offset": meta(256, 56, 512)}
    gate_up = calls.grouped_matmul(rows, weight, counts, torch.bfloat16, **scales)
    assert (gate_up.shape, gate_up.dtype) == ((tokens * 8, 512), torch.bfloat16)
    activated = calls.call("npu_swiglu", gate_up)
    assert (activated.shape, activated.dtype) == ((tokens * 8, 256), torch.bfloat16)
    out = calls.finalize_routing(meta(tokens * 8, 7168), places, meta(tokens, 8))
    assert (out.shape, out.dtype) == ((tokens, 7168), torch.bfloat16)


def test_norms_and_routing() -> None:
    x, gain = meta(8, 7168), meta(7168)
    normed, _ = calls.call("npu_rms_norm", x, gain, 1e-6)
    assert normed.shape == x.shape
    normed, _, total = calls.call("npu_add_rms_norm", x, x, gain, 1e-6)
    assert normed.shape == total.shape == x.shape
    bias = meta(256, dtype=torch.float32)
    kwargs = {"bias": bias, "k_group": 4, "group_count": 8, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}
    weights, ids, _ = calls.call("npu_moe_gating_top_k", meta(8, 256, dtype=torch.float32), 8, **kwargs)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((8, 8), torch.float32, (8, 8), torch.int32)


def test_rotary() -> None:
    table = meta(8, 1, 64, dtype=torch.float32)
    turned = calls.call("npu_rotary_mul", meta(8, 16, 64, dtype=torch.float32), table, table, "interleave")
    assert (turned.shape, turned.dtype) == ((8, 16, 64), torch.float32)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention(heads: int) -> None:
    kwargs = {
        "query_rope": meta(8, heads, 1, 64),
        "key_rope": meta(8, 1, 640, 64),
        "atten_mask": meta(8, 1, 1, 640, dtype=torch.bool),
        "num_heads": heads,
        "num_key_value_heads": 1,
        "scale": 0.07,
        "input_layout": "BNSD",
    }
    attended, _ = calls.call(
        "npu_fused_infer_attention_score", meta(8, heads, 1, 512), meta(8, 1, 640, 512), meta(8, 1, 640, 512), **kwargs
    )
    assert (attended.shape, attended.dtype) == ((8, heads, 1, 512), torch.bfloat16)


@pytest.mark.parametrize("quantize", [False, True])
def test_mla_prolog(quantize: bool) -> None:
    """One of 8 ranks: 16 heads."""
    grid = torch.int8 if quantize else torch.bfloat16
    weights = (meta(7168, 1536, dtype=grid), meta(1536, 16 * 192, dtype=grid), meta(16, 128, 512), meta(7168, 576, dtype=grid))
    scales = (meta(1536, dtype=torch.float32), meta(16 * 192, dtype=torch.float32), meta(576, dtype=torch.float32))
    caches, slots = (meta(40, 64, 1, 512), meta(40, 64, 1, 64)), meta(8, dtype=torch.int64)
    gains = (meta(1536), meta(512))
    found = calls.mla_prolog(meta(8, 7168), weights, gains, meta(8, 64), meta(8, 64), caches, slots, 1e-6, scales if quantize else None)
    assert [(one.shape, one.dtype) for one in found] == [((8, 16, 512), torch.bfloat16), ((8, 16, 64), torch.bfloat16)]


def test_the_meta_functions_are_lenient() -> None:
    """Why the rules exist: a group of 33 passes torch_npu's own check, and ours refuses it."""
    x, weight, scale = meta(4, 128), meta(128, 8, dtype=torch.int32), meta(4, 64)
    torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale, antiquant_group_size=33)
    with pytest.raises(AssertionError, match="multiple of 32"):
        calls.call("npu_weight_quant_batchmatmul", x, weight, scale, None, antiquant_group_size=33)
