"""Every Triton kernel in every form that a launch can ask for, through Huawei's own compiler to the
form before its closed back end: the passes that place buffers, split a kernel into vector and cube
code, and set flags. And its lowered inner loop has no scalar access."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest
import torch
from ascend.lowered import bishengir
from ascend.lowered.ascend_ir import lower
from ascend.row_blocks import in_order
from quantkit_kernels.ascend import chip, launch, layout
from quantkit_kernels.samples import random_weight
from torch import Tensor

TARGETS = ("Ascend910B1", "Ascend910B4", "Ascend910_9382")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INT4 = tuple(f"int4-{way}-{group}" for way in ("asym", "sym") for group in (32, 64, 128))
GRIDS = (*INT4, "fp4", "int8")
N, K = 256, 256
Form = Callable[[], launch.KernelLaunch]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@cache
def packed(grid: str) -> layout.PackedTiles:
    return layout.pack(random_weight(grid, N, K, torch.Generator().manual_seed(0)))


def rows(grid: str, dtype: torch.dtype) -> launch.KernelLaunch:
    return launch.rows(packed(grid), zeros(2, K, dtype=dtype), EXPERTS, zeros(2, N, dtype=dtype))


def gate_up(grid: str, dtype: torch.dtype) -> launch.KernelLaunch:
    out = zeros(2, N // 2, dtype=dtype)
    return launch.gate_up(packed(grid), zeros(2, K, dtype=dtype), EXPERTS, out)


def down(grid: str, dtype: torch.dtype) -> launch.KernelLaunch:
    x, out = zeros(2, K, dtype=dtype), zeros(1, N, dtype=dtype)
    return launch.down(packed(grid), x, EXPERTS, zeros(2), out)


def blocks(bm: int, grid: str, dtype: torch.dtype) -> launch.KernelLaunch:
    is_int8 = grid == "int8"
    x, of = zeros(bm, K, dtype=torch.int8 if is_int8 else dtype), in_order(EXPERTS[:1], bm, bm)
    scale = zeros(bm) if is_int8 else None
    return launch.blocks(packed(grid), x, scale, of, zeros(bm, N, dtype=dtype))


EXPERTS = zeros(2, dtype=torch.int32)
ROUTING: dict[str, Callable[[torch.dtype], launch.KernelLaunch]] = {
    "assign": lambda _: launch.assign(
        zeros(8, dtype=torch.int64), in_order(zeros(4, dtype=torch.int32), 64, 16)
    ),
    "router": lambda dtype: launch.router(zeros(2, 512, dtype=dtype), zeros(40, 512), zeros(2, 40)),
} | {
    f"join-{columns}": lambda _, columns=columns: launch.join(  # type: ignore[misc]
        zeros(2, columns - 1, dtype=torch.int32),
        zeros(2, columns - 1),
        zeros(2, columns, dtype=torch.int32),
        zeros(2, columns),
        40,
    )
    for columns in (6, 9)
}
FORMS: dict[str, Form] = {}
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
def lowered(form: str) -> str:
    one = FORMS[form]()
    return lower(one.function, one.args, one.constants)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], str]:
    """By target and form; what a pass refused is the text of why."""

    def compile_(case: tuple[str, str], text: str) -> str:
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
    the budget; flags are as many as waits, wherever a loop begins and ends; tiles are loaded while
    those before are used."""
    text = compiled[target, form]
    assert not text.startswith("REFUSED"), text
    parts, sizes = bishengir.parts(text), bishengir.spec(text)
    limits = {"UB": chip.UNIFIED_BUFFER, "L1": chip.L1_BUFFER, "L0C": chip.L0C_BUFFER}
    own = limits | {"L0A": chip.L0A_BUFFER, "L0B": chip.L0B_BUFFER}
    assert {name: sizes[f"{name}_SIZE"] // 8 for name in own} == own
    used = {name: size for part in parts for name, size in part.used().items()}
    assert all(size <= limits[name] for name, size in used.items()), used
    assert [fault for part in parts for fault in part.unbalanced()] == []
    assert max(event for part in parts for event in part.events()) < bishengir.EVENT_IDS
    doubled = {size for part in parts for *_, size in part.doubled()}
    assert doubled
    sets, waits = bishengir.cross_flags(text)
    assert sets == waits
    names = [part.name.rpartition("_")[2] for part in parts]
    if "blocks" in form:
        grid, bm = form.split("-")[0], int(form.split("-")[-2])
        budget = chip.cube_bytes(grid, bm)
        assert names == ["aic", "aiv"], "split into cube and vector code"
        assert {name: used[name] for name in ("L1", "L0C")} == {
            name: budget[name] for name in ("L1", "L0C")
        }
        assert sets, "one waits for the other"
    else:
        assert used.keys() == {"UB"}
        assert not sets
    if re.search("rows|gate_up|down", form):  # the weight's tile: of int8 a quarter of a span
        kind = form.split("-")[0]
        tile = chip.SPAN // (4 if kind == "int8" else 2) * chip.COLUMNS[kind]
        assert tile in doubled, "the next is loaded while one is decoded"


def test_tiles_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setitem(chip.COLUMNS, "int4", 256)
    wide = layout.pack(random_weight("int4-asym-128", N, K, torch.Generator().manual_seed(0)))
    x, out = zeros(2, K, dtype=torch.bfloat16), zeros(2, N, dtype=torch.bfloat16)
    one = launch.rows(wide, x, EXPERTS, out)
    with pytest.raises(bishengir.NotCompiled, match="overflow"):
        bishengir.compiled(lower(one.function, one.args, one.constants), TARGETS[0])


@pytest.mark.parametrize("form", ["int4-asym-128-blocks-16-bf16", "fp4-rows-bf16"])
def test_a_flag_that_is_missing_is_seen(form, compiled):
    """Every one of them."""
    flags = 0
    for part in bishengir.parts(compiled[TARGETS[0], form]):
        for at, line in enumerate(part.lines):
            if "_flag[" in line:
                less = bishengir.Part(part.name, (*part.lines[:at], *part.lines[at + 1 :]))
                assert less.unbalanced(), line
                flags += 1
    assert flags > 20


def test_a_buffer_that_is_elsewhere_is_seen(compiled):
    """Past the end, or over the one that it takes turns with."""
    text = compiled[TARGETS[0], "fp4-rows-bf16"]
    (part,) = bishengir.parts(text)
    assert part.doubled()
    for first, second, _ in part.doubled():
        moved = text.replace(
            f" = arith.constant {second} : i64", f" = arith.constant {first} : i64"
        )
        with pytest.raises(AssertionError, match="overlap"):
            bishengir.parts(moved)[0].doubled()
    last = part.used()["UB"]
    begin = max(begin for _, _, begin, end in part.buffers() if end == last)
    far = text.replace(f"constant {begin} : i64", f"constant {chip.UNIFIED_BUFFER} : i64")
    assert bishengir.parts(far)[0].used()["UB"] > chip.UNIFIED_BUFFER


def innermost(lines: list[str]) -> Iterator[list[str]]:
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
