"""Launches of linear attention by a gated delta rule: one for a decode step, four for prompts."""

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.delta import CHUNK, DeltaInputs, DeltaSpans, DeltaStates, DeltaWeights
from quantkit_kernels.triton.cards import overlapped
from quantkit_kernels.triton.launch import by_assembly
from quantkit_kernels.triton.rows import power_of_two

_LEAST = 16
"""Rows and columns of a product."""
_BLOCK = 32
"""Channels of the values that a program passes through the chunks."""
_HEADS = 8
_STEP_WARPS = 4
"""Of a head of 128 x 128: 5.5 us for one row on an H200, 9.8 with 8 and 14 with 16."""


def delta_step(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    places: Tensor,
    positions: Tensor,
) -> Tensor:
    from quantkit_kernels.triton.delta_kernel import delta_step as kernel

    rows, sizes = len(inputs.q), _sizes(inputs)
    heads = len(weights.speed)
    out = inputs.q.new_empty(rows, heads * sizes["V"])
    if rows == 0:
        return out
    warps = min(max(sizes["D_WIDTH"] * sizes["V_WIDTH"] >> 10, 1), _STEP_WARPS)
    kernel[(rows, heads)](
        *inputs, *(one for side in inputs[:4] for one in side.stride()[:-1]),
        *inputs.decay.stride()[:3], *inputs.rate.stride(),
        *_contiguous(weights.convolution, weights.speed, weights.bias, weights.norm),
        *states, *_contiguous(places, positions), out, states.tokens.shape[1],
        inputs.q.shape[1], weights.eps, weights.lower, BOUNDED=weights.lower < 0,
        K=weights.convolution.shape[1], BY_CHANNEL=inputs.decay.dim() == 4,
        SIGMOID=weights.sigmoid, num_warps=warps, **sizes, **overlapped(out.device),
    )  # fmt: skip
    return out


def delta_prefill(
    inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, spans: DeltaSpans
) -> Tensor:
    from quantkit_kernels.triton import delta_kernel as kernels

    (rows, groups, _), heads, device = inputs.q.shape, len(weights.speed), inputs.q.device
    out = inputs.q.new_empty(rows, heads * inputs.v.shape[3])
    if rows == 0:
        return out
    if out.dtype == torch.float32:  # more exact than the matrix instructions
        return reference.delta_prefill(inputs, weights, states, spans)
    fast = by_assembly(device)
    _, sequences, chunks = spans
    sizes, overlap = _sizes(inputs), overlapped(device)
    by_head = {
        "R": sizes["R"],
        "D": sizes["D"],
        "BY_CHANNEL": inputs.decay.dim() == 4,
        "CHUNK": CHUNK,
    }
    places, kernel = states.tokens.shape[1], weights.convolution.shape[1]

    def room(*shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=torch.float32, device=device)

    queries, keys = room(groups, sizes["D"]), room(groups, sizes["D"])
    values, attended = room(heads, sizes["V"]), room(heads, sizes["V"])
    past = room(heads, *inputs.decay.shape[3:])
    solved, scores = room(heads, CHUNK), room(heads, CHUNK)
    kernels.convolve_prompts[(len(chunks), 2 * groups + heads)](
        *inputs[:3], *(one for side in inputs[:3] for one in side.stride()[:-1]),
        weights.convolution.contiguous(), states.recent, states.tokens, sequences, chunks, queries,
        keys, values, places, groups,
        K=kernel, K_WIDTH=power_of_two(kernel), CHUNK=CHUNK, **sizes, **overlap,
    )  # fmt: skip
    kernels.solve_chunks[(len(chunks), heads)](
        queries, keys, *inputs[4:], *inputs.decay.stride()[:3], *inputs.rate.stride(),
        *_contiguous(weights.speed, weights.bias), sequences, chunks, past, solved, scores, groups,
        weights.lower,
        D_WIDTH=sizes["D_WIDTH"], BOUNDED=weights.lower < 0, PRECISION="tf32x3" if fast else "ieee", **by_head, **overlap,
    )  # fmt: skip
    part = sizes["D_WIDTH"] if sizes["D_WIDTH"] < 128 else sizes["D_WIDTH"] // 2
    block = min(_BLOCK, sizes["V_WIDTH"])
    kernels.pass_chunks[(len(sequences), heads, -(-sizes["V"] // block))](
        queries, keys, values, past, solved, scores, states.memory, states.tokens, sequences,
        attended, places, groups,
        V=sizes["V"], PART=part, BLOCK=block,
        PRECISION="tf32" if fast else "ieee", num_stages=1, **by_head, **overlap,
    )  # fmt: skip
    kernels.norm_and_gate[(rows, -(-heads // _HEADS))](
        attended, inputs.gate, *inputs.gate.stride()[:3], weights.norm.contiguous(), out, heads,
        weights.eps,
        R=sizes["R"], V=sizes["V"], V_WIDTH=sizes["V_WIDTH"], HEADS=_HEADS,
        SIGMOID=weights.sigmoid, **overlap,
    )  # fmt: skip
    return out


def _sizes(inputs: DeltaInputs) -> dict[str, Any]:
    key, (shared, value) = inputs.q.shape[2], inputs.v.shape[2:]
    widths = (max(power_of_two(width), _LEAST) for width in (key, value))
    return dict(zip(("R", "D", "V", "D_WIDTH", "V_WIDTH"), (shared, key, value, *widths)))


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.contiguous() for one in tensors)
