"""The Ascend C kernel and its NumPy twin: the layout byte for byte, decoding to the bit, products against float64 and each other."""

import ctypes
import hashlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from ascend.guard import run_guarded, sparse
from quantkit_kernels import Fp4, dequantize
from quantkit_kernels.samples import distance, random_weight

SOURCES = Path(__file__).parents[2] / "kernels" / "ascendc"
# sha256 of the published kernels' own repacking of byte[n][k2] = (7 n + 13 k2) % 256, N = 256, K = 64, low nibble the even k.
PUBLISHED_LAYOUT = "d6c2bccedc6f143e93090b0db11c64376994c434831f808fac54d1fc07168afd"


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp4_gemv", SOURCES / "fp4_gemv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operands(twin: ModuleType, weights: list[Fp4]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = weights[0].codes.shape[0]
    packed = np.stack([twin.pack(weight.codes.numpy()) for weight in weights])
    scale = np.stack([weight.scale.view(torch.uint8).T.contiguous().numpy() for weight in weights])
    return packed, scale, np.stack([(weight.global_scale * twin.RESCALE).expand(n).numpy() for weight in weights])


def fp4(n: int, k: int, seed: int) -> Fp4:
    weight = random_weight("fp4", n, k, torch.Generator().manual_seed(seed))
    assert isinstance(weight, Fp4)
    return weight


def test_layout_is_the_published_one(twin: ModuleType) -> None:
    bytes_ = (7 * np.arange(256)[:, None] + 13 * np.arange(32)[None, :]) % 256
    codes = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(256, 64).astype(np.uint8)
    packed = twin.pack(codes)
    assert packed[:8].tolist() == [112, 94, 60, 26, 0, 16, 33, 50]
    assert hashlib.sha256(packed.tobytes()).hexdigest() == PUBLISHED_LAYOUT
    assert np.array_equal(twin.unpack(packed, 256, 64), codes)


def test_layout_comes_back_over_several_tiles(twin: ModuleType) -> None:
    codes = fp4(768, 192, seed=0).codes.numpy()
    assert np.array_equal(twin.unpack(twin.pack(codes), 768, 192), codes)


def test_every_code_under_every_scale_is_exact(twin: ModuleType) -> None:
    """One k at a time: y is a column of W, exact in float32."""
    scales = torch.arange(1, 127, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 4)
    weight = Fp4(codes, scales.repeat(9)[: 256 * 4].reshape(256, 4).view(torch.float8_e4m3fn), torch.tensor(0.75))
    packed, scale, global_scale = operands(twin, [weight])
    y = twin.gemv(np.eye(64, dtype=np.float32), packed, scale, global_scale, np.zeros(64, dtype=np.int32))
    assert np.array_equal(y.T.astype(np.float64), dequantize(weight, torch.float64).numpy())


@pytest.mark.parametrize("splits", [1, 7])
def test_experts_of_one_rank(twin: ModuleType, splits: int) -> None:
    """Gate and up of R1's experts on one of 8 ranks [512, 7168], two tokens of two experts each, K split over cores."""
    weights = [fp4(512, 7168, seed) for seed in range(3)]
    x = torch.randn(2, 7168, generator=torch.Generator().manual_seed(9)).bfloat16()
    experts = np.array([2, 0, 1, 2], dtype=np.int32)
    y = twin.gemv(x.float().numpy(), *operands(twin, weights), experts, rows_per_x=2, splits=splits)
    exact = torch.stack([x[row // 2].double() @ dequantize(weights[expert], torch.float64).T for row, expert in enumerate(experts)])
    assert distance(torch.from_numpy(y), exact) < 1e-6


def test_a_swapped_nibble_or_group_is_seen(twin: ModuleType) -> None:
    weight = fp4(256, 128, seed=1)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed, scale, global_scale = operands(twin, [weight])
    expert = np.zeros(1, dtype=np.int32)
    exact = x.double() @ dequantize(weight, torch.float64).T
    swapped = packed >> 4 | packed << 4
    assert distance(torch.from_numpy(twin.gemv(x.float().numpy(), packed, scale, global_scale, expert)), exact) < 1e-6
    assert distance(torch.from_numpy(twin.gemv(x.float().numpy(), swapped, scale, global_scale, expert)), exact) > 0.1
    assert distance(torch.from_numpy(twin.gemv(x.float().numpy(), packed, np.roll(scale, 1, axis=1), global_scale, expert)), exact) > 0.1


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """fp4_gemv.cpp itself, compiled over a few hundred lines that execute its vector instructions on the CPU."""
    library = tmp_path_factory.mktemp("ascendc") / "fp4_gemv.so"
    options = ["-std=c++17", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-I", str(Path(__file__).with_name("ascendc_on_cpu"))]
    subprocess.run(["g++", *options, str(SOURCES / "fp4_gemv.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def launch(kernel: ctypes.CDLL, cores: int, operands: list[torch.Tensor], *sizes: int) -> None:
    """All cores, one after the other, the operands between guard pages; what breaks a rule of the header ends the process that runs it."""

    def run(pointers: list[int]) -> None:
        for core in range(cores):
            kernel.set_core(core, cores)
            kernel.fp4_gemv(*map(ctypes.c_void_p, pointers), *map(ctypes.c_uint32, sizes))

    run_guarded(run, operands)


@pytest.mark.parametrize(("cores", "splits"), [(1, 1), (5, 1), (48, 7)])
def test_the_kernel_gives_the_twins_bits(twin: ModuleType, kernel: ctypes.CDLL, cores: int, splits: int) -> None:
    """Every stride, mask and offset of the Ascend C source; several column tiles, experts and rows to an x; y is added to."""
    n, k, rows_per_x = 768, 448, 2
    weights = [fp4(n, k, seed) for seed in range(3)]
    packed, scale, global_scale = operands(twin, weights)
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(9)).bfloat16()
    experts = np.array([2, 0, 1, 2], dtype=np.int32)
    before = np.float32(4 if splits == 1 else 0)
    y = torch.full((4, n), float(before))
    launch(kernel, cores, [x, *map(torch.from_numpy, (packed, scale, global_scale, experts)), y], 4, rows_per_x, k, n, splits)
    expected = before + twin.gemv(x.float().numpy(), packed, scale, global_scale, experts, rows_per_x=rows_per_x, splits=splits)
    if splits == 1:
        assert np.array_equal(y.numpy(), expected)
    else:  # cores add their parts in another order
        np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=2e-6)


def test_offsets_past_four_gib(twin: ModuleType, kernel: ctypes.CDLL) -> None:
    """The last of so many experts that its scales lie beyond 2^32 bytes, and its weights eight times as far."""
    n, k = 256, 128
    packed, scale, global_scale = map(torch.from_numpy, operands(twin, [fp4(n, k, seed=1)]))
    expert = (1 << 32) // scale[0].numel() + 2
    rooms = [sparse(expert + 1, one) for one in (packed, scale, global_scale)]
    for room, one in zip(rooms, (packed, scale, global_scale)):
        room[expert] = one[0]
    x = torch.randn(1, k, generator=torch.Generator().manual_seed(9)).bfloat16()
    y = torch.zeros(1, n)
    launch(kernel, 1, [x, *rooms, torch.tensor([expert], dtype=torch.int32), y], 1, 1, k, n, 1)
    expected = twin.gemv(x.float().numpy(), packed.numpy(), scale.numpy(), global_scale.numpy(), np.zeros(1, dtype=np.int32))
    assert np.array_equal(y.numpy(), expected)


def test_the_source_says_what_it_was_not() -> None:
    assert "NEVER COMPILED FOR A DEVICE" in (SOURCES / "fp4_gemv.cpp").read_text()
