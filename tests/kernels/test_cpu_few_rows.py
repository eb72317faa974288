"""Few rows on a CPU by the project's C++ (int4_rows.cpp, dense.cpp): any number of them, on
processors that this one can stand for."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from kernel_weights import layer, random_experts
from quantkit_kernels import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
    Fp4,
    Routing,
    add_rms_norm,
    delta_step,
    gqa_decode,
    moe_gate,
    prepare,
    rms_norm,
    silu_and_mul,
)
from quantkit_kernels.cpu import build, dense, int4
from quantkit_kernels.cpu.linear import _EXPANDED_ROWS
from quantkit_kernels.cpu.units import has_unit
from quantkit_kernels.routing import SCORINGS
from quantkit_kernels.samples import (
    TOLERANCE,
    distance,
    exact_linear,
    grouped_attention,
    random_weight,
)

REASONS = [
    reason
    for name in ("int4", "int4_rows", "dense", "fp4", "w8a16", "norm", "gqa")
    if (reason := build.why_no_library(name)) is not None
]
compiled = pytest.mark.skipif(bool(REASONS), reason=str(REASONS))
DTYPES = list(TOLERANCE)


def _linear(grid, n, k, dtype, rows):
    """As exact as the dtype, and so are more rows."""
    rng = torch.Generator().manual_seed(n)
    weight, x = random_weight(grid, n, k, rng), torch.randn(200, k, generator=rng).to(dtype)
    linear = prepare(weight, backend="cpu", dtype=dtype)
    for some in (x, x[:rows]):
        assert distance(linear(some), exact_linear(some, weight)) < TOLERANCE[dtype]
    x[5] = float("nan")
    return lambda part: linear(x[part]), rows


def _dense(n, k, dtype, rows=40):
    rng = torch.Generator().manual_seed(n)
    weight, x = (torch.randn(count, k, generator=rng).to(dtype) for count in (n, rows))
    exact = x.double() @ weight.double().T
    assert distance(dense.multiply(x, weight), exact) < TOLERANCE[dtype]
    return lambda part: dense.multiply(x[part], weight), rows


def _experts(grid, rows):
    rng = torch.Generator().manual_seed(1)
    experts = layer(random_experts(grid, 6, 128, 96, rng), "cpu", torch.bfloat16)
    ids = torch.rand(rows, 6, generator=rng).topk(3).indices
    weights, x = torch.rand(rows, 3, generator=rng), torch.randn(rows, 128, generator=rng)
    return lambda part: experts(x[part].bfloat16(), ids[part], weights[part]), rows


def _routed(scoring, rows=130):
    """60 experts and the gate of a shared one: no whole number of vectors."""
    rng = torch.Generator().manual_seed(2)
    rule = Routing(60, 4, scoring_func=scoring, num_joined_experts=1, joined_gate=True)
    router, x = torch.randn(61, 333, generator=rng) / 18, torch.randn(rows, 333, generator=rng)
    return lambda part: torch.cat(moe_gate(x[part], router, None, rule), dim=1), rows


def _functional(width, dtype, rows=199):
    """Norms and activation."""
    rng = torch.Generator().manual_seed(3)
    gain = torch.rand(width, generator=rng)
    x, y = (torch.randn(rows, 2, width, generator=rng).to(dtype) for _ in range(2))

    def computed(part):
        added = add_rms_norm(x[part, 0], y[part, 0], gain, 1e-6)
        found = (*added, rms_norm(x[part, 1], gain, 1e-6), silu_and_mul(x[part].flatten(1)))
        return torch.cat(found, dim=1)

    return computed, rows


def _grouped(codes, window):
    """Short rows and one in sixteen parts, more threads than key heads."""
    torch.manual_seed(4)
    lengths = [3, 1, 700, 5000, 17]
    case = grouped_attention(
        lengths, [1] * 5, (6, 2), 40, 16, torch.float32, window=window, codes=codes
    )

    def attended(part):
        table, lengths = case.pages.block_table[part], case.pages.seq_lens[part]
        pages = case.pages._replace(block_table=table, seq_lens=lengths)
        return gqa_decode(case.q[part], pages, scale=case.scale, window=window, backend="cpu")

    return attended, 5


def _delta(by_channel, rows=9):
    """Three heads of 24 by 40."""
    rng = torch.Generator().manual_seed(5)

    def some(*shape):
        return torch.randn(*shape, generator=rng)

    decay = some(rows, 1, 3, *(24,) * by_channel)
    inputs = (some(rows, 1, 24), some(rows, 1, 24), some(rows, 1, 3, 40), some(rows, 1, 3, 40))
    weights = DeltaWeights(
        some(168, 4), some(3).abs(), some(3, *(24,) * by_channel), some(40), 1e-6, by_channel
    )
    recent, memory, rate = some(2, rows + 1, 3, 168), some(2, rows + 1, 3, 24, 40), some(rows, 1, 3)

    def stepped(part):
        own = DeltaInputs(*(side[part] for side in (*inputs, decay, rate)))
        tokens = torch.full((2, rows + 1), 7)
        states = DeltaStates(recent.clone(), memory.clone(), tokens)
        places = torch.arange(1, rows + 1)[part]
        return delta_step(own, weights, states, places, torch.full_like(places, 7))

    return stepped, rows


LAST = _EXPANDED_ROWS - 1
"""Of int4. More rows are torch's product's, whose order is that of the processor and its threads;
of w8a16 and FP4 more than 63."""
PROMISED = {
    **{
        f"{grid} {n} {k} {str(dtype)[6:]}": partial(_linear, grid, n, k, dtype, rows)
        for dtype in DTYPES
        for grid, n, k, rows in (
            ("int4-sym-32", 3 * int4.BLOCK, 96, LAST),
            ("int4-asym-64", 2 * int4.BLOCK + 16, 320, LAST),
            ("int4-asym-128", int4.BLOCK + 48, 384, LAST),
            ("int4-asym-32", 16, 32, LAST),
            ("int8", 208, 384, 199),
            ("int8", 37, 101, 199),
            ("w8a16-channel", 37, 101, 63),
            ("w8a16-128", 208, 384, 63),
            ("fp4", 1, 16, 63),
            ("fp4", 250, 176, 63),
        )
    },
    "int4-asym-32 2080 1024": partial(_linear, "int4-asym-32", 2080, 1024, torch.bfloat16, LAST),
    **{
        f"dense {n} {k} {str(dtype)[6:]}": partial(_dense, n, k, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for n, k in ((192, 256), (101, 333), (1, 64))
    },
    **{
        f"experts {grid}": partial(_experts, grid, rows)
        for grid, rows in (("int4-asym-32", LAST), ("int8", 130), ("w8a16-32", 63), ("fp4", 63))
    },
    **{f"routed {one}": partial(_routed, one) for one in SCORINGS},
    **{f"norms {w} {str(d)[6:]}": partial(_functional, w, d) for d in DTYPES[:2] for w in (384, 7)},
    "gqa": partial(_grouped, None, 0),
    "gqa window": partial(_grouped, None, 700),
    "gqa int8": partial(_grouped, torch.int8, 0),
    "gqa fp8": partial(_grouped, torch.float8_e4m3fn, 0),
    "delta by head": partial(_delta, False),
    "delta by channel": partial(_delta, True),
}


@compiled
@pytest.mark.parametrize("name", PROMISED)
def test_a_row_does_not_depend_on_threads_nor_on_the_others(name):
    operator, rows = PROMISED[name]()
    before = torch.get_num_threads()
    alone = torch.cat([operator(slice(row, row + 1)) for row in range(rows)])
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            for part in (slice(0, 2), slice(1, 9), slice(0, rows), slice(rows // 3, rows)):
                found = operator(part)
                assert torch.equal(found.nan_to_num(1e9), alone[part].nan_to_num(1e9)), (
                    threads,
                    part,
                )
    finally:
        torch.set_num_threads(before)


def test_codes_in_any_order_of_memory_are_packed_alike():
    codes = torch.randint(-8, 8, (int4.BLOCK + 16, 64), dtype=torch.int8)
    assert torch.equal(int4.pack(codes.t().contiguous().t()), int4.pack(codes))


@compiled
def test_every_fp4_code_and_every_scale():
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
def test_a_large_float32_weight_takes_it_for_few_rows():
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(1024, 1040, generator=rng), torch.randn(17, 1040, generator=rng)
    assert dense.multiplies(weight)
    assert not dense.multiplies(weight[:16])
    assert not dense.multiplies(weight.half())
    pairs = build.level_of("dense") == "BF16" and not torch.cpu._is_amx_tile_supported()
    assert dense.multiplies(weight.bfloat16()) == (pairs or not has_unit(torch.bfloat16))
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
sys.exit(pytest.main(["-q", "-k", "row_does and not float16", sys.argv[1]]))
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
