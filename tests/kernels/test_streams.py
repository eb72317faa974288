"""Hyper-connections of every backend against the arithmetic of the paper in float64."""

import pytest
import torch
from kernel_backends import backends_of, device_of
from kernel_formulas import normed
from quantkit_kernels import StreamProduct, merge_streams, mix_streams, weigh_streams
from quantkit_kernels.samples import TOLERANCE, distance


def exact(streams, product, gain):
    """Input, its weights in the streams, and the matrix, each entry by its own sum; of independent
    streams the matrix that keeps each."""
    tokens, n, _ = streams.shape
    projected = normed(streams.flatten(1), eps=product.norm_eps) @ product.fn.double().T
    sizes = [n, n, n * n] if product.steps else [n, n]
    parts = zip(projected.split(sizes, 1), product.base.split(sizes), product.scale)
    pre, post, *matrix = (part * scale.double() + base for part, base, scale in parts)
    collapsed = torch.einsum("tn,tnh->th", pre.sigmoid() + product.eps, streams.double())
    collapsed, post = normed(collapsed, gain, 1e-5), product.magnitude * post.sigmoid()
    if not product.steps:
        whole = torch.eye(n, dtype=torch.float64, device=streams.device).expand(tokens, n, n)
        return collapsed, post + product.eps, whole
    matrix = matrix[0].view(tokens, n, n).exp()
    matrix = matrix / matrix.sum(2, keepdim=True) + product.eps
    for step in range(2 * product.steps - 1):
        matrix = matrix / (matrix.sum(1 + step % 2, keepdim=True) + product.eps)
    return collapsed, post, matrix


@pytest.mark.parametrize(
    ("tokens", "n", "hidden"), [(1, 4, 256), (5, 3, 200), (70, 4, 96), (2, 2, 1100)]
)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), backends_of("weigh_streams"))
def test_streams(backend, dtype, tokens, n, hidden, apart, poisoned_memory):
    """Of one token, whose product many programs share, and of more than one program's; mixed, and
    independent."""
    device, rows = device_of(backend), 2 * n if apart else n * (2 + n)
    streams = (torch.randn(tokens, n, hidden, device=device) * 3).to(dtype)
    fn = torch.randn(rows, n * hidden, device=device) * (n * hidden) ** -0.5
    base, scale = torch.randn(rows, device=device), torch.tensor([1.0, 0.7, 1.5], device=device)
    gain = torch.randn(hidden, device=device).to(dtype)
    product = StreamProduct(fn, base, scale, 1e-6, 1e-4, 7)
    if apart:
        product = product._replace(scale=scale[:2], steps=0, magnitude=1.5)
    found, weights = weigh_streams(streams, product, gain, 1e-5, backend=backend)
    expected, post, matrix = exact(streams, product, gain)
    assert distance(found, expected) < TOLERANCE[dtype]
    # Not rounded: they are float32 whatever the streams are.
    assert distance(weights.post, post) < TOLERANCE[torch.float32]
    if apart:
        assert weights.mixing is None
    else:
        assert distance(weights.mixing, matrix) < TOLERANCE[torch.float32]
    output = torch.randn(tokens, hidden, device=device).to(dtype)
    mixed = mix_streams(streams, output, weights, backend=backend)
    added = torch.einsum("tij,tih->tjh", matrix, streams.double())
    assert distance(mixed, added + post[..., None] * output[:, None]) < TOLERANCE[dtype]
    end = product._replace(fn=fn[:n], base=base[:n], scale=scale[:1])
    found, merged = merge_streams(streams, end, gain, 1e-5, backend=backend)
    assert distance(found, expected) < TOLERANCE[dtype]
    assert distance(normed(merged, gain, 1e-5), found) < TOLERANCE[dtype]


def test_no_tokens_are_merged():
    product = StreamProduct(torch.zeros(4, 64), torch.zeros(4), torch.ones(1), 1e-6, 1e-6, 20)
    found = merge_streams(torch.zeros(0, 4, 16), product, torch.ones(16), 1e-6)
    assert [one.shape for one in found] == [(0, 16), (0, 16)]
