"""Every linear of every backend against float64 over the values its codes stand for, on fresh
random inputs."""

import pytest
import torch
from quantkit_kernels import (
    BACKENDS,
    Fp4,
    prepare,
    quantize_rows,
    rms_norm,
    round_to_nvfp4,
    silu_and_mul,
    why_no_rounded_inputs,
)
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.samples import (
    GRIDS,
    MX_GRIDS,
    TOLERANCE,
    distance,
    exact_linear,
    random_weight,
)
from quantkit_kernels.weights import stack

DTYPES = tuple(TOLERANCE)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def skip_unusable(grid, backend, dtype, shape):
    reason = why_unusable(
        f"linear_{grid.split('-')[0]}", backend, torch.device("cpu"), dtype, (shape,)
    )
    if grid == "fp4-w4a4" or grid in MX_GRIDS:
        reason = reason or why_no_rounded_inputs(backend, torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", [*GRIDS, "fp4-w4a4", *MX_GRIDS])
def test_linear_matches_float64(grid, backend, dtype):
    rng = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 48, 256), (3, 208, 384), (17, 64, 128), (4096, 16, 128)):
        skip_unusable(grid, backend, dtype, (n, k))
        weight = random_weight(grid, n, k, rng)
        x = torch.randn(m, k, generator=rng).to(dtype)
        y = prepare(weight, backend=backend, dtype=dtype)(x)
        assert y.dtype == dtype
        assert distance(y, exact_linear(x, weight)) < TOLERANCE[dtype], (m, n, k)


@pytest.mark.parametrize("rows", [3, 2048])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_linear_with_a_bias(grid, backend, rows):
    skip_unusable(grid, backend, torch.bfloat16, (48, 256))
    rng = torch.Generator().manual_seed(3)
    weight, bias = random_weight(grid, 48, 256, rng), 5 * torch.randn(48, generator=rng).bfloat16()
    x = torch.randn(rows, 256, generator=rng).bfloat16()
    y = prepare(weight, backend=backend).biased(x, bias)
    exact = exact_linear(x, weight) + bias.double()
    assert distance(y, exact) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_linear_with_what_is_around_it(grid, backend):
    skip_unusable(grid, backend, torch.bfloat16, (48, 256))
    rng = torch.Generator().manual_seed(4)
    weight = random_weight(grid, 48, 256, rng)
    linear = prepare(weight, backend=backend)
    for tokens in (1, 3):
        x, both, residual = (
            torch.randn(tokens, n, generator=rng).bfloat16() for n in (256, 512, 48)
        )
        gain = 1 + torch.rand(256, generator=rng)
        exact = exact_linear(rms_norm(x, gain, 1e-5), weight)
        assert distance(linear.fused(x, gain, 1e-5), exact) < TOLERANCE[torch.bfloat16]
        exact = residual.double() + exact_linear(silu_and_mul(both), weight)
        assert distance(linear.fused(both, residual=residual), exact) < TOLERANCE[torch.bfloat16]
        for unfit in ({"gain": gain[1:]}, {"residual": residual[:, 1:]}, {"x": x[:, 1:]}):
            with pytest.raises(ValueError, match=next(iter(unfit))):
                linear.fused(**{"x": x, **unfit})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_linear_holds_no_reference_to_the_given_tensors(grid, backend):
    """Overwriting x or rows of a batch changes nothing in an earlier result, and leading dimensions
    are kept."""
    skip_unusable(grid, backend, torch.bfloat16, (32, 128))
    linear = prepare(
        random_weight(grid, 32, 128, torch.Generator().manual_seed(1)), backend=backend
    )
    x = torch.randn(2, 3, 128).bfloat16()
    before = x.clone()
    y = linear(x)
    assert y.shape == (2, 3, 32)
    assert torch.equal(x, before)
    assert torch.equal(linear(x[:0]), y[:0])
    assert linear(x[:, :0]).shape == (2, 0, 32)
    assert linear.nbytes > 0


@pytest.mark.parametrize(
    ("grid", "backend", "bits"),
    [
        ("int4-asym-128", "cpu", 4 + 32 / 128),
        ("fp4", "cpu", 4.5 + 32 / 512),
        ("w8a16-128", "cpu", 8 + 32 / 128),
        ("int4-asym-128", "expanded", 16),
    ],
)
def test_codes_are_held_packed(grid, backend, bits):
    """With the scales, and the global ones of FP4."""
    skip_unusable(grid, backend, torch.bfloat16, (256, 512))
    weight = random_weight(grid, 256, 512, torch.Generator().manual_seed(2))
    assert prepare(weight, backend=backend).nbytes == 256 * 512 * bits / 8


def test_int8_rounds_activations_per_token():
    x = torch.tensor([[127.0, 0.4, -0.6], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.01]])
    codes, scale = quantize_rows(x)
    assert codes.tolist() == [[127, 0, -1], [0, 0, 0], [-127, 63, 0]] or codes.tolist()[2][1] == 64
    assert torch.allclose(scale, torch.tensor([[1.0], [1.0], [0.02]]))


def test_inputs_are_rounded_to_nvfp4():
    """Nearest, halves to the even code; beyond what the divisor is for they saturate."""
    values = torch.tensor(
        [0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, -0.75, 2.6, 0.1, -1.0, 4.0]
    )
    levels, scales = round_to_nvfp4(
        torch.stack([values * 2, values * 512, values * 0]), torch.tensor(1.0)
    )
    assert levels[0, 0].tolist() == [0, 0, 0.5, 1, 1, 2, 2, 4, 4, -4, 6, -1, 3, 0, -1, 4]
    assert scales.flatten().tolist() == [2, 448, 0.125]
    assert levels[1, 0, 8:11].tolist() == [6, -6, 6], "5 * 512 / 448 is beyond 5"
    assert not levels[2].any()


def test_stack_is_both_weights():
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(5, 256, generator=rng)
    for grid in GRIDS:
        first, second = random_weight(grid, 32, 256, rng), random_weight(grid, 64, 256, rng)
        if isinstance(second, Fp4):
            second = second._replace(global_scale=torch.tensor(0.7))
        both = prepare(stack(first, second), backend="reference", dtype=torch.float32)(x)
        parts = [
            prepare(part, backend="reference", dtype=torch.float32)(x) for part in (first, second)
        ]
        assert torch.equal(both, torch.cat(parts, dim=1)), grid
