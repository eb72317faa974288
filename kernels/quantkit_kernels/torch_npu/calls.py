"""The operators of torch_npu that are called, typed, each checked against its rules first.

They are reached as torch.ops.npu.NAME, so whatever provides them there is called: torch_npu on an
NPU, the double of the tests on a CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.torch_npu.rule import Arguments
from quantkit_kernels.torch_npu.rules import violated

FRACTAL_NZ = 29


def has_kernel(name: str, device: torch.device, library: str = "npu") -> bool:
    """Whether an operator of torch_npu, or of another library, can be called with tensors on
    `device`."""
    key = "PrivateUse1" if device.type == "npu" else torch._C._dispatch_key_for_device(device.type)
    operator = f"{library}::{name}"
    return bool(
        torch._C._dispatch_has_kernel(operator)
        and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    )


def bind(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """The arguments by the names of the operator's schema, defaults filled in."""
    schema = getattr(torch.ops.npu, name).default._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values.update(zip(values, args))
    unknown = kwargs.keys() - values.keys()
    assert not unknown, f"{name} has no argument {', '.join(unknown)}"
    values.update(kwargs)
    return Arguments(**values)


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call torch.ops.npu.NAME; an AssertionError names the rule that its arguments break."""
    assert (broken := violated(name, bind(name, args, kwargs))) is None, broken
    return getattr(torch.ops.npu, name).default(*args, **kwargs)


def weight_quant_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, group_size: int
) -> Tensor:
    """x[M, K] @ ((weight + offset) * scale): the offset is added. weight int32 [K, N/8]; scale,
    offset [K/group_size, N], [1, N] for 0."""
    result: Tensor = call(
        "npu_weight_quant_batchmatmul", x, weight, scale, offset, antiquant_group_size=group_size
    )
    return result


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: x 16-bit [M, K] -> codes int8 [M, K], scale float32 [M] = max|x| / 127."""
    codes, scale = call("npu_dynamic_quant", x)
    return codes, scale


def quant_matmul(
    codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """(codes @ weight) * scale * row_scale. codes int8 [M, K], weight int8 [K, N], scale float32
    [N], row_scale float32 [M]."""
    result: Tensor = call(
        "npu_quant_matmul", codes, weight, scale, pertoken_scale=row_scale, output_dtype=dtype
    )
    return result


def grouped_matmul(
    x: Tensor, weight: Tensor, counts: Tensor, dtype: torch.dtype, **scales: Tensor
) -> Tensor:
    """x[M, K] times weight[e] [K, N] for the counts[e] rows of each expert in turn.

    scales: antiquant_scale and antiquant_offset for int4 weights, scale and per_token_scale for
    int8, bias too for int4 next to int8 rows (layout.narrow_tensors); none for weights of x's
    dtype.
    """
    lists = {name: [tensor] for name, tensor in scales.items()}
    kwargs = {
        "group_list": counts,
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": dtype,
        **lists,
    }
    result: Tensor = call("npu_grouped_matmul", [x], [weight], **kwargs)[0]
    return result


def init_routing(
    x: Tensor, expert_ids: Tensor, num_experts: int, quantize: bool, ends: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of x sorted by expert. x [T, H]; expert_ids int32 [T, k].

    Returns rows [T * k, H], int8 with `quantize`; where pair t * k + j went, int32 [T * k]; counts
    int64 [E], or with `ends` where each expert's rows end; scales float32 [T * k].
    """
    rows, places, counts, scale = call(
        "npu_moe_init_routing_v2",
        x,
        expert_ids,
        active_num=expert_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=0 if ends else 1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantize else -1,
        active_expert_range=[0, num_experts],
        row_idx_type=0,
    )
    return rows, places, counts, scale


def finalize_routing(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum over a token's experts of weight * row. rows [T * k, H]; places as `init_routing` gives;
    weights [T, k] of rows' dtype."""
    result: Tensor = call(
        "npu_moe_finalize_routing", rows, None, None, None, weights, places, None, drop_pad_mode=2
    )
    return result


def mla_prolog(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    gains: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    eps: float,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """MLA up to attention in one launch, for unquantized weights and for INT8; its rules name the
    sizes. No 4-bit weights.

    x bf16 [T, He]; weights W_dq [He, Hcq], W_uq_qr [Hcq, N * (D + 64)], W_uk [N, D, 512], W_dkv_kr
    [He, 576], all but W_uk in FRACTAL_NZ; gains of the two norms; cos, sin bf16 [T, 64], angles
    once per half; caches [blocks, block, 512] and [.., 64], written at slots int64 [T]. scales fp32
    of the columns of int8 W_dq, W_uq_qr and W_dkv_kr: x is then quantized per token. Returns the
    absorbed query [T, N, 512] and its rotary part [T, N, 64].

    Both rotary parts come out with even channels before odd ones: whatever writes the same cache
    must order them so.
    """
    w_dq, w_uq_qr, w_uk, w_dkv_kr = weights
    kwargs: dict[str, Any] = {
        "cache_index": slots,
        "rmsnorm_epsilon_cq": eps,
        "rmsnorm_epsilon_ckv": eps,
    }
    if scales is not None:
        x, row_scale = dynamic_quant(x)
        names = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
        kwargs |= {"weight_quant_mode": 2, "dequant_scale_x": row_scale.unsqueeze(1)} | {
            name: scale.unsqueeze(0) for name, scale in zip(names, scales)
        }
    four = (one.unsqueeze(2) for one in caches)
    query, query_rope, *_ = call(
        "npu_mla_prolog_v3", x, w_dq, w_uq_qr, w_uk, w_dkv_kr, *gains, sin, cos, *four, **kwargs
    )
    return query, query_rope


def format_cast_nz(weight: Tensor) -> Tensor:
    """The weight in the cube's own layout (FRACTAL_NZ), which torch_npu makes on an A2 only where
    it is asked to."""
    if weight.device.type == "npu":
        torch.get_device_module(weight.device).config.allow_internal_format = True
    result: Tensor = call("npu_format_cast", weight, FRACTAL_NZ)
    return result


def prefetch(tensors: Sequence[Tensor], after: Tensor | None = None) -> None:
    """Ask for weights to be brought into the L2 cache, meant for the time of a collective. In a
    graph, `after` is what starts it."""
    for tensor in tensors:
        call("npu_prefetch", tensor, after, tensor.numel() * tensor.element_size())
