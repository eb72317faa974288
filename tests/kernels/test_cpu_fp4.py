"""FP4 on the CPU: the C++ that the user's compiler makes, where there is one."""

import pytest
import torch
from quantkit_kernels import Fp4, prepare
from quantkit_kernels.backends import why_unusable
from quantkit_kernels.cpu import build
from quantkit_kernels.samples import TOLERANCE, distance, exact_linear, random_weight

REASON = why_unusable("linear_fp4", "cpu", torch.device("cpu"))
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_any_number_of_rows_and_tokens(dtype):
    """Output features that fill no block of 16; tokens one by one, in twos, fours and eights, and
    over expanded blocks."""
    rng = torch.Generator().manual_seed(0)
    for n, k in ((1, 16), (40, 2048), (250, 176)):
        weight = random_weight("fp4", n, k, rng)
        linear = prepare(weight, backend="cpu", dtype=dtype)
        for m in (1, 2, 3, 15, 63, 64, 100):
            x = torch.randn(m, k, generator=rng).to(dtype)
            assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[dtype], (n, k, m)


@compiled
def test_every_code_and_every_scale():
    """All E2M1 codes under all finite e4m3 scales, subnormal ones and zero among them, with a
    global scale for each row."""
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16).contiguous()
    weight = Fp4(codes, scale, torch.linspace(0.5, 3, 127))
    for m in (16, 64):
        x = torch.eye(16).repeat(m // 16, 1)
        y = prepare(weight, backend="cpu", dtype=torch.float32)(x)
        assert torch.allclose(y.double(), exact_linear(x, weight), rtol=2e-7, atol=0), m


@compiled
def test_weight_keeps_its_four_and_a_half_bits():
    weight = random_weight("fp4", 64, 256, torch.Generator().manual_seed(3))
    assert prepare(weight, backend="cpu").nbytes == 64 * 256 // 2 + 64 * 256 // 16 + 64 * 4


def test_without_a_compiler_the_reason_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert build.why_no_library("fp4") is not None
    assert (
        prepare(random_weight("fp4", 16, 32, torch.Generator().manual_seed(4))).backend
        == "reference"
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2" in str(build.why_no_library("fp4"))
