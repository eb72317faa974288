"""The int4 product in Ascend C, whose vector cores decode for the cube, and its NumPy twin: against
float64 and each other."""

import numpy as np
import pytest
import torch
from ascend import ascendc
from ascend.guard import sparse


@pytest.fixture(scope="module")
def twin():
    return ascendc.twin("int4_grouped")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return ascendc.compiled(
        ascendc.CPU / "launch_int4_grouped.cpp", tmp_path_factory.mktemp("ascendc")
    )


def random(n, k, seed):
    """Codes [N, K] of -8..7, scales and zero points [N, K / 128]."""
    rng = np.random.default_rng(seed)
    scale = (rng.uniform(0.5, 2, (n, k // 128)) / 100).astype(np.float16).astype(np.float32)
    return (
        rng.integers(-8, 8, (n, k)).astype(np.int8),
        scale,
        rng.integers(-8, 8, (n, k // 128)).astype(np.float32),
    )


def packed(twin, weights):
    return np.stack([twin.pack(one[0]) for one in weights]), np.stack(
        [twin.pack_parameters(*one[1:]) for one in weights]
    )


def rows(count, k):
    """One of them zeros, one with a value far above its group's others."""
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(count))
    x[0, :128] = 0
    x[-1, 3] = 300
    return x.bfloat16()


def decoded(weight):
    codes, scale, zero = (one.astype(np.float64) for one in weight)
    return (codes - zero.repeat(128, axis=1)) * scale.repeat(128, axis=1)


def test_digits_are_within_their_bound(twin):
    """At most max|x| / 127 / 256 of a group off, and a rounding of float32 or two."""
    x = rows(9, 1024).float().numpy()
    d1, d0, factors, sums = twin.digits(x)
    groups = [one.reshape(9, -1, 128).astype(np.float64) for one in (x, d1, d0)]
    near = factors[..., None].astype(np.float64) * 16 * (groups[1] + groups[2] / 128)
    largest = np.abs(groups[0]).max(axis=-1, keepdims=True)
    assert (np.abs(near - groups[0]) <= largest * (1 / (127 * 256) + 2**-21)).all()
    assert np.array_equal(sums, (groups[1] + groups[2] / 128).sum(axis=-1))


def test_experts_of_one_rank_against_float64(twin):
    """Gate and up of R1's experts on one of 8 ranks: within the digits' bound, and one rounding to
    bf16."""
    weights, x = [random(512, 7168, seed) for seed in range(3)], rows(3, 7168)
    ends = [1, 1, 3]
    y = twin.multiply(x.float().numpy(), *packed(twin, weights), np.array(ends)).astype(np.float64)
    for row, weight in enumerate((weights[0], weights[2], weights[2])):
        values, exact_x = decoded(weight), x[row].double().numpy()
        largest = np.abs(exact_x).reshape(-1, 128).max(axis=1).repeat(128)
        bound = np.abs(values) @ largest * (1 / (127 * 256) + 2**-21)
        exact = values @ exact_x
        rounding = np.abs(exact) * 2.0**-8 + np.abs(values) @ np.abs(exact_x) * 2.0**-18
        assert (np.abs(y[row] - exact) <= bound + rounding).all()


def run(kernel, cores, order, x, parts, ends):
    count, k, n = len(x), x.shape[1], parts[0].shape[1] * 256
    scratch = [
        ascendc.poison(count, 2, k, dtype=torch.int8),
        ascendc.poison(count, 2, k // 128, 8, dtype=torch.float32),
        ascendc.poison(cores, 4, 32768, dtype=torch.int8),
        ascendc.poison(cores, 2, 16, 256, dtype=torch.int32),
    ]
    y = ascendc.poison(count, n, dtype=torch.bfloat16)
    ascendc.launch(
        kernel, cores, order, [x, *parts, torch.tensor(ends), *scratch, y], [count, len(ends), k, n]
    )
    return y


@pytest.mark.parametrize("order", ascendc.ORDERS)
@pytest.mark.parametrize(("cores", "k"), [(2, 640), (1, 128), (3, 2304)])
def test_the_kernel_gives_the_twins_bits(twin, kernel, cores, k, order):
    """Experts of no, one, three and eleven rows, column tiles, more slots than groups and fewer,
    digits of a ragged chunk."""
    ends = [1, 1, 4, 15] if k < 2304 else [1, 1, 3, 3]
    weights = [random(512, k, seed) for seed in range(4)]
    parts, x = packed(twin, weights), rows(ends[-1], k)
    y = run(kernel, cores, order, x, [*map(torch.from_numpy, parts)], ends)
    expected = torch.from_numpy(twin.multiply(x.float().numpy(), *parts, np.array(ends))).bfloat16()
    assert torch.equal(y, expected)


def test_offsets_past_eight_gib(twin, kernel):
    """The last of so many experts that its weights lie beyond 2^32 words."""
    weight, parameters = map(torch.from_numpy, packed(twin, [random(256, 128, seed=1)]))
    expert = (1 << 32) // (weight[0].numel() // 2) + 2
    rooms = [sparse(expert + 1, one) for one in (weight, parameters)]
    for room, one in zip(rooms, (weight, parameters)):
        room[expert] = one[0]
    x, ends = rows(1, 128), [0] * expert + [1]
    x[0] = torch.arange(128)
    y = run(kernel, 1, 0, x, rooms, ends)
    expected = twin.multiply(x.float().numpy(), weight.numpy(), parameters.numpy(), np.array([1]))
    assert torch.equal(y, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("rows", [1, 8])
def test_a_weight_is_read_once(kernel, rows):
    """Counted while it runs: rows of an expert share it."""
    groups = 16

    def read(tiles):
        n, k = tiles * 256, groups * 128
        sizes = [tiles * groups * size for size in (16384, 1024)]
        scratch = (rows * 2 * k, rows * 2 * groups * 32, 4 * 32768, 2 * 16 * 256 * 4, rows * n * 2)
        weight, parameters, *rest = (
            torch.zeros(size, dtype=torch.uint8) for size in (*sizes, *scratch)
        )
        x, ends = torch.ones(rows, k, dtype=torch.bfloat16), torch.tensor([rows])
        operands = [x, weight, parameters, ends, *rest]
        return ascendc.hbm_read(kernel, 1, 3, operands, [rows, 1, k, n])

    assert read(2) - read(1) == groups * (16384 + 1024)
