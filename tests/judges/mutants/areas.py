"""What is mutated, and the narrow tests that should notice: per file, and where that is too many,
per function."""

from dataclasses import dataclass, field

KERNELS, EXECUTOR = "kernels/quantkit_kernels", "quantkit/executor"
STRICT, STREAMED = "tests/ascend/lowered/test_strict.py", "tests/ascend/test_streamed.py"
CALLS, GIVEN = "tests/ascend/test_torch_npu.py", "tests/ascend/test_what_operators_get.py"
LATENT, GROUPED = "tests/ascend/test_latent_attention.py", "tests/ascend/test_grouped_attention.py"
BOUNDS, CHIP = "tests/ascend/test_rule_bounds.py", "tests/ascend/test_chip.py"
FP4_GEMV, INT4_GROUPED = "tests/ascend/test_fp4_gemv.py", "tests/ascend/test_int4_grouped.py"
FEW = "tests/ascend/lowered/test_few_tokens_ir.py"
DOUBLE, CAPTURE = "tests/ascend/test_few_tokens.py", "tests/ascend/test_capture.py"
OPERANDS, TO_THE_BIT = (
    "tests/ascend/lowered/test_exact_operands.py",
    "tests/ascend/test_to_the_bit.py",
)


@dataclass(frozen=True)
class Area:
    """A file and its tests. words: of a function that is not followed while it runs, what the names
    of its tests hold one of.

    ruled: whether the rules change it too; where a file serves other devices as well, only what is
    meant for these tests is changed.
    loaded_once: whether what survives in a fork is always run again in a process that imports
    everything anew: of ranks.
    apart: whether its tests load a library, which stays in a process and would serve other tests
    too: they run in forks alone.
    """

    name: str
    path: str
    tests: tuple[str, ...]
    words: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    ruled: bool = True
    loaded_once: bool = False
    apart: bool = False

    def has(self, test: str, function: str) -> bool:
        """Whether a test, by its node's name, may notice a change in a function, "" for none."""
        file, _, name = test.partition("::")
        words = self.words.get(function.partition(".")[0], self.words.get("", ()))
        return file in self.tests and (not words or any(word in name for word in words))


KERNEL_WORDS = {
    "int4_row": ("int4_rows",),
    "int4_values": ("int4_rows",),
    "e2m1_values": ("fp4_rows", "every_code"),
    "e4m3_values": ("fp4_rows", "every_code"),
    "fp4_row": ("fp4_rows",),
    "row_halves": ("fp4_rows",),
    "store_row": ("fp4_rows",),
    "group_sums": ("int4_rows",),
    "nibbles": ("fp4_rows",),
    "by_group": ("int4_rows",),
    "group_offsets": ("int4_rows", "fp4_rows"),
    "multiplied": ("fp4_blocks",),
    "store_block": ("int8_blocks",),
} | {
    kernel: (kernel,)
    for kernel in ("int4_rows", "fp4_rows", "int4_blocks", "fp4_blocks", "int8_blocks", "assign")
}
FEW_WORDS = {
    "int8_row": ("int8",),
    "row_scale": ("int8", "zeros"),
    "swiglu": ("fp4",),
    "router": ("router",),
    "join": ("join",),
} | {f"{kind}_{part}": (kind,) for kind in ("int4", "fp4", "int8") for part in ("gate_up", "down")}
SOURCE_WORDS = {"": ("kernel", "offsets", "bounds")}

AREAS = (
    Area("Triton kernels", f"{KERNELS}/ascend/kernels.py", (STRICT, OPERANDS), KERNEL_WORDS),
    Area("Triton kernels", f"{KERNELS}/ascend/few_tokens.py", (FEW, OPERANDS), FEW_WORDS),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/gate.py", (DOUBLE,)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/launch.py", (CHIP, DOUBLE, STRICT)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/layout.py", (CHIP, STRICT)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/linear.py", (STRICT, TO_THE_BIT, DOUBLE)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/experts.py", (DOUBLE, TO_THE_BIT, STRICT)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/chip.py", (CHIP,)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/__init__.py", (CHIP, STREAMED)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/streamed.py", (STREAMED,)),
    Area("Triton: launch and layout", f"{KERNELS}/ascend/extension.py", (STREAMED,)),
    Area("torch_npu: rules", f"{KERNELS}/torch_npu/rules.py", (BOUNDS, CALLS)),
    Area("torch_npu: rules", f"{KERNELS}/torch_npu/attention_rules.py", (BOUNDS, CALLS)),
    Area(
        "torch_npu: calls",
        f"{KERNELS}/torch_npu/calls.py",
        (CALLS, GIVEN, LATENT, TO_THE_BIT, STREAMED),
    ),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/experts.py", (CALLS, GIVEN, TO_THE_BIT)),
    Area(
        "torch_npu: calls",
        f"{KERNELS}/torch_npu/functional.py",
        (CALLS, GIVEN, LATENT, TO_THE_BIT, CAPTURE),
    ),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/grouped.py", (GROUPED,)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/layout.py", (CALLS, GIVEN, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/linear.py", (CALLS, GIVEN, LATENT, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/prolog.py", (GIVEN, LATENT, TO_THE_BIT)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/machine.py", ("tests/ascend/test_machine.py",)),
    Area("torch_npu: calls", f"{KERNELS}/torch_npu/__init__.py", (CALLS, LATENT)),
    Area("Ascend C", "kernels/ascendc/fp4_gemv.cpp", (FP4_GEMV,), SOURCE_WORDS),
    Area("Ascend C", "kernels/ascendc/row_blocks.h", (FP4_GEMV,), SOURCE_WORDS),
    Area("Ascend C", "kernels/ascendc/int4_grouped.cpp", (INT4_GROUPED,), SOURCE_WORDS),
    Area(
        "Ascend C",
        "kernels/ascendc/binding.cpp",
        ("tests/ascend/lowered/test_binding.py",),
        ruled=False,
        apart=True,
    ),
    Area("Ascend C: twins", "kernels/ascendc/fp4_gemv.py", (FP4_GEMV,)),
    Area("Ascend C: twins", "kernels/ascendc/int4_grouped.py", (INT4_GROUPED,)),
    Area("Ascend C: twins", "kernels/ascendc/amla.py", ("tests/ascend/test_amla.py",)),
    Area(
        "collectives in 8 bits",
        f"{EXECUTOR}/ranks/quantized_all_reduce.py",
        ("tests/executor/test_coded_sums.py",),
        loaded_once=True,
    ),
    Area(
        "host",
        f"{EXECUTOR}/runner/graphs.py",
        (CAPTURE, "tests/executor/test_graphs.py"),
        ruled=False,
    ),
    Area("host", f"{EXECUTOR}/runner/runner.py", ("tests/executor/test_runner.py",), ruled=False),
    Area(
        "host",
        f"{EXECUTOR}/runner/decode_batch.py",
        ("tests/executor/test_runner.py", "tests/executor/test_decode_batch.py"),
        ruled=False,
    ),
    Area(
        "host", f"{EXECUTOR}/weights/prefetch.py", ("tests/ascend/test_prefetch.py",), ruled=False
    ),
    Area(
        "host", f"{EXECUTOR}/memory_budget.py", ("tests/ascend/test_memory_budget.py",), ruled=False
    ),
    Area("host", f"{KERNELS}/accelerator.py", (CAPTURE,), ruled=False),
    Area("host", f"{KERNELS}/paged.py", (LATENT, GROUPED), ruled=False),
)

EXPLAINED = {
    (
        "kernels/ascendc/fp4_gemv.cpp",
        "",
        "by hand: same items, other order",
    ): "every part of every column tile is somebody's",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "",
        "by hand: digits made twice",
    ): "speed only: the same digits",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "",
        "by hand: free before it is read",
    ): "vector cores are LAG groups ahead at most, fewer than there are slots",
    (
        "kernels/ascendc/int4_grouped.py",
        "",
        "by hand: the least added",
    ): "changes no largest value above 1e-23",
    (
        f"{EXECUTOR}/runner/graphs.py",
        "",
        "by hand: bounds: an odd number of blocks",
    ): "tables are powers of two wide, 16 at least: it is even",
    (
        f"{EXECUTOR}/runner/graphs.py",
        "",
        "by hand: rows of no tokens before the first fill",
    ): "a step is filled before it is computed",
    (
        f"{EXECUTOR}/runner/graphs.py",
        "DecodeSteps",
        "kept from before",
    ): "an empty pass writes to block 0 alone, which is nobody's",
    (
        f"{EXECUTOR}/runner/decode_batch.py",
        "BlockTables",
        "wrong dtype",
    ): "tables become int32 where they are copied, or read",
    (f"{EXECUTOR}/memory_budget.py", "warm_up", "wrong dtype"): "embedding takes both",
    (
        f"{KERNELS}/ascend/launch.py",
        "down",
        "swapped arguments",
    ): "the lesser of two, in either order",
    (
        f"{KERNELS}/ascend/launch.py",
        "router",
        "swapped arguments",
    ): "the lesser of two, in either order",
    (
        f"{KERNELS}/ascend/layout.py",
        "_column_tiles",
        "missing contiguous",
    ): "it is copied to its place",
    (f"{KERNELS}/ascend/streamed.py", "_int4", "widening left out"): "16 times -8 to 7 fits a byte",
    (f"{KERNELS}/ascend/streamed.py", "_fp4", "wrong dtype"): "only the low 16 bits are kept",
    (
        f"{KERNELS}/ascend/kernels.py",
        "multiplied",
        "other default",
    ): "of rows past the last, which are not stored",
    (
        f"{KERNELS}/ascend/kernels.py",
        "int8_blocks",
        "other default",
    ): "of rows past the last, which are not stored",
    (
        f"{KERNELS}/ascend/kernels.py",
        "int8_blocks",
        "constant",
    ): "speed only: of a grid's other axis there is one program, so items are computed again",
    (
        f"{EXECUTOR}/ranks/quantized_all_reduce.py",
        "CodedSums",
        "missing contiguous",
    ): "a view as another type of one byte needs no copy",
    (f"{KERNELS}/ascend/few_tokens.py", "row_scale", "other default"): "as the row of zeros below",
    (
        f"{KERNELS}/ascend/few_tokens.py",
        "router",
        "other default",
    ): "of rows past the router, which are not stored",
    (
        f"{KERNELS}/ascend/few_tokens.py",
        "join",
        "other default",
    ): "of columns that get another number",
    (
        f"{KERNELS}/ascend/streamed.py",
        "",
        "by hand: items of rows, not of experts",
    ): "speed only: into how many parts K is cut",
    (
        f"{KERNELS}/torch_npu/functional.py",
        "",
        "by hand: lengths that a graph cannot be told",
    ): "the operator takes both, and a graph is told a list of its own",
    (
        f"{KERNELS}/torch_npu/grouped.py",
        "",
        "by hand: codes taken for keys",
    ): "codes break the operator's own rule of dtypes",
    (
        f"{KERNELS}/torch_npu/experts.py",
        "_tensors",
        "one choice only",
    ): "scales of one group [E, 1, N] are those of a channel",
    (
        f"{KERNELS}/torch_npu/linear.py",
        "Fp4Linear",
        "widening left out",
    ): "a product with float32 is float32",
    (
        "kernels/ascendc/fp4_gemv.cpp",
        "Fp4Gemv",
        "barrier left out",
    ): "the one behind SpreadX: those of Decode stand before its values are read",
    ("kernels/ascendc/fp4_gemv.cpp", "Init", "constant"): "a queue has a buffer more than are used",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "Init",
        "constant",
    ): "a queue has a buffer more than are used",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "MakeDigits",
        "narrower type",
    ): "differs from 500,000 rows of 8192 on, and a step has a few",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "Process",
        "comparison",
    ): "of a chunk that is just full: its values are the same either way",
    (
        "kernels/ascendc/int4_grouped.cpp",
        "Share",
        "narrower type",
    ): "a number of tiles, which 32 bits hold up to 32 TB of weights",
    (
        "kernels/ascendc/int4_grouped.py",
        "multiply",
        "wrong dtype",
    ): "an annotation, or whole numbers that 32 bits hold",
    (
        "kernels/ascendc/amla.py",
        "rescaled",
        "wrong dtype",
    ): "an annotation, or whole numbers that 32 bits hold",
    (
        "kernels/ascendc/amla.py",
        "attend",
        "wrong dtype",
    ): "an annotation, or whole numbers that 32 bits hold",
    (
        "kernels/ascendc/amla.py",
        "attend_pages",
        "wrong dtype",
    ): "an annotation, or whole numbers that 32 bits hold",
    (
        "kernels/ascendc/amla.py",
        "rescaled",
        "constant",
    ): "a step of 256 takes every sum below what is kept, as one of 255 does",
    (
        "kernels/ascendc/row_blocks.h",
        "Next",
        "comparison",
    ): "of a block that is just full: rows are the same either way",
    (
        "kernels/quantkit_kernels/ascend/kernels.py",
        "int8_blocks",
        "dropped argument",
    ): "a product of int8 onto an int32 sum is int32 anyway",
    (
        "kernels/quantkit_kernels/ascend/few_tokens.py",
        "",
        "by hand: a row of zeros",
    ): "0 / 0 is taken for a whole number, which a CPU and the chip have some of, and that times a "
    "scale of 0 is 0",
    (
        "kernels/quantkit_kernels/ascend/linear.py",
        "",
        "by hand: speed only: two rows go to the cube",
    ): "the same product by the other kernel",
}
"""Why mutants survive that do: by path, function and rule."""
