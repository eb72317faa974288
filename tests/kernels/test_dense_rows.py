"""The kernel of benchmarks/dense_rows.py against float64, on a GPU or in Triton's interpreter."""

import sys
from pathlib import Path

import pytest
import torch
from quantkit_kernels.backends import why_unusable

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from dense_rows import SIZES, RowsPlan, error, multiply, plans_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_size_has_plans_that_compute_all_of_it() -> None:
    for n, k in SIZES.values():
        plans = plans_of(132, n, k)
        assert plans
        for plan in plans:
            assert n % plan.rows == k % plan.features == 0
            assert plan.split <= k // plan.features


@pytest.mark.skipif(why_unusable("rms_norm", "triton", DEVICE) is not None, reason="no GPU with Triton, and not interpreted")
@pytest.mark.parametrize("plan", [RowsPlan(64, 128, 1, 4, 4), RowsPlan(64, 128, 3, 4, 6), RowsPlan(128, 64, 4, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_that_fill_no_tile(dtype: torch.dtype, plan: RowsPlan) -> None:
    rng = torch.Generator().manual_seed(1)
    weight = (torch.randn(256, 1280, generator=rng) / 1280**0.5).to(dtype).to(DEVICE)
    for tokens in (1, 17, 64):
        x = torch.randn(tokens, 1280, generator=rng).to(dtype).to(DEVICE)
        assert error(x, weight, plan) > 0
        assert torch.equal(multiply(x, weight, plan), multiply(x, weight, plan)), "sums of parts are added in their order"
