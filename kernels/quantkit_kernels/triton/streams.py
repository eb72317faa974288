"""Launches of hyper-connections: two before a sublayer and one after it, of any number of tokens.
What is not bfloat16 the reference computes."""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.streams import MixingWeights, StreamProduct
from quantkit_kernels.triton.cards import multiprocessors, overlapped
from quantkit_kernels.triton.launch import by_assembly
from quantkit_kernels.triton.rows import power_of_two, warps_for

_MOST_TOKENS, _STEP, _MOST_SPLIT = 64, 128, 128
"""Tokens and channels that a program multiplies at a time; parts of their channels."""
_BLOCK = 1024


def weigh_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float
) -> tuple[Tensor, MixingWeights]:
    if not _fits(streams):
        return reference.weigh_streams(streams, product, gain, eps)
    tokens, n, hidden = streams.shape
    normed = streams.new_empty(tokens, hidden)
    post = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    mixing = torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)
    _weigh(streams, product, gain, eps, normed, normed, post, mixing, merge=False)
    return normed, MixingWeights(post, mixing if product.steps else None)


def merge_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(streams):
        return reference.merge_streams(streams, product, gain, eps)
    normed, merged = (streams.new_empty(len(streams), streams.shape[2]) for _ in range(2))
    _weigh(streams, product, gain, eps, normed, merged, product.base, product.base, merge=True)
    return normed, merged


def mix_streams(streams: Tensor, output: Tensor, weights: MixingWeights) -> Tensor:
    from quantkit_kernels.triton.streams_kernel import mix

    if not _fits(streams):
        return reference.mix_streams(streams, output, weights)
    streams = streams.contiguous()
    tokens, n, hidden = streams.shape
    mixed, block = torch.empty_like(streams), min(power_of_two(hidden), _BLOCK)
    post, apart = weights.post.contiguous(), weights.mixing is None
    mixing = post if weights.mixing is None else weights.mixing.contiguous()
    mix[(tokens, -(-hidden // block))](
        streams, output.contiguous(), post, mixing, mixed,
        hidden, N=n, WIDTH=power_of_two(n), BLOCK=block, APART=apart, **overlapped(streams.device),
    )  # fmt: skip
    return mixed


def _fits(streams: Tensor) -> bool:
    return streams.dtype == torch.bfloat16 and streams.numel() > 0


def _weigh(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float, *out: Tensor, merge: bool
) -> None:
    from quantkit_kernels.triton.streams_kernel import project, weigh

    device, streams = streams.device, streams.contiguous()
    (tokens, n, hidden), rows = streams.shape, len(product.fn)
    block = min(_MOST_TOKENS, max(16, power_of_two(tokens)))
    tiles, steps = -(-tokens // block), -(-n * hidden // _STEP)
    split = max(1, min(2 * multiprocessors(device) // tiles, steps, _MOST_SPLIT))
    partial = torch.empty(split, tokens, rows + 1, dtype=torch.float32, device=device)
    project[(split, tiles)](
        streams, product.fn.contiguous(), partial, tokens, n * hidden, rows,
        SPLIT=split, ROWS=max(16, power_of_two(rows + 1)), BM=block, BK=_STEP,
        NVIDIA=by_assembly(device), **overlapped(device),
    )  # fmt: skip
    width = power_of_two(hidden)
    weigh[(tokens, 1 if merge else 2)](
        streams, partial, product.base, product.scale, gain.contiguous(), *out, tokens, hidden,
        product.norm_eps, product.eps, eps, product.magnitude,
        N=n, WIDTH=power_of_two(n), SPLIT=split, PARTS=power_of_two(split), BLOCK=width,
        STEPS=product.steps, MERGE=merge, num_warps=warps_for(width), **overlapped(device),
    )  # fmt: skip
