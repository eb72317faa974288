"""Norms, activation, routing, rotary embedding and what attention does before it. Arguments arrive
checked; what the kernels cannot take, such as groups of experts that are no power of two, the
reference computes."""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.codes import CodedKeys, CodedLatents, KeyValues
from quantkit_kernels.gating import SILU, Gating
from quantkit_kernels.paged import Latents, Norms, Rotation
from quantkit_kernels.routing import Routing
from quantkit_kernels.triton.cards import OVERLAPPED, architecture, multiprocessors, overlapped
from quantkit_kernels.triton.dense_plans import is_small
from quantkit_kernels.triton.launch import by_assembly, constants
from quantkit_kernels.triton.rows import power_of_two, warps_for
from quantkit_kernels.triton.small import multiply_small
from quantkit_kernels.weights import MX_GROUP_SIZE
from quantkit_kernels.workspace import workspace

_WIDEST = 1 << 15
"""Numbers of a row that a program holds."""
_HEADS, _ANGLES = 8, 128
GATE_TOKENS, _GATE_ROWS, _GATE_STEP = 64, 16, 128
_CUT = 2048
_PARTS = 128
"""Of a row of logits: torch gives its argmax to few blocks, 27 us for 8 rows of 129,280 on an
H200."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.shape[-1] > _WIDEST or x.numel() == 0:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    normed = torch.empty_like(x)
    _norm(x, x, weight, normed, x, eps, add=False)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.shape[-1] > _WIDEST or x.numel() == 0:
        return reference.add_rms_norm(x, residual, weight, eps)
    x = x.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual.contiguous(), weight, normed, total, eps, add=True)
    return normed, total


def _norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    eps: float,
    add: bool,
) -> None:
    from quantkit_kernels.triton.rows_kernel import add_rms_norm as kernel

    width = x.shape[-1]
    block = power_of_two(width)
    grid = (x.numel() // width,)
    how = {"num_warps": warps_for(block), **overlapped(x.device)}
    kernel[grid](
        x, residual, weight.contiguous(), normed, total, width, eps, ADD=add, BLOCK=block, **how
    )


def silu_and_mul(x: Tensor) -> Tensor:
    return gate_and_mul(x, SILU)


def gate_and_mul(x: Tensor, gating: Gating) -> Tensor:
    from quantkit_kernels.triton.rows_kernel import gate_and_mul as kernel

    width = x.shape[-1] // 2
    if x.numel() == 0:
        return reference.gate_and_mul(x, gating)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], width)
    block = min(power_of_two(width), 1024)
    grid = (y.numel() // width, -(-width // block))
    kernel[grid](x, y, width, BLOCK=block, **constants(gating), **overlapped(x.device))
    return y


_ROTATED_BLOCKS, _ROTATED_ROWS = (16, 32, 64, 128), 16
"""Hadamard matrices that matrix instructions take, and blocks of values in a program."""


def gate_and_rotate(x: Tensor, gating: Gating, block: int) -> Tensor:
    from quantkit_kernels.triton.rows_kernel import gate_and_rotate as kernel

    width = x.shape[-1] // 2
    if x.numel() == 0 or block not in _ROTATED_BLOCKS:
        return reference.gate_and_rotate(x, gating, block)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], width)
    blocks = y.numel() // block
    kernel[(-(-blocks // _ROTATED_ROWS),)](
        x, y, width, blocks, block**-0.5, BLOCK=block, ROWS=_ROTATED_ROWS,
        PARTS=3 if x.dtype == torch.float32 else 2, **constants(gating), **overlapped(x.device),
    )  # fmt: skip
    return y


_MX_GROUPS = 32
"""Of 32 values, in a program."""


def mx_rounded(x: Tensor, bits: int) -> Tensor:
    from quantkit_kernels.triton.rows_kernel import mx_rounded as kernel

    if x.numel() == 0:
        return torch.empty_like(x)
    x = x.contiguous()
    y, groups = torch.empty_like(x), x.numel() // MX_GROUP_SIZE
    mantissa, least, above = (1, 0, 2) if bits == 4 else (3, -6, 8)
    kernel[(-(-groups // _MX_GROUPS),)](
        x, y, groups, MANTISSA=mantissa, LEAST=least, ABOVE=above, SATURATES=bits == 4,
        SIZE=MX_GROUP_SIZE, GROUPS=_MX_GROUPS, **overlapped(x.device),
    )  # fmt: skip
    return y


_SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


def route_chosen(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    from quantkit_kernels.triton.route_kernel import weigh

    tokens, experts, count = len(logits), routing.n_routed_experts, routing.num_experts_per_tok
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    if tokens:
        weigh[(tokens,)](
            logits.contiguous(), ids.contiguous(), weights, experts, routing.routed_scaling_factor,
            EXPERTS=power_of_two(experts), TOP_K=count, COLUMNS=power_of_two(count),
            SCORING=_SCORINGS[routing.scoring_func], NORMED=routing.norm_topk_prob, num_warps=1,
            **overlapped(logits.device),
        )  # fmt: skip
    return weights


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    from quantkit_kernels.triton.route_kernel import route as kernel

    tokens, experts, columns = len(logits), routing.n_routed_experts, routing.columns
    width, grouped = power_of_two(experts), routing.topk_group < routing.n_group
    whole = not grouped or (width == experts and power_of_two(routing.n_group) == routing.n_group)
    if tokens == 0 or not whole:
        return reference.route(logits, bias, routing)
    ids = torch.empty(tokens, columns, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=logits.device)
    kernel[(tokens,)](
        logits.contiguous(), weights if bias is None else bias.contiguous(), ids, weights, experts,
        routing.routed_scaling_factor,
        EXPERTS=width, GROUPS=routing.n_group if grouped else 1,
        TOPK_GROUP=routing.topk_group if grouped else 1,
        TOP_K=routing.num_experts_per_tok, JOINED=routing.num_joined_experts,
        COLUMNS=power_of_two(columns),
        SCORING=_SCORINGS[routing.scoring_func], BIASED=bias is not None,
        NORMED=routing.norm_topk_prob, GATED=routing.joined_gate, num_warps=1,
        **overlapped(logits.device),
    )  # fmt: skip
    return ids, weights


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    return route(float32_linear(x, router), bias, routing)


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    few = x.dtype == torch.bfloat16 and 0 < x.shape[0] <= GATE_TOKENS
    return few_logits(x, weight) if few else reference.float32_linear(x, weight)


def single_logits(x: Tensor, weight: Tensor) -> Tensor | None:
    """`float32_linear` of one token by a small weight, which is read before the token is there;
    None where it is not."""
    outputs, inputs = weight.shape
    if len(x) != 1 or architecture(x.device) not in OVERLAPPED or not is_small(outputs, inputs, 4):
        return None
    return multiply_small(x.contiguous(), weight.contiguous())


def few_logits(x: Tensor, router: Tensor) -> Tensor:
    """x bfloat16 [T, H] @ router float32 [E, H].T in float32, of up to GATE_TOKENS tokens, one at
    least."""
    from quantkit_kernels.triton.gate_kernel import router_logits

    alone = single_logits(x, router)
    if alone is not None:
        return alone
    (tokens, k), experts = x.shape, router.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    tiles, width = -(-experts // _GATE_ROWS), max(16, power_of_two(tokens))
    split = max(1, min(2 * multiprocessors(x.device) // tiles, -(-k // (2 * _GATE_STEP)), 16))
    partial, arrived = workspace(x.device, tiles * split * _GATE_ROWS * width)
    shape = {
        "SPLIT": split,
        "BN": _GATE_ROWS,
        "BM": width,
        "BK": _GATE_STEP,
        "ALONE": tokens == 1,
        "NVIDIA": by_assembly(x.device),
    }
    tensors = (x.contiguous(), router.contiguous(), logits, partial, arrived)
    router_logits[(tiles * split,)](*tensors, tokens, experts, k, **shape, **overlapped(x.device))
    return logits


def cut_in_three(values: Tensor) -> Tensor:
    """values float32 [..] -> bfloat16 [3, ..], which add up to them to the last bit."""
    from quantkit_kernels.triton.gate_kernel import cut_in_three as kernel

    values = values.contiguous()
    parts = torch.empty(3, *values.shape, dtype=torch.bfloat16, device=values.device)
    kernel[(-(-values.numel() // _CUT),)](values, parts, values.numel(), BLOCK=_CUT)
    return parts


def likeliest(logits: Tensor) -> Tensor:
    from quantkit_kernels.triton.likeliest_kernel import of_parts, of_rows

    (rows, width), parts = logits.shape, _PARTS
    if rows == 0:
        return reference.likeliest(logits)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    places, found = (
        values.new_empty(rows, parts, dtype=torch.int32),
        values.new_empty(rows, dtype=torch.int64),
    )
    how = {"num_warps": 4, **overlapped(logits.device)}
    share = -(-width // parts)
    of_parts[(rows, parts)](
        logits.contiguous(),
        values,
        places,
        width,
        share,
        PARTS=parts,
        BLOCK=min(power_of_two(share), 1024),
        **how,
    )
    of_rows[(rows,)](values, places, found, PARTS=parts, **how)
    return found


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    from quantkit_kernels.triton.rope_kernel import rope as kernel

    tokens, heads, width = x.shape
    if x.numel() == 0:
        return reference.rope(x, positions, cos, sin, interleaved)
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    strides = (heads, x.stride(0), x.stride(1))
    tables = (positions.contiguous(), cos.contiguous(), sin.contiguous())
    shape = {"R": width, "WIDTH": power_of_two(width), "HEADS": _HEADS, **overlapped(x.device)}
    kernel[(tokens, -(-heads // _HEADS))](x, *tables, y, *strides, INTERLEAVED=interleaved, **shape)
    return y


def rotary_angles(
    positions: Tensor, frequencies: Tensor, factor: float, group: int
) -> tuple[Tensor, Tensor]:
    from quantkit_kernels.triton.rope_kernel import rotary_angles as kernel

    tokens, pairs = len(positions), len(frequencies)
    both = torch.empty(2, tokens, pairs, dtype=torch.float32, device=positions.device)
    if both.numel():
        kernel[(-(-both[0].numel() // _ANGLES),)](
            positions.contiguous(), frequencies.contiguous(), both[0], both[1], tokens * pairs,
            group, factor, PAIRS=pairs, ANGLES=_ANGLES, num_warps=4, **overlapped(both.device),
        )  # fmt: skip
    return both[0], both[1]


def mla_prepare(
    qkv_a: Tensor, norms: Norms, rotation: Rotation, cache: Latents, slots: Tensor
) -> Tensor:
    from quantkit_kernels.triton.rope_kernel import mla_prepare as kernel

    tokens, q_lora, kv_lora, rotary = (
        qkv_a.shape[0],
        norms.q.shape[0],
        norms.k.shape[0],
        2 * rotation.cos.shape[1],
    )
    q_a = torch.empty(tokens, q_lora, dtype=qkv_a.dtype, device=qkv_a.device)
    if tokens == 0:
        return q_a
    latents, keys, scales = latent_parts(cache, kv_lora)
    tensors = (
        one.contiguous() for one in (qkv_a, norms.q, norms.k, rotation.cos, rotation.sin, slots)
    )
    widths = {
        "Q_WIDTH": power_of_two(q_lora),
        "K_WIDTH": power_of_two(kv_lora),
        "R_WIDTH": power_of_two(rotary),
    }
    kernel[(tokens, 2)](
        *tensors, q_a, latents, keys, scales, latents.stride(1), keys.stride(1), norms.eps,
        torch.finfo(keys.dtype).max,
        Q=q_lora, K=kv_lora, R=rotary, INTERLEAVED=rotation.interleaved, CODES=codes_of(cache),
        **widths, **overlapped(qkv_a.device),
    )  # fmt: skip
    return q_a


def latent_parts(cache: Latents, kv_lora: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, rotary keys and scales, codes as bytes. Without codes the first two are parts of one
    tensor, and scales are nothing."""
    if isinstance(cache, CodedLatents):
        return cache.codes.view(torch.int8), cache.keys, cache.scales
    assert isinstance(cache, Tensor), "one tensor, as cache_layout says"
    return cache[..., :kv_lora], cache[..., kv_lora:], cache


def codes_of(cache: Latents | KeyValues) -> int:
    """CODES of the kernels."""
    return {torch.int8: 1, torch.float8_e4m3fn: 2}.get(cache[0].dtype, 0)


def gqa_prepare(
    qkv: Tensor, norms: Norms | None, rotation: Rotation, cache: KeyValues, slots: Tensor
) -> Tensor:
    from quantkit_kernels.triton.rope_kernel import gqa_prepare as kernel

    kv_heads, width = cache[0].shape[2:]
    tokens, heads = qkv.shape[0], qkv.shape[1] // width - 2 * kv_heads
    q = torch.empty(tokens, heads, width, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    sides = key_sides(cache)
    gains = (qkv, qkv) if norms is None else (norms.q.contiguous(), norms.k.contiguous())
    tensors = (one.contiguous() for one in (rotation.cos, rotation.sin, slots))
    kernel[(tokens, heads + 2 * kv_heads)](
        qkv.contiguous(), *gains, *tensors, q, *sides, heads, kv_heads,
        0.0 if norms is None else norms.eps,
        D=width, R=2 * rotation.cos.shape[1], WIDTH=power_of_two(width),
        INTERLEAVED=rotation.interleaved, NORMED=norms is not None,
        CODES=codes_of(cache), num_warps=1, **overlapped(qkv.device),
    )  # fmt: skip
    return q


def key_sides(cache: KeyValues) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales, codes as bytes; without codes scales are nothing."""
    if isinstance(cache, CodedKeys):
        return (
            cache.keys.view(torch.int8),
            cache.values.view(torch.int8),
            cache.key_scales,
            cache.value_scales,
        )
    return cache[0], cache[1], cache[0], cache[1]
