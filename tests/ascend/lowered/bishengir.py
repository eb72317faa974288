"""Huawei's compiler of Triton kernels, as triton-ascend calls it, up to the form that it gives to
its closed back end; and what can be read off that form (HIVM).

The package ascendnpu-ir has it, for x86-64 hosts without an NPU and without CANN; `make test-ascend`
puts it next to triton-ascend. It ends at the absent back end, hivmc, with exit code 1: a kernel
passed if its last form was written. L0A and L0B are filled inside hivmc's own functions, so their
use is in no form.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ascend.lowered.ascend_ir import TARGET
from triton.compiler.compiler import make_backend

BISHENGIR = Path(sys.prefix) / "bishengir/ascendnpuir/bin/bishengir-compile"
BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}
BUFFERS = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
FUNCTION = re.compile(r"(?m)^  func\.func @(\w+)\(.*\{$")


class NotCompiled(Exception):
    """What the compiler said."""


@cache
def options():
    """What triton-ascend gives the compiler for an Atlas A2, but for the files and the target."""
    asked = []

    def run(command, **_):
        if "--help" in command:
            return subprocess.run(command, capture_output=True, text=True, check=False)
        asked.append(command)
        raise NotCompiled

    backend = make_backend(TARGET)
    known = backend.parse_options({})
    stages = {}
    backend.add_stages(stages, known)
    patched = {
        "_get_npucompiler_path": lambda: str(BISHENGIR),
        "_parse_linalg_metadata": lambda text, metadata: (text, metadata),
        "NPUUtils": lambda: SimpleNamespace(get_arch=lambda: "A2"),
        "subprocess": SimpleNamespace(run=run),
    }
    with mock.patch.dict(stages["npubin"].__globals__, patched), suppress(NotCompiled):
        stages["npubin"]("", {"target": TARGET, **known.__dict__})
    (command,) = asked
    return tuple(one for one in command[2:-2] if not one.startswith("--target"))


def compiled(lowered, target):
    """The last open form of a kernel. NotCompiled where a pass refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttadapter.mlir"
        source.write_text(lowered)
        done = subprocess.run(
            [BISHENGIR, source, f"--target={target}", *options(), f"--save-temps={folder}", "-o", f"{folder}/out"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        form = Path(folder) / "module.hivm.opt.mlir"
        if "Cannot find hivmc" not in done.stdout + done.stderr or not form.exists():
            raise NotCompiled((done.stdout + done.stderr)[:2000])
        return form.read_text()


@dataclass(frozen=True)
class Part:
    """A function of a form: of the vector cores or of the cube core."""

    name: str
    lines: tuple[str, ...]

    def buffers(self):
        """Value, buffer, first and last address of each that PlanMemory placed."""
        text = "\n".join(self.lines)
        numbers = self.numbers()
        placed = r"(%\w+) = hivm\.hir\.pointer_cast\((%[\w-]+)\)[^:]*: memref<([\dx]+)x(\w+), #hivm\.address_space<(\w+)>"
        for value, address, sizes, element, space in re.findall(placed, text):
            count = BYTES[element]
            for size in sizes.split("x"):
                count *= int(size)
            yield value, BUFFERS[space], numbers[address], numbers[address] + count

    def used(self):
        """Bytes of each buffer."""
        most = Counter()
        for _, buffer, _, end in self.buffers():
            most[buffer] = max(most[buffer], end)
        return most

    def doubled(self):
        """Pairs of buffers that a loop takes in turns, one filled while the other is read: their
        addresses, and the bytes of each."""
        first = {value: (begin, end) for value, _, begin, end in self.buffers()}
        pairs = []
        taken = re.findall(r"arith\.select %\w+, (%\w+), (%\w+) : memref", "\n".join(self.lines))
        for a, b in taken:
            if a in first and b in first:
                assert first[a][1] <= first[b][0] or first[b][1] <= first[a][0], "they overlap"
                pairs.append((first[a][0], first[b][0], first[a][1] - first[a][0]))
        return pairs

    def numbers(self):
        """Constants of 64 bits."""
        found = re.findall(r"(%[\w-]+) = arith\.constant (-?\d+) : i64", "\n".join(self.lines))
        return {name: int(value) for name, value in found}


def parts(form):
    """The functions that run on a device."""
    found = []
    for match in FUNCTION.finditer(form):
        body = form[match.end() :].partition("\n  }\n")[0]
        if "hivm." in body:
            found.append(Part(match[1], (*body.splitlines(), "  }")))
    return found


def spec(form):
    """The target's sizes, in bits, and its cores, as the compiler has them."""
    return {name: int(value) for name, value in re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', form)}
