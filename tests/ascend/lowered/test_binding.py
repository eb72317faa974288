"""binding.cpp, built against the headers of torch and torch_npu, and run over the CPU's version of
Ascend C, with a queue as torch_npu has it: experts of backend ascend.

Here, and not with the other tests of Ascend C, because torch's headers take a compiler half a
minute.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ascend import ascendc, ascendc_double, npu_double
from kernel_weights import exact_experts, layer, random_experts
from quantkit_kernels import Fp4, backends
from quantkit_kernels.ascend import streamed
from quantkit_kernels.samples import distance
from torch.utils import cpp_extension

STAND_INS = Path(__file__).parents[1] / "cann_on_cpu"
TORCH_NPU = ".venv-npu/lib/python*/site-packages/torch_npu/include"
"""Next to the environment that runs this."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("binding")
    for name in ("int4_grouped", "fp4_gemv"):
        ascendc.compiled(ascendc.CPU / f"launch_{name}.cpp", folder)
    (headers,) = Path(sys.prefix).parent.glob(TORCH_NPU)
    includes = [f"-I{STAND_INS}", f"-isystem{headers}"]
    includes += [f"-isystem{one}" for one in cpp_extension.include_paths()]
    libraries = [f"-L{one}" for one in cpp_extension.library_paths()]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Werror=return-type"]
    files = [str(STAND_INS / "binding.cpp"), "-o", str(folder / "binding.so")]
    command = ["g++", *options, *includes, *files, *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def operators(built, monkeypatch):
    monkeypatch.setenv("ASCENDC_ON_CPU", str(built))
    monkeypatch.setenv("ASCENDC_CORES", "5")
    if not hasattr(torch.ops.quantkit_ascendc, "fp4_gemv"):
        torch.ops.load_library(str(built / "binding.so"))
    monkeypatch.setattr(streamed, "cores", lambda device: (3, 5))
    backends.forget()
    with npu_double.installed():
        monkeypatch.setattr("quantkit_kernels.ascend.unusable", lambda *arguments: None)
        yield


@pytest.mark.parametrize("grid", ["int4-asym-128", "int4-sym-128", "fp4"])
def test_experts_by_the_binding(grid, operators, monkeypatch):
    """The twins' bits, which is what the double computes with; scratch is as large as the kernels
    use it, or memory would be spoilt."""
    rng = torch.Generator().manual_seed(2)
    weights = random_experts(grid, 5, 512, 256, rng)
    experts = layer(weights, "ascend", torch.bfloat16)
    assert isinstance(experts, streamed.StreamedExperts)
    for tokens, top_k in ((1, 1), (7, 3), (20, 2)):
        x = torch.randn(tokens, 512, generator=rng).bfloat16()
        ids = torch.rand(tokens, 4, generator=rng).topk(top_k, dim=-1).indices
        share = torch.rand(tokens, top_k, generator=rng)
        ours = experts(x, ids, share)
        assert distance(ours, exact_experts(x, ids, share, weights)) < 1.2e-2, tokens
        with monkeypatch.context() as patched:
            patched.setattr(torch.ops, "quantkit_ascendc", ascendc_double)
            assert torch.equal(ours, experts(x, ids, share)), tokens


@pytest.mark.parametrize("grid", ["int4-asym-128", "fp4"])
def test_a_kernel_runs_after_what_was_queued(grid, operators):
    """Its operands are there when torch_npu's queue comes to it, and not before."""
    rng = torch.Generator().manual_seed(2)
    experts = layer(random_experts(grid, 2, 512, 256, rng), "ascend", torch.bfloat16)
    assert isinstance(experts, streamed.StreamedExperts)
    x, ends = torch.randn(3, 512, generator=rng).bfloat16(), torch.tensor([1, 3])
    later = torch.full_like(x, float("nan"))
    expected = experts.gate_up.times(x, ends)
    torch.ops.quantkit_ascendc.copied_later(later, x)
    assert torch.equal(experts.gate_up.times(later, ends), expected)


def test_what_the_binding_refuses(operators):
    grouped, ends = torch.ops.quantkit_ascendc.int4_grouped, torch.tensor([1])
    weight, parameters = (
        torch.zeros(1, 1, 1, 2, 8192, dtype=torch.uint8),
        torch.zeros(1, 1, 1, 2, 2, 128, dtype=torch.float16),
    )
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    assert grouped(x, weight, parameters, ends, 1).shape == (1, 256)
    assert grouped(x[:0], weight, parameters, ends * 0, 1).shape == (0, 256)
    wide, square = (
        torch.zeros(1, 65 * 128).bfloat16(),
        torch.zeros(2, 1, 1, 2, 8192, dtype=torch.uint8),
    )
    for bad, words in (
        ((wide, weight.expand(-1, -1, 65, -1, -1).contiguous(), parameters, ends), "up to 8192"),
        ((torch.cat([x, x], dim=1), weight, parameters, ends), "and the weight's"),
        ((x, square, parameters, ends), "group_list is int64"),
        ((x, weight.expand(1, 2, 1, 2, 8192), parameters, ends), "in one piece"),
        ((x.half(), weight, parameters, ends), "bfloat16"),
        ((x[:, :64].contiguous(), weight, parameters, ends), "multiple of 128"),
        ((x, weight, parameters.float(), ends), "float16"),
        ((x, weight, parameters, ends.int()), "int64"),
    ):
        with pytest.raises(RuntimeError, match=words):
            grouped(*bad, 1)


def test_parts_of_k(operators):
    """Parts are added up in their order: what a large number takes with it depends on them. They
    leave no rest."""
    gemv = torch.ops.quantkit_ascendc.fp4_gemv
    ones = Fp4(
        torch.full((512, 256), 2, dtype=torch.uint8),
        torch.ones(512, 16).to(torch.float8_e4m3fn),
        torch.tensor(1.0),
    )
    weight, scale, global_scale = streamed.packed(ones)
    parts, x = (weight[None], scale[None], global_scale[None]), torch.zeros(1, 256).bfloat16()
    x[0, 0], x[0, 128], x[0, 192] = 2.0**30, -(2.0**30), 1.0
    ends = torch.tensor([1])
    sums = [float(gemv(x, *parts, ends, splits, 5)[0, 0]) for splits in (1, 2, 4)]
    assert sums == [1.0, 0.0, 1.0]
    for splits in (0, 3):
        with pytest.raises(RuntimeError, match="splits divides"):
            gemv(x, *parts, ends, splits, 5)
    with pytest.raises(RuntimeError, match="K is a multiple of 64, and the weight's"):
        gemv(x[:, :64].contiguous(), *parts, ends, 1, 5)
