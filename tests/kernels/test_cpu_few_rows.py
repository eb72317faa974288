"""Few rows on a CPU by the project's C++ (int4_rows.cpp, dense.cpp): any number of them, on
processors that this one can stand for."""

import os
import subprocess
import sys

import pytest
import torch
from quantkit_kernels import gqa_decode, prepare, rms_norm
from quantkit_kernels.cpu import build, dense, int4
from quantkit_kernels.cpu.linear import _EXPANDED_ROWS, Int4Linear
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.samples import (
    TOLERANCE,
    distance,
    exact_linear,
    grouped_attention,
    random_weight,
)

REASONS = [
    reason
    for name in ("int4", "int4_rows", "dense", "fp4", "w8a16", "norm")
    if (reason := build.why_no_library(name)) is not None
]
compiled = pytest.mark.skipif(bool(REASONS), reason=str(REASONS))
DTYPES = list(TOLERANCE)

int4_case = pytest.mark.parametrize(
    ("grid", "n", "k"),
    [
        ("int4-sym-32", 3 * int4.BLOCK, 96),
        ("int4-asym-64", 2 * int4.BLOCK + 16, 320),
        ("int4-asym-128", int4.BLOCK + 48, 384),
        ("int4-asym-32", 16, 32),
    ],
)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@int4_case
def test_int4_rows_are_as_exact_as_the_dtype(grid, n, k, dtype):
    rng = torch.Generator().manual_seed(n)
    weight = random_weight(grid, n, k, rng)
    linear = prepare(weight, backend="cpu", dtype=dtype)
    assert isinstance(linear, Int4Linear)
    for m in (*range(1, 17), 29, 63):
        x = torch.randn(m, k, generator=rng).to(dtype)
        assert distance(linear(x), exact_linear(x, weight)) < TOLERANCE[dtype], m


@compiled
@int4_case
def test_an_int4_row_does_not_depend_on_the_others(grid, n, k):
    rng = torch.Generator().manual_seed(n)
    linear = prepare(random_weight(grid, n, k, rng), backend="cpu", dtype=torch.bfloat16)
    # More rows are torch's product's, whose order is that of the processor and its threads.
    most = _EXPANDED_ROWS - 1
    x = torch.randn(most, k, generator=rng).bfloat16()
    x[7] = float("nan")
    alone = torch.cat([linear(row) for row in x.split(1)])
    for m in (2, 5, 8, 13, 16, most):
        assert torch.equal(linear(x[:m]).nan_to_num(1e9), alone[:m].nan_to_num(1e9)), m
    assert alone[7].isnan().all()
    assert not alone[torch.arange(most) != 7].isnan().any()


def _linears():
    """Name, operator and rows below which its results are promised. int8: in bfloat16 all rows."""
    for grid in ("int8", "w8a16-128", "fp4"):
        weight = random_weight(grid, 208, 384, torch.Generator().manual_seed(3))
        yield grid, prepare(weight, backend="cpu", dtype=torch.bfloat16), 64
    gain = torch.rand(384, generator=torch.Generator().manual_seed(4))
    yield "norm", lambda x: rms_norm(x, gain, 1e-6, backend="cpu"), 200


@compiled
def test_rows_do_not_depend_on_threads_nor_on_the_others():
    rng = torch.Generator().manual_seed(5)
    before, x = torch.get_num_threads(), torch.randn(199, 384, generator=rng).bfloat16()
    for name, operator, rows in _linears():
        alone = torch.cat([operator(row) for row in x[: rows - 1].split(1)])
        try:
            for threads in (1, 2, 16):
                torch.set_num_threads(threads)
                for m in (1, 2, 8, 31, rows - 1):
                    assert torch.equal(operator(x[:m]), alone[:m]), (name, threads, m)
        finally:
            torch.set_num_threads(before)


@pytest.mark.skipif(build.why_no_library("gqa") is not None, reason="no C++ compiler")
@pytest.mark.parametrize("window", [0, 700])
def test_attention_of_a_row_does_not_depend_on_threads_nor_on_the_others(window):
    """Short rows and one in sixteen parts, more threads than key heads."""
    case = grouped_attention(
        [3, 1, 700, 5000], [1] * 4, (4, 2), 32, 16, torch.float32, window=window
    )
    before, found = torch.get_num_threads(), list[torch.Tensor]()
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            for rows in (slice(0, 4), slice(2, 4), *(slice(row, row + 1) for row in range(4))):
                pages = case.pages._replace(
                    block_table=case.pages.block_table[rows], seq_lens=case.pages.seq_lens[rows]
                )
                out = gqa_decode(
                    case.q[rows], pages, scale=case.scale, window=window, backend="cpu"
                )
                found = found or [out]
                assert torch.equal(out, found[0][rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)
    assert distance(found[0], case.exact) < TOLERANCE[torch.float32]


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(192, 256), (101, 333), (7, 5), (1, 64)])
def test_dense_rows_are_exact_and_independent(n, k, dtype):
    rng = torch.Generator().manual_seed(n)
    weight, x = (
        torch.randn(n, k, generator=rng).to(dtype),
        torch.randn(40, k, generator=rng).to(dtype),
    )
    alone = torch.cat([dense.multiply(row, weight) for row in x.split(1)])
    assert distance(alone, x.double() @ weight.double().T) < TOLERANCE[dtype]
    for m in (2, 3, 5, 7, 8, 11, 12, 25, 40):
        assert torch.equal(dense.multiply(x[:m], weight), alone[:m]), m


@compiled
def test_a_large_float32_weight_takes_it_for_few_rows():
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(1024, 1040, generator=rng), torch.randn(17, 1040, generator=rng)
    assert dense.multiplies(weight)
    assert not dense.multiplies(weight[:16])
    assert not dense.multiplies(weight.half())
    assert dense.multiplies(weight.bfloat16()) == (not has_unit(torch.bfloat16))
    linear = prepare(
        random_weight("dense", 1024, 1040, rng)._replace(weight=weight), dtype=torch.float32
    )
    for m in (8, 16, 17):
        assert (
            distance(linear(x[:m]), x[:m].double() @ weight.double().T) < TOLERANCE[torch.float32]
        )
    assert torch.equal(linear(x[:8]), dense.multiply(x[:8], weight))


LESSER = """
import pytest, sys, torch
from quantkit_kernels.cpu import build
assert build.level() == build.level_of("int4_rows") == sys.argv[2]
from quantkit_kernels import prepare
from quantkit_kernels.samples import distance, exact_linear, random_weight
# Where the processor has VNNI for AVX2, oneDNN's product of int8 is exact.
weight, x = random_weight("int8", 192, 256, torch.Generator().manual_seed(0)), torch.randn(40, 256)
for rows in (x, x[:3]):
    assert distance(prepare(weight, dtype=torch.float32)(rows), exact_linear(rows, weight)) < 0.02
sys.exit(pytest.main(["-q", "-k", "rows_are or row_does", sys.argv[1]]))
"""


@compiled
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="not this CPU"
)
@pytest.mark.parametrize(("asked", "level"), [("avx2", "AVX2"), ("default", "PORTABLE")])
def test_lesser_processors(asked, level):
    """Int4 is packed in blocks of fewer rows; int8 has no blocks there, with VNNI for AVX2 alone."""
    environment = dict(os.environ) | {"ATEN_CPU_CAPABILITY": asked}
    done = subprocess.run(
        [sys.executable, "-c", LESSER, __file__, level],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@compiled
def test_bfloat16_instructions_compile(tmp_path):
    """Where this processor has them they run in the tests above."""
    flags = build._FLAGS["BF16"]
    compiler = build._compiler()
    assert compiler is not None
    taken = subprocess.run(
        [compiler, *flags, "-x", "c++", "-E", "-"],
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    if taken.returncode:
        pytest.skip("this compiler does not know them, or is for another processor")
    built, source = str(tmp_path / "it.o"), str(build._source("int4_rows"))
    command = [compiler, *("-O0", "-std=c++17", *flags, "-fopenmp", "-c", "-o", built, source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
