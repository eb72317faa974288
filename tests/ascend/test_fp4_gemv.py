"""The FP4 product in Ascend C and its NumPy twin: the layout, decoding to the bit, products against
float64 and each other."""

import numpy as np
import pytest
import torch
from ascend import ascendc, cycles
from ascend.guard import sparse
from quantkit_kernels import Fp4, dequantize
from quantkit_kernels.samples import distance, random_weight


@pytest.fixture(scope="module")
def twin():
    return ascendc.twin("fp4_gemv")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return ascendc.compiled(ascendc.CPU / "launch_fp4_gemv.cpp", tmp_path_factory.mktemp("ascendc"))


def operands(twin, weights):
    n = weights[0].codes.shape[0]
    packed = np.stack([twin.pack(weight.codes.numpy()) for weight in weights])
    scale = np.stack(
        [twin.pack_scales(weight.scale.view(torch.uint8).numpy()) for weight in weights]
    )
    return (
        packed,
        scale,
        np.stack([(weight.global_scale * twin.RESCALE).expand(n).numpy() for weight in weights]),
    )


def fp4(n, k, seed):
    """A global scale for every column, as stacked gate and up have them."""
    rng = torch.Generator().manual_seed(seed)
    weight = random_weight("fp4", n, k, rng)
    return weight._replace(global_scale=weight.global_scale * (0.5 + torch.rand(n, generator=rng)))


def test_where_a_code_lies(twin):
    """k = 64 K3 + 16 K2 + 8 K1 + K0 in nibble K2, n = 512 N3 + 16 N1 + N0; a tile is one run."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (1024, 192)).astype(np.uint8)
    packed = twin.pack(codes)
    assert packed.shape == (2, 3, 8192)
    for n, k in ((0, 0), (1, 0), (16, 0), (5, 7), (511, 63), (512, 64), (1023, 191), (700, 100)):
        word = packed[
            n // 512, k // 64, ((k // 8 % 2 * 32 + n % 512 // 16) * 8 + k % 8) * 16 + n % 16
        ]
        assert word >> 4 * (k // 16 % 4) & 15 == codes[n, k], (n, k)


def test_every_code_under_every_scale_is_exact(twin):
    """One k at a time: y is a column of W, exact in float32."""
    scales = torch.arange(1, 127, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(512, 4)
    weight = Fp4(
        codes,
        scales.repeat(17)[: 512 * 4].reshape(512, 4).view(torch.float8_e4m3fn),
        torch.tensor(0.75),
    )
    packed, scale, global_scale = operands(twin, [weight])
    y = twin.gemv(np.eye(64, dtype=np.float32), packed, scale, global_scale, np.array([64]))
    assert np.array_equal(y.T.astype(np.float64), dequantize(weight, torch.float64).numpy())


def test_experts_of_one_rank(twin):
    """Gate and up of R1's experts on one of 8 ranks [512, 7168]; an expert without rows."""
    weights = [fp4(512, 7168, seed) for seed in range(3)]
    x = torch.randn(4, 7168, generator=torch.Generator().manual_seed(9)).bfloat16()
    y = twin.gemv(x.float().numpy(), *operands(twin, weights), np.array([1, 1, 4]), splits=7)
    exact = torch.stack(
        [
            x[row].double() @ dequantize(weights[expert], torch.float64).T
            for row, expert in enumerate((0, 2, 2, 2))
        ]
    )
    assert distance(torch.from_numpy(y), exact) < 1e-6


def test_a_swapped_nibble_or_group_is_seen(twin):
    weight = fp4(512, 128, seed=1)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed, scale, global_scale = operands(twin, [weight])
    exact = x.double() @ dequantize(weight, torch.float64).T
    swapped = packed >> 4 & 0x0F0F | (packed & 0x0F0F) << 4
    for codes, scales, near in (
        (packed, scale, True),
        (swapped, scale, False),
        (packed, np.roll(scale, 1, axis=3), False),
    ):
        assert (
            distance(
                torch.from_numpy(
                    twin.gemv(x.float().numpy(), codes, scales, global_scale, np.array([1]))
                ),
                exact,
            )
            < 1e-6
        ) == near


def run(
    kernel,
    cores,
    x,
    parts,
    ends,
    splits,
):
    """y bf16 [R, N] of the source. parts: weight, scale, global scale."""
    k, n = x.shape[1], parts[2].shape[1]
    blocks = sum(-(-(last - first) // 4) for first, last in zip([0, *ends[:-1]], ends))
    partial = ascendc.poison(blocks, n // 512, splits, 4, 512, dtype=torch.float32)
    y = ascendc.poison(len(x), n, dtype=torch.bfloat16)
    ascendc.launch(
        kernel, cores, 0, [x, *parts, torch.tensor(ends), partial, y], [len(ends), k, n, splits]
    )
    return y


@pytest.mark.parametrize(("cores", "splits"), [(5, 1), (3, 3), (48, 3)])
def test_the_kernel_gives_the_twins_bits(twin, kernel, cores, splits):
    """Every stride, mask and offset of the Ascend C source: column tiles, experts of no, one, three
    and six rows, split sums."""
    n, k = 1024, 192
    weights, ends = [fp4(n, k, seed) for seed in range(5)], [1, 1, 4, 4, 10]
    parts = operands(twin, weights)
    x = torch.randn(10, k, generator=torch.Generator().manual_seed(9)).bfloat16()
    y = run(kernel, cores, x, [*map(torch.from_numpy, parts)], ends, splits)
    expected = torch.from_numpy(twin.gemv(x.float().numpy(), *parts, np.array(ends), splits=splits))
    assert torch.equal(y, expected.bfloat16())


def test_offsets_past_four_gib(twin, kernel):
    """The last of so many experts that its scales lie beyond 2^32 bytes, and its weights eight
    times as far."""
    n, k = 512, 64
    weight, scale, global_scale = map(torch.from_numpy, operands(twin, [fp4(n, k, seed=1)]))
    expert = (1 << 32) // scale[0].numel() + 2
    rooms = [sparse(expert + 1, one) for one in (weight.view(torch.int16), scale, global_scale)]
    for room, one in zip(rooms, (weight.view(torch.int16), scale, global_scale)):
        room[expert] = one[0]
    x = torch.randn(1, k, generator=torch.Generator().manual_seed(9)).bfloat16()
    ends = torch.zeros(expert + 1, dtype=torch.int64)
    ends[expert] = 1
    y = run(kernel, 1, x, rooms, ends.tolist(), 1)
    expected = twin.gemv(
        x.float().numpy(), weight.numpy(), scale.numpy(), global_scale.numpy(), np.array([1])
    )
    assert torch.equal(y, torch.from_numpy(expected).bfloat16())


def test_what_bounds_it(kernel):
    """Counted while it runs: the vector cores; four rows take less than twice one row's time, for
    they share what is decoded."""
    one, four = cycles.fp4_item(kernel, 1, 112), cycles.fp4_item(kernel, 4, 112)
    assert one.longest(waits=False)[1] == four.longest(waits=False)[1] == "vector"
    assert one.hbm == four.hbm == 2 * 112 * (16384 + 2048) / cycles.HBM
    assert four.vector < 2 * one.vector


@pytest.mark.parametrize("name", ["fp4_gemv", "int4_grouped"])
def test_the_source_says_what_it_was_not(name):
    assert "NEVER COMPILED FOR A DEVICE" in (ascendc.SOURCES / f"{name}.cpp").read_text()
