"""The calls of backend torch_npu against torch_npu 2.13.0 itself: its schemas, and the shapes its
Meta functions give.

Runs where torch_npu is installed over do-nothing libraries (stand_ins.py); no NPU and no CANN.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from ascend.device_double import TOLD
from quantkit_kernels import accelerator
from quantkit_kernels.torch_npu import NEEDS, calls, layout
from quantkit_kernels.torch_npu.rules import RULES
from torch import Tensor
from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

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
    y = calls.weight_quant_matmul(
        x, meta(k, n // layout.CARRIED, dtype=torch.int32), scale, scale, 128
    )
    assert (y.shape, y.dtype) == ((rows, n), torch.bfloat16)
    codes, row_scale = calls.dynamic_quant(x)
    assert (codes.shape, codes.dtype, row_scale.shape, row_scale.dtype) == (
        (rows, k),
        torch.int8,
        (rows,),
        torch.float32,
    )
    y = calls.quant_matmul(
        codes, row_scale, meta(k, n, dtype=torch.int8), meta(n, dtype=torch.float32), torch.bfloat16
    )
    assert (y.shape, y.dtype) == ((rows, n), torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("kind", ["int4", "int8", "dense"])
def test_experts_of_one_layer(tokens: int, kind: str) -> None:
    quantize = kind == "int8"
    rows, places, counts, scale = calls.init_routing(
        meta(tokens, 7168), meta(tokens, 8, dtype=torch.int32), 256, quantize
    )
    assert (rows.shape, rows.dtype) == (
        (tokens * 8, 7168),
        torch.int8 if quantize else torch.bfloat16,
    )
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
    if quantize:  # W4A8
        narrow = {
            "scale": meta(256, 1, 512, dtype=torch.int64),
            "bias": meta(256, 512, dtype=torch.float32),
            "per_token_scale": scale,
        }
        carriers = meta(256, 7168, 512 // layout.CARRIED, dtype=torch.int32)
        narrowed = calls.grouped_matmul(rows, carriers, counts, torch.bfloat16, **narrow)
        assert (narrowed.shape, narrowed.dtype) == (gate_up.shape, gate_up.dtype)
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
    kwargs = {
        "bias": bias,
        "k_group": 4,
        "group_count": 8,
        "group_select_mode": 1,
        "norm_type": 1,
        "routed_scaling_factor": 2.5,
    }
    weights, ids, _ = calls.call(
        "npu_moe_gating_top_k", meta(8, 256, dtype=torch.float32), 8, **kwargs
    )
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == (
        (8, 8),
        torch.float32,
        (8, 8),
        torch.int32,
    )


def test_rotary() -> None:
    table = meta(8, 1, 64, dtype=torch.float32)
    turned = calls.call(
        "npu_rotary_mul", meta(8, 16, 64, dtype=torch.float32), table, table, "interleave"
    )
    assert (turned.shape, turned.dtype) == ((8, 16, 64), torch.float32)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention(heads: int) -> None:
    """At R1's sizes, and at those that go in as one vector."""
    pages = {
        "block_table": meta(8, 5, dtype=torch.int32),
        "actual_seq_lengths_kv": [640] * 8,
        "block_size": 128,
    }
    common: dict[str, Any] = {
        "num_heads": heads,
        "num_key_value_heads": 1,
        "scale": 0.07,
        "input_layout": "BNSD",
        **pages,
    }
    operator = "npu_fused_infer_attention_score"
    apart = {"query_rope": meta(8, heads, 1, 64), "key_rope": meta(40, 1, 128, 64)}
    attended, _ = calls.call(
        operator,
        meta(8, heads, 1, 512),
        meta(40, 1, 128, 512),
        meta(40, 1, 128, 512),
        **common,
        **apart,
    )
    assert (attended.shape, attended.dtype) == ((8, heads, 1, 512), torch.bfloat16)
    heads_first = {**common, **apart, "input_layout": "BNSD_NBSD"}
    attended, _ = calls.call(
        operator,
        meta(8, heads, 1, 512),
        meta(40, 1, 128, 512),
        meta(40, 1, 128, 512),
        **heads_first,
    )
    assert attended.shape == (heads, 8, 1, 512)
    if heads <= 64:
        attended, _ = calls.call(
            operator, meta(8, heads, 1, 160), meta(40, 1, 128, 160), meta(40, 1, 128, 160), **common
        )
        assert (attended.shape, attended.dtype) == ((8, heads, 1, 160), torch.bfloat16)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(32, 8, 128), (8, 8, 64)])
def test_grouped_attention(heads: int, key_heads: int, width: int) -> None:
    """Pages whose key heads stand side by side."""
    pages = {
        "block_table": meta(8, 5, dtype=torch.int32),
        "actual_seq_lengths_kv": [640] * 8,
        "block_size": 128,
    }
    common = {
        "num_heads": heads,
        "num_key_value_heads": key_heads,
        "scale": 0.07,
        "input_layout": "BNSD",
        **pages,
    }
    keys = meta(40, 128, key_heads * width)
    attended, _ = calls.call(
        "npu_fused_infer_attention_score", meta(8, heads, 1, width), keys, keys, **common
    )
    assert (attended.shape, attended.dtype) == ((8, heads, 1, width), torch.bfloat16)


def test_products_of_heads() -> None:
    """Absorbed queries and values of one of 8 ranks, tokens first in and out."""
    permuted = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    for inputs, outputs in ((128, 512), (512, 128)):
        found = calls.call(
            "npu_transpose_batchmatmul", meta(8, 16, inputs), meta(16, inputs, outputs), **permuted
        )
        assert (found.shape, found.dtype) == ((8, 16, outputs), torch.bfloat16)
    found = calls.call(
        "npu_transpose_batchmatmul",
        meta(128, 8, 512),
        meta(128, 512, 128),
        **{**permuted, "perm_x1": [0, 1, 2]},
    )
    assert found.shape == (8, 128, 128)


def test_rotation_and_cache() -> None:
    angles = (meta(8, 1, 1, 64), meta(8, 1, 1, 64))
    turned = calls.call("npu_interleave_rope", meta(8, 16, 1, 64), *angles)
    assert (turned.shape, turned.dtype) == ((8, 16, 1, 64), torch.bfloat16)
    caches, slots = (meta(40, 128, 1, 64), meta(40, 128, 1, 512)), meta(8, dtype=torch.int64)
    found = calls.call(
        "npu_kv_rmsnorm_rope_cache",
        meta(8, 1, 1, 576),
        meta(512),
        *angles,
        slots,
        *caches,
        cache_mode="PA",
    )
    assert [one.shape for one in found[:2]] == [one.shape for one in caches]


@pytest.mark.parametrize("quantize", [False, True])
def test_mla_prolog(quantize: bool) -> None:
    """One of 8 ranks: 16 heads."""
    grid = torch.int8 if quantize else torch.bfloat16
    weights = (
        meta(7168, 1536, dtype=grid),
        meta(1536, 16 * 192, dtype=grid),
        meta(16, 128, 512),
        meta(7168, 576, dtype=grid),
    )
    scales = (
        meta(1536, dtype=torch.float32),
        meta(16 * 192, dtype=torch.float32),
        meta(576, dtype=torch.float32),
    )
    caches, slots = (meta(40, 128, 512), meta(40, 128, 64)), meta(8, dtype=torch.int64)
    gains = (meta(1536), meta(512))
    found = calls.mla_prolog(
        meta(8, 7168),
        weights,
        gains,
        meta(8, 64),
        meta(8, 64),
        caches,
        slots,
        1e-6,
        scales if quantize else None,
    )
    assert [(one.shape, one.dtype) for one in found] == [
        ((8, 16, 512), torch.bfloat16),
        ((8, 16, 64), torch.bfloat16),
    ]


def test_graphs_are_told_lengths() -> None:
    """What accelerator.capture and accelerator.replay call, and the double of graphs stands for, is
    torch_npu's own: the context's and the graph's signatures, and its handler of our operator,
    which swaps in the variant with room for results and updates the lengths."""
    capture = inspect.signature(torch_npu.npu.graph.__init__).parameters
    assert {"pool", "stream", "auto_dispatch_capture", "capture_error_mode"} <= capture.keys()
    assert list(inspect.signature(torch_npu.npu.NPUGraph.update).parameters) == [
        "self",
        "cpu_update_input",
    ]
    for name, told in TOLD.items():
        operator = getattr(torch.ops.npu, name)
        handler = _NPU_GRAPH_OP_HANDLERS[operator.default.__name__]
        assert handler is _NPU_GRAPH_OP_HANDLERS[operator.out.__name__]
        assert [key for _, _, key in handler.get_update_specs(operator.default.__name__)] == list(
            told
        )
        known = {argument.name for argument in operator.out._schema.arguments}
        assert {argument.name for argument in operator.default._schema.arguments} | {
            "workspace",
            "out",
        } == known
        assert set(told) <= known
        assert hasattr(torch_npu, f"_{name}_get_max_workspace")
        assert hasattr(torch_npu, f"_{name}_infer_output")


def test_the_driver_has_what_is_asked_of_it() -> None:
    for name in (
        "NPUGraph",
        "Stream",
        "current_stream",
        "graph",
        "graph_pool_handle",
        "stream",
        "set_device",
        "mem_get_info",
    ):
        assert hasattr(torch_npu.npu, name), name
    assert hasattr(torch_npu.npu.Stream, "wait_stream")
    assert hasattr(torch_npu.npu.Stream, "synchronize")
    assert accelerator.GRAPHS["npu"] == torch_npu.npu.NPUGraph.__name__


def test_ranks_meet_over_hccl() -> None:
    """The name that Parallel.connect gives torch.distributed for an NPU is the one that torch_npu
    registers."""
    assert "hccl" in torch.distributed.Backend.backend_list
    assert "npu" in torch.distributed.Backend.backend_capability["hccl"]


def test_the_meta_functions_are_lenient() -> None:
    """Why the rules exist: a group of 33 passes torch_npu's own check, and ours refuses it."""
    x, weight, scale = meta(4, 128), meta(128, 8, dtype=torch.int32), meta(4, 64)
    torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale, antiquant_group_size=33)
    with pytest.raises(AssertionError, match="multiple of 32"):
        calls.call("npu_weight_quant_batchmatmul", x, weight, scale, None, antiquant_group_size=33)
