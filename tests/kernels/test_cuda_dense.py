"""Products of a few tokens by large weights of 16 bits on a CUDA device, against float64."""

import pytest
import torch
from quantkit_kernels import Dense, prepare
from quantkit_kernels.backends import choose, why_unusable
from quantkit_kernels.cuda.linears.dense import LEAST_ROWS, MOST_TOKENS, split_of
from quantkit_kernels.samples import TOLERANCE, distance

DEVICE = torch.device("cuda")
REASON = why_unusable("linear_dense", "cuda", DEVICE, torch.bfloat16)
on_card = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@on_card
@pytest.mark.usefixtures("poisoned_memory")
# R1's head as one of four and of eight; rows that fill no block; few groups, of which not every warp has one.
@pytest.mark.parametrize(("rows", "width"), [(32320, 7168), (16160, 7168), (20011, 4096), (151936, 1024), (16384, 128), (24001, 384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_exact_enough(rows: int, width: int, dtype: torch.dtype) -> None:
    rng = torch.Generator(DEVICE).manual_seed(rows)
    weight = torch.randn(rows, width, generator=rng, device=DEVICE).to(dtype) / width**0.5
    linear = prepare(Dense(weight), backend="cuda", dtype=dtype)
    x = torch.randn(MOST_TOKENS + 1, width, generator=rng, device=DEVICE).to(dtype)
    exact = x.double() @ weight.double().T
    assert distance(linear(x), exact) < TOLERANCE[dtype]
    most = linear(x[:MOST_TOKENS])
    assert distance(most, exact[:MOST_TOKENS]) < TOLERANCE[dtype]
    for tokens in (1, 2, 7, 8, 9, 15):
        assert torch.equal(linear(x[:tokens]), most[:tokens]), "a token's results are its own"
    assert torch.equal(linear(x[3:5, None]), most[3:5, None])


@on_card
@pytest.mark.usefixtures("poisoned_memory")
def test_chains_read_what_the_launch_before_wrote() -> None:
    """In a graph, where a product asks for its weights before its tokens are there: replayed over other tokens."""
    rng = torch.Generator(DEVICE).manual_seed(1)
    up = prepare(Dense(torch.randn(LEAST_ROWS, 512, generator=rng, device=DEVICE).bfloat16() / 512**0.5), backend="cuda")
    wide = prepare(Dense(torch.randn(20000, LEAST_ROWS, generator=rng, device=DEVICE).bfloat16() / LEAST_ROWS**0.5), backend="cuda")
    x = torch.randn(8, 512, generator=rng, device=DEVICE).bfloat16()
    wide(up(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = wide(up(x))
    for _ in range(5):
        x.copy_(torch.randn(8, 512, generator=rng, device=DEVICE).bfloat16())
        graph.replay()
        assert torch.equal(y, wide(up(x)))


@on_card
def test_smaller_weights_are_left_to_torch() -> None:
    assert choose("linear_dense", "auto", DEVICE, torch.bfloat16, ((LEAST_ROWS, 1024),)) == "cuda"
    for rows, width, dtype in (
        (LEAST_ROWS - 1, 1024, torch.bfloat16),
        (LEAST_ROWS, 1000, torch.bfloat16),
        (LEAST_ROWS, 1024, torch.float32),
    ):
        assert choose("linear_dense", "auto", DEVICE, dtype, ((rows, width),)) == "expanded"


def test_warps_along_k_are_as_many_as_fill_a_card() -> None:
    assert [split_of(rows) for rows in (151936, 32320, 16160, 8080, 1000, 16)] == [1, 1, 2, 4, 16, 16]
