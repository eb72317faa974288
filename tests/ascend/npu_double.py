"""A double of torch_npu's operators: registered for CPU tensors under the real schemas, computing
what the manuals say, in float64.

`installed()` is a context: within it torch.ops.npu exists and backend torch_npu is usable on the
CPU. Every operator enforces the rules of quantkit_kernels.torch_npu.rules, and raises where
arguments break one, as a device would. It also knows what a rule cannot see: which memory lies in
FRACTAL_NZ, and that an operand must or must not; and what the manuals leave open, as the attention
of a row of length 0, comes out as NaN.
"""

import contextlib
import math
from pathlib import Path

import torch
from quantkit_kernels import backends
from quantkit_kernels.torch_npu.calls import bind
from quantkit_kernels.torch_npu.layout import uncarry_int4
from quantkit_kernels.torch_npu.rules import violated
from torch import Tensor

SCHEMAS = Path(__file__).with_name("npu_schemas.txt").read_text().splitlines()
# Schemas of `int? output_dtype` receive a dtype as torch's own number of it.
DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


@contextlib.contextmanager
def few_rows_split():
    """Within it 4-bit linears of few rows are computed as CANN's template MSD_GROUP computes them;
    else exactly."""
    plain = RESULTS["npu_weight_quant_batchmatmul"]
    RESULTS["npu_weight_quant_batchmatmul"] = lambda a: (
        _split_product(a) if _is_split(a) else plain(a)
    )
    try:
        yield
    finally:
        RESULTS["npu_weight_quant_batchmatmul"] = plain


@contextlib.contextmanager
def installed():
    """Register the operators; yields the list to which each call adds its name."""
    library = torch.library.Library("npu", "DEF")
    called = []
    for schema in SCHEMAS:
        library.define(schema.removeprefix("npu::"))
        name = schema.removeprefix("npu::").partition("(")[0]
        library.impl(name, _enforcing(name, called), "CPU")
    backends.forget()
    try:
        yield called
    finally:
        library._destroy()
        backends.forget()


def _enforcing(name, called):
    def run(*args, **kwargs):
        called.append(name)
        arguments = bind(name, args, kwargs)
        if getattr(arguments, "output_dtype", None) is not None:
            arguments.output_dtype = DTYPES[arguments.output_dtype]
        broken = violated(name, arguments) or _misplaced(name, arguments)
        if broken is not None:
            raise RuntimeError(broken)
        return RESULTS[name](arguments)

    return run


def copied(arguments):
    """Operands that are not contiguous: aclnn makes each so before it launches its kernel
    (l0op::Contiguous), which is a launch of its own, and of a weight reads and writes all of it."""
    return [
        argument
        for argument, value in vars(arguments).items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, Tensor) and not tensor.is_contiguous()
    ]


NZ = "FRACTAL_NZ"
PLACED = {
    "npu_mla_prolog_v3": {"weight_dq": {NZ}, "weight_uq_qr": {NZ}, "weight_dkv_kr": {NZ}},
    "npu_quant_matmul": {"x2": {"ND", NZ}},
    "npu_format_cast": {"input": {"ND", NZ}},
    "npu_prefetch": {"input": {"ND", NZ}, "dependency": {"ND", NZ}},
}
"""How operands may lie; what is not named here must be ND. CANN refuses other weights of the prolog
(mla_prolog_tiling_check.cpp)."""


def layout_of(tensor):
    """ND, FRACTAL_NZ, or that it is a part of a tensor in FRACTAL_NZ, which no operator reads."""
    cast = getattr(tensor.untyped_storage(), "cast_to_nz", None)
    if cast is None:
        return "ND"
    return (
        NZ
        if cast == (tensor.shape, tensor.stride(), tensor.dtype)
        else f"a part of a tensor in {NZ}"
    )


def _misplaced(name, arguments):
    for argument, value in vars(arguments).items():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor):
                found, allowed = layout_of(tensor), PLACED.get(name, {}).get(argument, {"ND"})
                if found not in allowed:
                    return f"{name}: {argument} is {found}, not {' or '.join(sorted(allowed))}"
    return None


def _format_cast(a):
    cast = a.input.clone(memory_format=torch.contiguous_format)
    if a.acl_format == 29:
        cast.untyped_storage().cast_to_nz = (cast.shape, cast.stride(), cast.dtype)
    return cast


def _weight_quant_batchmatmul(a):
    weight = (uncarry_int4(a.weight) if a.weight.dtype == torch.int32 else a.weight).double()
    return (a.x.double() @ _antiquant(weight, a.antiquant_scale, a.antiquant_offset)).to(a.x.dtype)


def _is_split(a):
    """CANN's tiling (ops-nn, weight_quant_batch_matmul_v2_tiling_msd_group.cpp), but for the size
    of its L1 buffer."""
    k, n, group = a.weight.shape[0], a.antiquant_scale.shape[-1], a.antiquant_group_size
    few = group in (64, 128) and a.x.shape[0] <= group // 8
    return few and a.weight.dtype == torch.int32 and k <= 13952 and k % group == 0 and n % 64 == 0


def _split_product(a):
    """x of a group, divided by its largest value, as three int4 digits, which are multiplied by the
    codes; sums in float32, over groups in an order that CANN does not fix
    (`torch.use_deterministic_algorithms` fixes it)."""
    groups = a.x.float().unflatten(1, (-1, a.antiquant_group_size))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    rest = torch.where(largest == 0, 0.0, groups / largest) * 7.49
    codes = uncarry_int4(a.weight).float().unflatten(0, (-1, a.antiquant_group_size))
    total, step = torch.zeros(a.x.shape[0], groups.shape[1], codes.shape[2]), 7.49
    for _ in range(3):
        digit = rest.sign() * (rest.abs() + 0.5).floor()
        total += torch.einsum("mgk,gkn->mgn", digit, codes) * (largest / step)
        rest, step = (rest - digit) * 14.98, step * 14.98
    if a.antiquant_offset is not None:
        total += groups.sum(dim=-1, keepdim=True) * a.antiquant_offset.float()
    return (total * a.antiquant_scale.float()).sum(dim=1).to(a.x.dtype)


def _antiquant(weight, scale, offset):
    """(weight + offset) * scale: weight [K, N], scale and offset [G, N], [1, N] or [N]."""
    wide = scale.double().reshape(-1, scale.shape[-1])
    added = torch.zeros_like(wide) if offset is None else offset.double().reshape(wide.shape)
    groups = wide.shape[0]
    return ((weight.unflatten(0, (groups, -1)) + added.unsqueeze(1)) * wide.unsqueeze(1)).flatten(
        0, 1
    )


def _quant_matmul(a):
    product = (a.x1.double() @ a.x2.double()) * a.scale.double()
    if a.pertoken_scale is not None:
        product = product * a.pertoken_scale.double().unsqueeze(-1)
    return product.to(a.output_dtype)


def _dynamic_quant(a):
    scale = a.input.float().abs().amax(dim=-1) / 127
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(a.input.float() / divisor.unsqueeze(-1)).to(torch.int8), scale


def _grouped_matmul(a):
    x, weight = a.x[0], a.weight[0]
    pieces = []
    for expert, rows in enumerate(x.double().split(a.group_list.tolist())):
        if x.dtype == torch.int8 and weight.dtype == torch.int32:
            pieces.append(
                _narrow_product(rows, weight[expert], a.scale[0][expert], a.bias[0][expert])
            )
        elif x.dtype == torch.int8:
            pieces.append(rows @ weight[expert].double() * a.scale[0][expert].double())
        elif a.antiquant_scale is None:
            pieces.append(rows @ weight[expert].double())
        else:
            codes = (
                uncarry_int4(weight[expert]) if weight.dtype == torch.int32 else weight[expert]
            ).double()
            pieces.append(
                rows
                @ _antiquant(codes, a.antiquant_scale[0][expert], a.antiquant_offset[0][expert])
            )
    product = torch.cat(pieces)
    if a.per_token_scale is not None:
        product = product * a.per_token_scale[0].double().unsqueeze(-1)
    return [product.to(a.output_dtype or x.dtype)]


def _narrow_product(rows, carriers, scale_bits, bias):
    """int8 by int4: rows are 16 h + l + 8, h and l of four bits, of which the 8 is left to the
    bias."""
    scale = scale_bits.flatten().to(torch.int32).view(torch.float32).double()
    return (rows - 8) @ uncarry_int4(carriers).double() * scale + bias.double()


def _moe_gating_top_k(a):
    wide = a.x.double()
    scores = wide.sigmoid() if a.norm_type == 1 else wide.softmax(dim=-1)
    choice = scores if a.bias is None else scores + a.bias.double()
    groups = choice.unflatten(1, (a.group_count, -1))
    best = (
        groups.amax(dim=-1)
        if a.group_select_mode == 0
        else groups.topk(2, dim=-1).values.sum(dim=-1)
    )
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, best.topk(a.k_group, dim=-1).indices, True
    )
    choice = groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(1)
    ids = choice.topk(a.k, dim=-1).indices
    weights = scores.gather(1, ids)
    if a.norm_type == 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + a.eps)
    return (weights * a.routed_scaling_factor).to(a.x.dtype), ids.to(torch.int32), scores.float()


def _moe_init_routing_v2(a):
    ids, top_k = a.expert_idx.flatten().long(), a.expert_idx.shape[1]
    order = ids.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    rows = a.x[order // top_k]
    counts = torch.bincount(ids, minlength=a.expert_num)
    if a.expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    scale = torch.full((len(order),), math.nan)
    if a.quant_mode == 1:
        rows, scale = _dynamic_quant(bind("npu_dynamic_quant", (rows,), {}))
    return rows, places.to(torch.int32), counts, scale


def _moe_finalize_routing(a):
    rows = a.expanded_permuted_rows.double()[a.expanded_src_to_dst_row.long()]
    weighted = rows.unflatten(0, a.scales.shape) * a.scales.double().unsqueeze(-1)
    return weighted.sum(dim=1).to(a.expanded_permuted_rows.dtype)


def _swiglu(a):
    gate, up = a.input.double().chunk(2, dim=a.dim)
    return (torch.nn.functional.silu(gate) * up).to(a.input.dtype)


def _normed(x, gamma, epsilon):
    wide = x.double()
    rstd = (wide.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.double()).to(x.dtype), rstd.float()


def _rms_norm(a):
    return _normed(a.input, a.gamma, a.epsilon)


def _add_rms_norm(a):
    total = a.x1 + a.x2
    return *_normed(total, a.gamma, a.epsilon), total


def _rotary_mul(a):
    x = a.input.double()
    if a.rotary_mode == "interleave":
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    return (x * a.r1.double() + turned * a.r2.double()).to(a.input.dtype)


def _halves_turned(x, cos, sin):
    """Interleave-half: even channels, then odd ones, turned as halves. x [T, .., 64]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even, odd], dim=-1) * cos + torch.cat([-odd, even], dim=-1) * sin


def _interleave_rope(a):
    return _halves_turned(a.x.double(), a.cos.double(), a.sin.double()).to(a.x.dtype)


def _kv_rmsnorm_rope_cache(a):
    latent, k_pe = a.kv.split([512, 64], dim=-1)
    keys = _halves_turned(k_pe.double(), a.cos.double(), a.sin.double())
    _store(a.ckv_cache, a.index, _normed(latent, a.gamma, a.epsilon)[0])
    _store(a.k_cache, a.index, keys)
    return a.k_cache, a.ckv_cache, torch.full((1,), math.nan), torch.full((1,), math.nan)


def _store(cache, slots, values):
    width = cache.shape[-1]
    cache.view(-1, width).index_copy_(0, slots, values.reshape(-1, width).to(cache.dtype))


def _transpose_batchmatmul(a):
    by_head = a.input.permute(a.perm_x1).double() @ a.weight.double()
    return by_head.transpose(0, 1).to(a.input.dtype).contiguous()


def _mla_prolog_v3(a):
    """Products of bf16 are rounded to bf16, dequantized ones not before they were normed, turned,
    or enter the product with W_UK (CANN's ops-transformer at c29bc10, mla_prolog_comm.h, types by
    scenario)."""
    heads, nope = a.weight_uk.shape[:2]
    cos, sin = a.rope_cos.double(), a.rope_sin.double()
    x, w_dq, w_uq_qr, w_dkv_kr = (
        a.token_x.double(),
        a.weight_dq.double(),
        a.weight_uq_qr.double(),
        a.weight_dkv_kr.double(),
    )
    low, kv = x @ w_dq, x @ w_dkv_kr
    if a.weight_quant_mode == 2:
        row = a.dequant_scale_x.double()
        low, kv = (
            low * row * a.dequant_scale_w_dq.double(),
            kv * row * a.dequant_scale_w_dkv_kr.double(),
        )
    else:
        low, kv = low.bfloat16(), kv.bfloat16()
    c_q = _normed(low, a.rmsnorm_gamma_cq, a.rmsnorm_epsilon_cq)[0]
    if a.weight_quant_mode:
        codes, row_scale = _dynamic_quant(bind("npu_dynamic_quant", (c_q,), {}))
        query = (
            codes.double()
            @ w_uq_qr
            * row_scale.double().unsqueeze(1)
            * a.dequant_scale_w_uq_qr.double()
        )
    else:
        query = (c_q.double() @ w_uq_qr).bfloat16().double()
    q_nope, q_pe = query.unflatten(1, (heads, -1)).split([nope, 64], dim=-1)
    absorbed = torch.einsum("tnd,ndk->tnk", q_nope.bfloat16().double(), a.weight_uk.double())
    latent, k_pe = kv.split([512, 64], dim=-1)
    _store(
        a.kv_cache, a.cache_index, _normed(latent, a.rmsnorm_gamma_ckv, a.rmsnorm_epsilon_ckv)[0]
    )
    _store(a.kr_cache, a.cache_index, _halves_turned(k_pe.double(), cos, sin))
    query_rope = _halves_turned(q_pe, cos[:, None], sin[:, None])
    nothing = torch.full((1,), math.nan)
    return (
        absorbed.bfloat16().contiguous(),
        query_rope.bfloat16(),
        nothing,
        nothing.clone(),
        nothing.clone(),
    )


def _fused_infer_attention_score(a):
    """Paged, one query token a row: each over its own tokens and nothing behind them. A block's key
    heads may stand side by side."""
    if a.key.dim() == 3:
        a.key, a.value = (
            side.unflatten(2, (a.num_key_value_heads, -1)).transpose(1, 2)
            for side in (a.key, a.value)
        )
    shared = a.num_query_heads // a.num_key_value_heads
    out = torch.zeros(*a.query.shape[:3], a.value.shape[-1], dtype=torch.float64)
    for row, length in enumerate(a.actual_seq_kvlen):
        if not length:  # the manual does not say
            out[row] = math.nan
            continue
        blocks = a.block_table[row, : -(-length // a.block_size)].long()
        seen = [
            part[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double()
            for part in (a.key, a.value)
        ]  # [key heads, length, D]
        query = a.query[row].double()
        if a.query_rope is not None:
            turned = a.key_rope[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double()
            query, seen[0] = (
                torch.cat([query, a.query_rope[row].double()], dim=-1),
                torch.cat([seen[0], turned], dim=-1),
            )
        keys, values = (side.repeat_interleave(shared, dim=0) for side in seen)
        out[row] = (query @ keys.transpose(1, 2) * a.softmax_scale).softmax(dim=-1) @ values
    if a.input_layout == "BNSD_NBSD":
        out = out.transpose(0, 1).contiguous()
    return out.to(a.query.dtype), torch.full((1,), math.nan)


RESULTS = {
    "npu_weight_quant_batchmatmul": _weight_quant_batchmatmul,
    "npu_quant_matmul": _quant_matmul,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_gating_top_k": _moe_gating_top_k,
    "npu_moe_init_routing_v2": _moe_init_routing_v2,
    "npu_moe_finalize_routing": _moe_finalize_routing,
    "npu_swiglu": _swiglu,
    "npu_rms_norm": _rms_norm,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_rotary_mul": _rotary_mul,
    "npu_fused_infer_attention_score_v2": _fused_infer_attention_score,
    "npu_interleave_rope": _interleave_rope,
    "npu_kv_rmsnorm_rope_cache": _kv_rmsnorm_rope_cache,
    "npu_transpose_batchmatmul": _transpose_batchmatmul,
    "npu_mla_prolog_v3": _mla_prolog_v3,
    "npu_format_cast": _format_cast,
    "npu_prefetch": lambda a: None,
}
