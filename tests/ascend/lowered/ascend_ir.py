"""Lower a Triton kernel for the Ascend910B, and execute the lowered IR on this CPU.

triton-ascend lowers a kernel to linalg on memrefs, the input of the chip's own compiler. Stock MLIR
and LLVM 19 turn the same IR into host
code. What this proves: the arithmetic, addressing and masks of the IR. What it does not: anything
bishengir does after it (buffers, synchronisation, the split into cube and vector code), device
binaries, speed.
"""

import ctypes
import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ascend.guard import run_guarded
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TARGET = GPUTarget("npu", "Ascend910B", 0)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
TO_LLVM = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
)
# The one runtime function that MLIR calls: copy between strided memrefs of any rank.
RUNTIME = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int64_t rank; int64_t *view; } AnyMemref;
static void copy(int64_t bytes, int64_t rank, char *from, const int64_t *from_stride, char *to, const int64_t *to_stride,
                 const int64_t *size) {
  if (rank == 0) { memcpy(to, from, bytes); return; }
  for (int64_t i = 0; i < size[0]; i++)
    copy(bytes, rank - 1, from + i * from_stride[0] * bytes, from_stride + 1, to + i * to_stride[0] * bytes, to_stride + 1, size + 1);
}
void memrefCopy(int64_t bytes, AnyMemref *from, AnyMemref *to) {  /* view: allocated, aligned, offset, sizes, strides */
  int64_t *f = from->view, *t = to->view, rank = from->rank;
  copy(bytes, rank, (char *)f[1] + f[2] * bytes, f + 3 + rank, (char *)t[1] + t[2] * bytes, t + 3 + rank, f + 3);
}
"""


def lower(kernel, args, constants):
    """The linalg IR of a `triton.jit` function for these arguments (their dtypes matter, their
    values do not)."""
    backend = make_backend(TARGET)
    options = backend.parse_options({})
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(args), (names, len(args))
    signature = {
        name: POINTERS[arg.dtype] if isinstance(arg, Tensor) else "i32"
        for name, arg in zip(names, args)
    }
    source = ASTSource(fn=kernel, signature=signature, constants=constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {"target": TARGET, **options.__dict__}
    stages = {}
    backend.add_stages(stages, options)
    return str(stages["ttadapter"](stages["ttir"](module, metadata), metadata))


@dataclass(frozen=True)
class Executable:
    """Host code of one lowered kernel."""

    function: Any
    is_memref: tuple[bool, ...]

    def __call__(self, programs, args):
        """Run the programs 0..programs-1 of a one-dimensional grid, one after the other, the
        operands between guard pages."""
        run_guarded(lambda placed: self._run(programs, placed), args)

    def _run(self, programs, args):
        """args: numbers, and addresses of memrefs."""
        for program in range(programs):
            # Lock and workspace come first, the grid's sizes and the program's place in it last.
            values = [0, 0, *args, programs, 1, 1, program, 0, 0]
            assert len(values) == len(self.is_memref), (len(values), len(self.is_memref))
            flat = []
            for memref, value in zip(self.is_memref, values):
                if memref:
                    pointer = ctypes.c_void_p(value)
                    flat += [
                        pointer,
                        pointer,
                        ctypes.c_int64(0),
                        ctypes.c_int64(1 << 40),
                        ctypes.c_int64(1),
                    ]
                else:
                    flat.append(ctypes.c_int32(value))
            self.function(*flat)


STEPS = (
    ["mlir-opt-19", "kernel.mlir", *TO_LLVM, "-o", "llvm.mlir"],
    ["mlir-translate-19", "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll"],
    ["llc-19", "-O2", "-filetype=obj", "-relocation-model=pic", "kernel.ll", "-o", "kernel.o"],
    ["gcc", "-O2", "-shared", "-fPIC", "runtime.c", "kernel.o", "-o", "kernel.so", "-lm"],
)


def compile_for_host(lowered):
    """Host code of the IR. Hints to the chip's compiler are dropped; nothing else is changed."""
    source = "\n".join(line for line in lowered.splitlines() if "annotation.mark" not in line)
    source = re.sub(r'(, )?input_precison = "\w+"', "", source)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "kernel.mlir").write_text(source)
        (folder / "runtime.c").write_text(RUNTIME)
        for step in STEPS:
            result = subprocess.run(step, cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, f"{' '.join(step)}\n{result.stderr[:3000]}"
        library = ctypes.CDLL(str(folder / "kernel.so"))  # mapped: its file may go
    match = re.search(r"func\.func @(\w+)\((.*?)\) attributes", source, re.DOTALL)
    assert match is not None, source[:500]
    kinds = tuple("memref<" in kind for kind in re.findall(r"%arg\d+: ([^%]+)", match[2]))
    return Executable(library[match[1]], kinds)


_BUILT = {}


def execute(kernel, programs, args, constants):
    """Lower, compile and run; tensors are written in place. Returns the lowered IR."""
    lowered = lower(kernel, args, constants)
    key = hashlib.sha256(lowered.encode()).hexdigest()
    if key not in _BUILT:
        _BUILT[key] = compile_for_host(lowered)
    _BUILT[key](programs, args)
    return lowered
