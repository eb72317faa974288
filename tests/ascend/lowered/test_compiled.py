"""Every Triton kernel in every form that a launch can ask for, through Huawei's own compiler to the
form before its closed back end: the passes that place buffers, split a kernel into vector and cube
code, and set flags. And its lowered inner loop has no scalar access."""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

import pytest
import torch
from ascend.lowered import ascend_ir, bishengir, hivm, pipes
from ascend.lowered.ascend_ir import lower
from quantkit_kernels.ascend import chip, launch, layout
from quantkit_kernels.samples import random_weight
from torch import Tensor

TARGETS = ("Ascend910B1", "Ascend910B4", "Ascend910_9382")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INT4 = tuple(f"int4-{way}-{group}" for way in ("asym", "sym") for group in (32, 64, 128))
GRIDS = (*INT4, "fp4", "int8")
K = 384
"""Three spans: loops go round often enough for buffers that take turns."""
Form = Callable[..., launch.KernelLaunch]
"""k: other sizes, for which the form is the same."""


def seeded():
    return torch.Generator().manual_seed(0)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=seeded()).to(dtype)


def unwritten(*shape, dtype):
    return torch.full(shape, -7).to(dtype)


@cache
def packed(grid, tiles=1, k=K):
    """Two experts of so many whole tiles of columns and a ragged one, or of two whole ones for
    gate and up."""
    columns, rng = chip.COLUMNS[grid.split("-")[0]], seeded()
    n = 2 * columns if tiles == 2 else columns + 24
    weights = [random_weight(grid, n, k, rng) for _ in range(2)]
    if grid == "fp4":  # a global scale for every column
        scales = [one.global_scale * (0.5 + torch.rand(n, generator=rng)) for one in weights]
        weights = [one._replace(global_scale=scale) for one, scale in zip(weights, scales)]
    room = layout.allocate(weights[0], 2, torch.device("cpu"))
    for index, weight in enumerate(weights):
        layout.place(room, index, weight)
    return room


def rows(grid, dtype, k=K):
    of = packed(grid, k=k)
    return launch.rows(of, normal(3, k, dtype=dtype), EXPERTS[:3], unwritten(3, of.n, dtype=dtype))


def gate_up(grid, dtype, k=K):
    of = packed(grid, 2, k)
    out = unwritten(4, of.n // 2, dtype=dtype)
    return launch.gate_up(of, normal(2, k, dtype=dtype), EXPERTS, out)


def down(grid, dtype, k=K):
    of = packed(grid, k=k)
    x, out = normal(4, k, dtype=dtype), unwritten(2, of.n, dtype=dtype)
    return launch.down(of, x, EXPERTS, normal(4), out)


def blocks(bm, grid, dtype, k=K):
    """All but 8 rows of a block, in buffers that nothing was in, one of no expert, a whole one, and
    a ragged one, the last rows of x. Rows before and between them are left alone."""
    of, m = packed(grid, k=k), 3 * bm
    x = normal(m, k, dtype=dtype)
    codes, scale = (10 * x).to(torch.int8), normal(m).abs()
    first, last = torch.tensor([[bm + 1, 0, 1, 2 * bm + 5], [2 * bm - 7, 1, bm + 1, m]]).int()
    which = launch.Blocks(bm, torch.tensor([0, -1, 1, 1]).int(), first, last)
    int8 = of.kind == "int8"
    out = unwritten(m, of.n, dtype=dtype)
    return launch.blocks(of, codes if int8 else x, scale if int8 else None, which, out)


def assign(_):
    counts = torch.tensor([0, 3, 0, 16, 17, 0, 40])
    return launch.assign(counts, launch.Blocks(16, *unwritten(3, 9, dtype=torch.int32)))


def router(dtype, k=40):
    out = unwritten(2, k, dtype=torch.float32)
    return launch.router(normal(2, 600, dtype=dtype), normal(k, 600), out)


def join(columns, _, k=None):
    k = k or columns - 1
    ids, joined = torch.arange(7 * k).int().view(7, k), unwritten(7, columns, dtype=torch.int32)
    out = unwritten(7, columns, dtype=torch.float32)
    return launch.join(ids, normal(7, k), joined, out, 40)


EXPERTS = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
ROUTING = {"assign": assign, "router": router} | {
    f"join-{columns}": partial(join, columns) for columns in (6, 9)
}
FORMS = {}
for name, dtype in DTYPES.items():
    for grid in GRIDS:
        ways = {"gate_up": gate_up, "down": down} | ({} if grid == "int8" else {"rows": rows})
        ways |= {f"blocks-{bm}": partial(blocks, bm) for bm in chip.BLOCK_ROWS}
        FORMS |= {f"{grid}-{way}-{name}": partial(make, grid, dtype) for way, make in ways.items()}
    FORMS |= {f"{one}-{name}": partial(make, dtype) for one, make in ROUTING.items()}
SAMPLE = re.compile(r"bf16$")
"""Forms that are compiled for the first target in CI; of each kernel one for the others."""
KERNELS = re.compile(r"(int4-asym-128|fp4|int8|router|assign|join-9).*(?<!-(32|64))-bf16$")
EVERY = "QUANTKIT_EVERY_CASE" in os.environ
CASES = [
    (target, form)
    for target in TARGETS
    for form in FORMS
    if EVERY or (SAMPLE if target == TARGETS[0] else KERNELS).search(form)
]


@cache
def lowered(form):
    one = FORMS[form]()
    return lower(one.function, one.args, one.constants)


@pytest.fixture(scope="module")
def compiled():
    """By target and form; what a pass refused is the text of why."""

    def compile_(case, text):
        try:
            return bishengir.compiled(text, case[0])
        except bishengir.NotCompiled as why:
            return f"REFUSED {why}"

    bishengir.options()
    texts = [lowered(form) for _, form in CASES]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(compile_, CASES, texts)))


@pytest.mark.parametrize(("target", "form"), CASES)
def test_a_form(target, form, compiled):
    """Its buffers are within the chip's, by the compiler's own sizes and ours, the cube's those of
    the budget; tiles are loaded while those before are used."""
    text = compiled[target, form]
    assert not text.startswith("REFUSED"), text
    parts, sizes = bishengir.parts(text), bishengir.spec(text)
    limits = {"UB": chip.UNIFIED_BUFFER, "L1": chip.L1_BUFFER, "L0C": chip.L0C_BUFFER}
    own = limits | {"L0A": chip.L0A_BUFFER, "L0B": chip.L0B_BUFFER}
    assert {name: sizes[f"{name}_SIZE"] // 8 for name in own} == own
    used = {name: size for part in parts for name, size in part.used().items()}
    assert all(size <= limits[name] for name, size in used.items()), used
    doubled = {size for part in parts for *_, size in part.doubled()}
    assert doubled
    names = [part.name.rpartition("_")[2] for part in parts]
    if "blocks" in form:
        grid, bm = form.split("-")[0], int(form.split("-")[-2])
        budget = chip.cube_bytes(grid, bm)
        assert names == ["aic", "aiv"], "split into cube and vector code"
        assert {name: used[name] for name in ("L1", "L0C")} == {
            name: budget[name] for name in ("L1", "L0C")
        }
    else:
        assert used.keys() == {"UB"}
    if re.search("rows|gate_up|down", form):  # the weight's tile: of int8 a quarter of a span
        kind = form.split("-")[0]
        tile = chip.SPAN // (4 if kind == "int8" else 2) * chip.COLUMNS[kind]
        assert tile in doubled, "the next is loaded while one is decoded"


def test_tiles_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setitem(chip.COLUMNS, "int4", 256)
    one = FORMS["int4-asym-128-rows-bf16"]()
    with pytest.raises(bishengir.NotCompiled, match="overflow"):
        bishengir.compiled(lower(one.function, one.args, one.constants), TARGETS[0])


OF_EACH = r"^(int4-asym-128|int4-sym-32-rows|int4-asym-64-blocks|fp4|int8|router|assign|join-9)"
EXECUTED = [
    form for form in FORMS if EVERY or re.search(rf"{OF_EACH}.*(?<!-32|-64|128)-bf16$", form)
]


@pytest.fixture
def few_cores(monkeypatch):
    """Fewer programs than items, so that buffers are used again."""
    monkeypatch.setattr(launch, "cores", lambda device: (2, 2))


OTHERS = {"router": 10, "join-6": 8, "join-9": 16}
"""A ragged tile of experts in buffers that nothing was in; ids that fill a tile, which no load
masks."""


def sizes(form):
    """A form's own, and others: of weights two spans, for a loop around three has its order by
    theirs."""
    own = [{}]
    return own if form.startswith("assign") else [*own, {"k": OTHERS.get(form[:-5], 256)}]


def run(text, form, **size):
    """What the last open form leaves in the operands."""
    one = FORMS[form](**size)
    hivm.execute(hivm.read(text), one.programs, one.args)
    return [arg for arg in one.args if isinstance(arg, Tensor)]


@cache
def expected(form, **size):
    """What the lowered kernel leaves there."""
    one = FORMS[form](**size)
    ascend_ir.execute(one.function, one.programs, one.args, one.constants)
    return [arg for arg in one.args if isinstance(arg, Tensor)]


def same(found, wanted):
    """To the bit, NaN too."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted))


def right(text, form):
    """Whether it computes at every size what the lowered kernel does."""
    return all(same(run(text, form, **one), expected(form, **one)) for one in sizes(form))


@pytest.mark.parametrize("form", EXECUTED)
def test_a_form_computes_what_the_lowered_kernel_does(form, compiled, few_cores):
    """Its instructions race for no byte, in whatever order its pipes run."""
    assert right(compiled[TARGETS[0], form], form)


FAULTS = {
    "no flag": (r"(?m)^.*wait_flag\[.*\n", ""),
    "another flag": (r"(set_flag\[.*<EVENT_ID)\d>", r"\g<1>7>"),
    "other pipes": (r"set_flag\[(<PIPE_\w+>), (<PIPE_\w+>)", r"set_flag[\2, \1"),
    "elsewhere": (
        r"constant ([1-9]\d*) : i64(?=(?s:.*)pointer_cast\(%c\1_i64\))",
        f"constant {chip.L1_BUFFER} : i64",
    ),
    "half a tile": (r"(pointer_cast.* : memref<(?:\d+x)*?)(?:64|16)x", r"\g<1>8x"),
}
"""Of a form: in flags, addresses and tiles."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["fp4-rows-bf16", "int4-asym-128-blocks-16-bf16"])
def test_a_fault_in_a_form_is_found(form, fault, compiled, few_cores):
    """The first, the middle and the last place where it can be."""
    pattern, other = FAULTS[fault]
    text = compiled[TARGETS[0], form]
    found = list(re.finditer(pattern, text))
    assert found
    for one in (found[:1], found[len(found) // 2 :][:1], found[-1:]):
        for match in one:
            with suppress(pipes.Fault):
                changed = text[: match.start()] + match.expand(other) + text[match.end() :]
                assert not right(changed, form), match[0]


def test_what_is_not_known_is_a_fault(compiled, few_cores):
    text = compiled[TARGETS[0], "join-9-bf16"]
    for known, other in (("call @arange_1d", "call @iota_1d"), ("arith.divsi", "arith.divui")):
        assert known in text
        with pytest.raises(pipes.Fault, match="unknown"):
            run(text.replace(known, other), "join-9-bf16")


def innermost(lines):
    """The bodies of loops that hold no other."""
    for first, line in enumerate(lines):
        if "scf.for" in line:
            end = line[: len(line) - len(line.lstrip())] + "}"
            last = next(at for at in range(first + 1, len(lines)) if lines[at].startswith(end))
            body = lines[first + 1 : last]
            if not any("scf.for" in one for one in body):
                yield body


INNER = [one for one in FORMS if one.endswith("bf16") and "assign" not in one]


@pytest.mark.parametrize("form", INNER)
def test_an_innermost_loop_has_no_scalar_access(form):
    """As it is lowered: what the vector and cube cores cannot do as one instruction."""
    access = ("memref.load", "memref.store", "tensor.extract ", "tensor.insert ", "scf.while")
    found = list(innermost(lowered(form).splitlines()))
    assert found
    assert not [line for lines in found for line in lines if any(one in line for one in access)]
