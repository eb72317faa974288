"""What is mutated, and the narrow tests that should notice: per file, and where that is too many, per function."""

from dataclasses import dataclass, field

KERNELS = "kernels/quantkit_kernels"
STRICT, KERNEL_TESTS = "tests/ascend/lowered/test_strict.py", "tests/ascend/lowered/test_kernels.py"
CALLS, GIVEN = "tests/ascend/test_torch_npu.py", "tests/ascend/test_what_operators_get.py"
LATENT, GROUPED = "tests/ascend/test_latent_attention.py", "tests/ascend/test_grouped_attention.py"
BOUNDS, CHIP, PAIRS = "tests/ascend/test_rule_bounds.py", "tests/ascend/test_chip.py", "tests/ascend/test_group_pairs.py"
FACTS, FEW = "tests/ascend/lowered/test_ir_facts.py", "tests/ascend/lowered/test_few_tokens_ir.py"
DOUBLE = "tests/ascend/test_few_tokens.py"
OPERANDS, TO_THE_BIT = "tests/ascend/lowered/test_exact_operands.py", "tests/ascend/test_to_the_bit.py"


@dataclass(frozen=True)
class Area:
    """A file and its tests, arguments of pytest. by_function: of a function, where others suffice; the longest name that fits counts."""

    name: str
    path: str
    tests: tuple[str, ...]
    by_function: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def tests_of(self, function: str) -> tuple[str, ...]:
        fitting = [name for name in self.by_function if function == name or function.startswith(f"{name}.")]
        return self.by_function[max(fitting, key=len)] if fitting else self.tests


def _of_kernels(names: str) -> tuple[str, ...]:
    return (STRICT, OPERANDS, "-k", names)


AREAS = (
    Area(
        "Triton kernels",
        f"{KERNELS}/ascend/kernels.py",
        (STRICT,),
        {
            "int4_rows": _of_kernels("int4_rows"),
            "int4_row": _of_kernels("int4_rows"),
            "fp4_rows": _of_kernels("fp4_rows"),
            "fp4_row": _of_kernels("fp4_rows"),
            "int4_blocks": _of_kernels("int4_blocks"),
            "fp4_blocks": _of_kernels("fp4_blocks"),
            "int8_blocks": _of_kernels("int8_blocks"),
            "int4_values": _of_kernels("int4_rows"),
            "e2m1_values": _of_kernels("fp4_rows or every_code"),
            "e4m3_values": _of_kernels("fp4_rows or every_code"),
            "row_halves": _of_kernels("fp4_rows"),
            "store_row": _of_kernels("fp4_rows"),
            "group_sums": _of_kernels("int4_rows"),
            "nibbles": _of_kernels("fp4_rows"),
            "by_group": _of_kernels("int4_rows"),
            "group_offsets": _of_kernels("int4_rows or fp4_rows"),
            "multiplied": _of_kernels("fp4_blocks"),
            "store_block": _of_kernels("int8_blocks"),
        },
    ),
    Area(
        "Triton kernels",
        f"{KERNELS}/ascend/few_tokens.py",
        (FEW, OPERANDS),
        {
            "int4_gate_up": (FEW, OPERANDS, "-k", "int4"),
            "int4_down": (FEW, OPERANDS, "-k", "int4"),
            "fp4_gate_up": (FEW, OPERANDS, "-k", "fp4"),
            "fp4_down": (FEW, OPERANDS, "-k", "fp4"),
            "int8_gate_up": (FEW, OPERANDS, "-k", "int8"),
            "int8_down": (FEW, OPERANDS, "-k", "int8"),
            "int8_row": (FEW, OPERANDS, "-k", "int8"),
            "row_scale": (FEW, OPERANDS, "-k", "int8 or zeros"),
            "swiglu": (FEW, "-k", "fp4"),
            "router": (FEW, "-k", "router"),
            "join": (FEW, "-k", "join"),
        },
    ),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/gate.py", (DOUBLE,)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/launch.py", (CHIP, DOUBLE, STRICT)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/layout.py", (CHIP, STRICT)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/linear.py", (STRICT, TO_THE_BIT, "-k", "linear or held")),
    Area(
        "Triton: launch and layout",
        f"{KERNELS}/ascend/experts.py",
        (PAIRS, DOUBLE, TO_THE_BIT, STRICT, "-k", "experts or pair or gate or held"),
        {"group_pairs": (PAIRS,)},
    ),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/chip.py", (CHIP,)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/__init__.py", (CHIP,)),
    Area("torch_npu: rules", f"{KERNELS}/torch_npu/rules.py", (BOUNDS, CALLS, "-k", "not route and not experts")),
    Area("torch_npu: rules", f"{KERNELS}/torch_npu/attention_rules.py", (BOUNDS, CALLS, "-k", "not route and not experts")),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/calls.py", (CALLS, GIVEN, LATENT, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/experts.py", (CALLS, GIVEN, TO_THE_BIT)),
    Area(
        "torch_npu: calls",
        f"{KERNELS}/torch_npu/functional.py",
        (CALLS, GIVEN, LATENT, TO_THE_BIT),
        {name: (CALLS, TO_THE_BIT) for name in ("route", "choose", "moe_gate", "silu_and_mul")},
    ),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/grouped.py", (GROUPED,)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/layout.py", (CALLS, GIVEN, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/linear.py", (CALLS, GIVEN, LATENT, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/prolog.py", (GIVEN, LATENT, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/machine.py", ("tests/ascend/test_machine.py",)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/__init__.py", (CALLS, LATENT)),
    Area("Ascend C", "kernels/ascendc/fp4_gemv.cpp", ("tests/ascend/test_fp4_gemv.py", "-k", "kernel or offsets or bounds")),
    Area("Ascend C", "kernels/ascendc/row_blocks.h", ("tests/ascend/test_fp4_gemv.py", "-k", "kernel")),
    Area("Ascend C", "kernels/ascendc/int4_grouped.cpp", ("tests/ascend/test_int4_grouped.py", "-k", "kernel or offsets or bounds")),
    Area(
        "Ascend C: twins",
        "kernels/ascendc/fp4_gemv.py",
        ("tests/ascend/test_fp4_gemv.py", "-k", "not kernel and not offsets and not bounds"),
    ),
    Area(
        "Ascend C: twins",
        "kernels/ascendc/int4_grouped.py",
        ("tests/ascend/test_int4_grouped.py", "-k", "not kernel and not offsets and not bounds"),
    ),
    Area("Ascend C: twins", "kernels/ascendc/amla.py", ("tests/ascend/test_amla.py", "-k", "not model")),
    Area("collectives in 8 bits", "quantkit/executor/coded_sums.py", ("tests/executor/test_coded_sums.py",)),
)

EXPLAINED = {
    ("kernels/ascendc/fp4_gemv.cpp", "Init", "constant"): "a queue has a buffer more than are used",
    ("kernels/ascendc/int4_grouped.cpp", "Init", "constant"): "a queue has a buffer more than are used",
    ("kernels/ascendc/int4_grouped.cpp", "MakeDigits", "narrower type"): "differs from 500,000 rows of 8192 on, and a step has a few",
    ("kernels/ascendc/int4_grouped.cpp", "Process", "comparison"): "of a chunk that is just full: its values are the same either way",
    ("kernels/ascendc/int4_grouped.cpp", "Share", "narrower type"): "a number of tiles, which 32 bits hold up to 32 TB of weights",
    ("kernels/ascendc/amla.py", "rescaled", "constant"): "a step of 256 takes every sum below what is kept, as one of 255 does",
    ("kernels/ascendc/row_blocks.h", "Next", "comparison"): "of a block that is just full: rows are the same either way",
    (
        "kernels/quantkit_kernels/ascend/kernels.py",
        "int8_blocks",
        "dropped argument",
    ): "a product of int8 onto an int32 sum is int32 anyway",
    (
        "kernels/quantkit_kernels/ascend/few_tokens.py",
        "row_scale",
        "by hand: a row of zeros",
    ): "0 / 0 is taken for a whole number, which a CPU and the chip have some of, and that times a scale of 0 is 0",
    (
        "kernels/quantkit_kernels/ascend/linear.py",
        "",
        "by hand: speed only: two rows go to the cube",
    ): "the same product by the other kernel",
}
"""Why mutants survive that do: by path, function and rule."""
