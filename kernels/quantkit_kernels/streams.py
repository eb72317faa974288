"""Hyper-connections (arXiv 2512.24880): n residual streams, weighed before each sublayer and mixed
after it.

A small linear over the n streams of a token, normed together, gives the weight of each stream in
the sublayer's input, that of the sublayer's output in each stream, and a matrix that mixes the
streams, normalized towards doubly stochastic by Sinkhorn iterations. Where streams are independent
there is no matrix: each keeps its own and adds the sublayer's output. Arithmetic is float32.
Symbols: T tokens, H hidden_size, n streams.
"""

from typing import NamedTuple

from torch import Tensor, float32

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor


class StreamProduct(NamedTuple):
    """Parameters of the linear and of what follows it. fn float32 [(2 + n) n, n H], with the gain
    of the norm before it; base float32 [(2 + n) n]; scale float32 [3]: of weights in the input,
    weights of the output, and the matrix. Of independent streams: fn [2 n, n H], base [2 n], scale
    [2]. Of a merge: fn [n, n H], base [n], scale [1]. norm_eps: of the norm; eps: added in the
    iterations and to stream weights, of independent streams to those of the output, too; steps:
    iterations, 0 for independent streams; magnitude: most that a weight of the output is."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    steps: int
    magnitude: float = 2.0


class MixingWeights(NamedTuple):
    """post float32 [T, n]: weight of the sublayer's output in each stream. mixing float32 [T, n,
    n]: the new stream j is the sum over i of mixing[i, j] times stream i; None of independent
    streams."""

    post: Tensor
    mixing: Tensor | None


def weigh_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, MixingWeights]:
    """streams float [T, n, H], gain float [H] -> the sublayer's input [T, H] of streams' dtype,
    normed with gain and eps, and the weights for `mix_streams`."""
    n = streams.shape[1]
    _check(streams, product, gain, *((n * (2 + n), 3) if product.steps else (2 * n, 2)))
    found = backends.find("weigh_streams", backend, streams.device)
    result: tuple[Tensor, MixingWeights] = found.weigh_streams(streams, product, gain, eps)
    return result


def merge_streams(
    streams: Tensor, product: StreamProduct, gain: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """As `weigh_streams`, after the last layer -> [T, H] normed, and before the norm."""
    _check(streams, product, gain, streams.shape[1], 1)
    found = backends.find("merge_streams", backend, streams.device)
    normed, merged = found.merge_streams(streams, product, gain, eps)
    return normed, merged


def mix_streams(
    streams: Tensor, output: Tensor, weights: MixingWeights, *, backend: str = "auto"
) -> Tensor:
    """streams float [T, n, H] before a sublayer and its output [T, H] of the same dtype -> the
    streams after it."""
    tokens, n, hidden = streams.shape
    check_tensor("streams", streams, (None, None, None), FLOAT_DTYPES)
    check_tensor("output", output, (tokens, hidden), (streams.dtype,))
    check_tensor("post", weights.post, (tokens, n), (float32,))
    if weights.mixing is not None:
        check_tensor("mixing", weights.mixing, (tokens, n, n), (float32,))
    found = backends.find("mix_streams", backend, streams.device)
    result: Tensor = found.mix_streams(streams, output, weights)
    return result


def _check(streams: Tensor, product: StreamProduct, gain: Tensor, rows: int, scales: int) -> None:
    check_tensor("streams", streams, (None, None, None), FLOAT_DTYPES)
    check_tensor("fn", product.fn, (rows, streams.shape[1] * streams.shape[2]), (float32,))
    check_tensor("base", product.base, (rows,), (float32,))
    check_tensor("scale", product.scale, (scales,), (float32,))
    check_tensor("gain", gain, (streams.shape[2],), FLOAT_DTYPES)
