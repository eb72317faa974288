"""What can be read off the lowered IR of a kernel: loops, scalar accesses, and the bytes alive at
once in the innermost loop."""

import re
from dataclasses import dataclass

BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}
TENSOR = re.compile(r"(?:tensor|memref)<((?:\d+x)+)(\w+)")
SCALAR_ACCESS = ("memref.load", "memref.store", "tensor.extract ", "tensor.insert ", "scf.while")


@dataclass(frozen=True)
class Loop:
    """A loop's own text (inner loops included), and how deep it lies: 0 for the outermost."""

    depth: int
    body: tuple[str, ...]


def loops(lowered: str) -> list[Loop]:
    lines = lowered.splitlines()
    found, depth = [], -1
    ends: list[int] = []
    for index, line in enumerate(lines):
        while ends and index >= ends[-1]:
            ends.pop()
            depth -= 1
        if "scf.for" in line:
            indent = len(line) - len(line.lstrip())
            end = next(
                i for i in range(index + 1, len(lines)) if lines[i].startswith(" " * indent + "}")
            )
            depth += 1
            ends.append(end)
            found.append(Loop(depth, tuple(lines[index + 1 : end])))
    return found


def scalar_accesses(loop: Loop) -> list[str]:
    """Lines that touch one element at a time, and inner loops: what a vector or cube core cannot do
    as one instruction."""
    return [
        line.strip()
        for line in loop.body
        if "scf.for" in line or any(access in line for access in SCALAR_ACCESS)
    ]


def result_bytes(line: str) -> int:
    """The size of the tensor that a line defines, 0 for scalars and views."""
    if "reinterpret_cast" in line or "subview" in line or "to_tensor" in line or "reshape" in line:
        return 0
    types = TENSOR.findall(line.rpartition("->")[2] if "->" in line else line.rpartition(" to ")[2])
    if not types:
        return 0
    sizes, element = types[-1]
    count = 1
    for size in sizes.strip("x").split("x"):
        count *= int(size)
    return count * BYTES[element]


def peak_bytes(lowered: str, loop: Loop) -> int:
    """The most bytes of tensors alive at once in the loop, each operation writing to memory of its
    own.

    Views count as what they show. Whole-tile constants, defined before the loop, count while the
    loop uses them; products and accumulators of the cube are left out, for they live in its own
    buffers.
    """
    owner: dict[str, str] = {}
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    uses: list[set[str]] = []
    body = "\n".join(loop.body)
    for line in lowered.splitlines():
        name = re.match(r"\s*(%[\w#-]+)(?::\d+)? = linalg.fill", line)
        if name and re.search(rf"{re.escape(name[1])}\b", body):
            size[name[1]] = result_bytes(line)
    resident = sum(size.values())
    size.clear()
    for index, line in enumerate(loop.body):
        match = re.match(r"\s*(%[\w#-]+) = (\S+)", line)
        used = {
            owner.get(name, name)
            for name in re.findall(r"%[\w-]+", line.partition(" = ")[2] if match else line)
        }
        uses.append(used)
        if match:
            name, operation = match[1], match[2]
            views = (
                "bufferization.to_tensor",
                "tensor.reshape",
                "memref.subview",
                "tensor.extract_slice",
            )
            if operation in views:
                source = re.findall(r"%[\w-]+", line.partition(" = ")[2])[0]
                owner[name] = owner.get(source, source)
            elif "linalg.matmul" not in line and "tensor.empty" not in line:
                size[name] = result_bytes(line)
        for one in used:
            last[one] = index
    alive, peak = 0, 0
    for index, line in enumerate(loop.body):
        match = re.match(r"\s*(%[\w#-]+) = ", line)
        if match:
            alive += size.get(match[1], 0)
        peak = max(peak, alive)
        alive -= sum(size.pop(name, 0) for name in uses[index] if last[name] == index)
    return resident + peak
