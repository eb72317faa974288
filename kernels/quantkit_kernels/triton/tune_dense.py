"""Measures plans of products of few rows by 16-bit weights, compared with the vendor's library."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels import rms_norm
from quantkit_kernels.timing import copies_beyond_cache, seconds_in_turns
from quantkit_kernels.triton.cards import architecture, multiprocessors, shared_bytes
from quantkit_kernels.triton.dense_linear import multiply_rows
from quantkit_kernels.triton.dense_plans import DenseRowsPlan, dense_candidates

ROWS = (1, 8, 16, 32, 64)
"""Of tokens."""
_EPS = 1e-6


def tune_dense(
    n: int,
    k: int,
    device: torch.device,
    compile_all: Callable[[Callable[..., None], list[tuple[DenseRowsPlan, int]]], object],
) -> Iterator[tuple[int, list[tuple[float, DenseRowsPlan | None]]]]:
    """Of every number of rows the seconds of each candidate, the fastest first; None is the
    library.

    What is timed is a norm and the product, as a step has them: one product after another would
    begin while its own like ends.
    """
    plans = dense_candidates(multiprocessors(device), n, k, shared_bytes(architecture(device)))
    compile_all(
        _compile,
        [(plan, width) for plan in plans for width in sorted({max(16, rows) for rows in ROWS})],
    )
    rng = torch.Generator(device).manual_seed(0)
    copies = copies_beyond_cache(2 * n * k, device)
    weights = [
        (torch.randn(n, k, generator=rng, device=device) / k**0.5).bfloat16() for _ in range(copies)
    ]
    gain = torch.ones(k, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        x = torch.randn(rows, k, generator=rng, device=device).bfloat16()
        options: list[DenseRowsPlan | None] = [*plans, None]
        sides = [
            [partial(_normed, x, gain, weight, plan) for weight in weights] for plan in options
        ]
        times = seconds_in_turns(sides, device)
        yield rows, sorted(zip(times, options, strict=True), key=lambda one: one[0])


def _normed(x: Tensor, gain: Tensor, weight: Tensor, plan: DenseRowsPlan | None) -> Tensor:
    normed = rms_norm(x, gain, _EPS)
    return F.linear(normed, weight) if plan is None else multiply_rows(normed, weight, plan)


def _compile(what: tuple[DenseRowsPlan, int]) -> None:
    """On a weight of one tile and as many steps as a program takes."""
    plan, rows = what
    k, device = plan.features * 4 * plan.split, torch.device("cuda")
    x, weight = (
        torch.zeros(count, k, dtype=torch.bfloat16, device=device) for count in (rows, plan.rows)
    )
    multiply_rows(x, weight, plan)
    torch.cuda.synchronize()
