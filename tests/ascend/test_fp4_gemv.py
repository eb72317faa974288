"""The FP4 product in Ascend C and its NumPy twin: the layout, decoding to the bit, products against
float64 and each other."""

import numpy as np
import pytest
import torch
from ascend import ascendc
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
    scale = [twin.pack_scales(weight.scale.view(torch.uint8).numpy()) for weight in weights]
    whole = [(weight.global_scale * twin.RESCALE).expand(n).numpy() for weight in weights]
    return packed, np.stack(scale), np.stack(whole)


def fp4(n, k, seed):
    """A global scale for every column, as stacked gate and up have them."""
    rng = torch.Generator().manual_seed(seed)
    weight = random_weight("fp4", n, k, rng)
    return weight._replace(global_scale=weight.global_scale * (0.5 + torch.rand(n, generator=rng)))


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


def run(kernel, cores, x, parts, ends, splits):
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


@pytest.mark.parametrize("rows", [1, 4])
def test_a_weight_is_read_once(kernel, rows):
    """Counted while it runs: rows of an expert share it."""

    def read(tiles):
        n, k = 1024, 64 * tiles
        weights = [torch.zeros(2 * tiles * size, dtype=torch.uint8) for size in (16384, 2048)]
        x, y = (torch.zeros(rows, size, dtype=torch.bfloat16) for size in (k, n))
        rest = [torch.zeros(n), torch.tensor([rows]), torch.zeros(2 * 4 * 512), y]
        return ascendc.hbm_read(kernel, 2, 2, [x, *weights, *rest], [1, k, n, 1])

    assert read(6) - read(2) == 4 * 2 * (16384 + 2048)
