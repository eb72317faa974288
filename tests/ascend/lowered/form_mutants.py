"""The last open form of a kernel (HIVM) with one fault in its flags, addresses or tiles."""

import re
from dataclasses import dataclass

from ascend.lowered import bishengir
from quantkit_kernels.ascend import chip

LEAST_TILE = 8
"""Smaller numbers are rounds, modes and axes."""
NUMBER = re.compile(r"(?<![\w%#.-])\d+(?!\w)")


@dataclass(frozen=True)
class Mutant:
    """A form with a fault of a kind. why: what keeps its results and its order as they were; it is
    not to be found then, and not counted."""

    kind: str
    text: str
    why: str = ""


def mutants(text):
    """A flag that is not there, has another number or the pipes exchanged, within a core or between
    two; a buffer past the end or over the one that it takes turns with; half a tile."""
    lines = text.splitlines()

    def put(kind, at, *line, why=""):
        return Mutant(kind, "\n".join([*lines[:at], *line, *lines[at + 1 :]]), why)

    for at, line in enumerate(lines):
        if line.startswith("#map"):
            turns = "which of two buffers a round takes, its flags with it"
            for half in halves(line, line.index("->")):
                bounds = re.search(r"> \((\d+), .*, s0 \* (\d+)\)>", half)
                if bounds and bounds[1] == bounds[2]:  # s0: which vector core it is, 0 or 1
                    yield put("tile", at, half, why="of the two bounds the other is never more")
                else:
                    yield put("tile", at, half, why=turns if "mod 2)" in line else "")
    for part in bishengir.parts(text):
        head = next(at for at, line in enumerate(lines) if f"func.func @{part.name}(" in line)
        twins = {second: first for first, second, _ in part.doubled()}
        placed = {begin for _, _, begin, _ in part.buffers()}
        serial = without_turns(part)
        for at, line in enumerate(part.lines, head):  # the first is the head's empty rest
            if re.search(r"(_flag|sync_block_\w+)\[", line):
                yield put("no flag", at)
                if number := re.search(r"<EVENT_ID(\d)>", line):
                    other = line.replace(number[0], f"<EVENT_ID{int(number[1]) ^ 1}>")
                    yield put("another flag", at, other)
                if pipes_of := re.search(r"_flag\[(<PIPE_\w+>), (<PIPE_\w+>)", line):
                    exchanged = f"_flag[{pipes_of[2]}, {pipes_of[1]}"
                    yield put("other pipes", at, line.replace(pipes_of[0], exchanged))
            number = re.search(r"arith\.constant (\d+) : (i32|i64|index)$", line)
            if number and number[2] == "i64" and (begin := int(number[1])) in placed:
                yield put("elsewhere", at, line.replace(f" {begin} ", f" {chip.L1_BUFFER} "))
                if begin in twins:
                    why = "the scalar unit waits between turns" if begin in serial else ""
                    over = line.replace(f" {begin} ", f" {twins[begin]} ")
                    yield put("elsewhere", at, over, why=why)
            elif number:
                for half in halves(line, line.index("constant")):
                    yield put("tile", at, half)
            elif "memref.reinterpret_cast" in line or "memref.subview" in line:
                end = line.index(" : ")
                row = re.search(r"sizes: \[(?:1, )+\d+\], (?=strides)", line)
                middle = row.end() if row else end
                for half in halves(line, line.index("["), middle):
                    yield put("tile", at, half)
                for half in halves(line, middle, end):
                    yield put("tile", at, half, why="a stride of one row")
            elif placing := re.search(r"pointer_cast.* : memref<([\dx]+)x", line):
                most = max(placing[1].split("x"), key=int)
                if int(most) >= LEAST_TILE:
                    begin, end = placing.span(1)
                    half = placing[1].replace(most, str(int(most) // 2), 1)
                    yield put("tile", at, line[:begin] + half + line[end:])


def halves(line, begin, end=None):
    """The line with one of the numbers of a part of it halved."""
    for number in NUMBER.finditer(line, begin, len(line) if end is None else end):
        if int(number[0]) >= LEAST_TILE:
            yield line[: number.start()] + str(int(number[0]) // 2) + line[number.end() :]


def without_turns(part):
    """Addresses at which are only buffers whose twin need not be there: in every round the scalar
    unit waits for the vectors after the last of them read the buffer, and only then gives what
    fills the twin."""
    numbers, lines = part.numbers(), part.lines
    ordered = {}
    placed = {
        found[1]: numbers[found[2]]
        for line in lines
        if (found := re.search(r"(%\w+) = hivm\.hir\.pointer_cast\((%[\w-]+)\)", line))
    }
    for at, line in enumerate(lines):
        taken = re.search(r"(%\w+) = arith\.select %\w+, %\w+, (%\w+) : memref", line)
        if taken is None or taken[2] not in placed:
            continue
        depth = len(line) - len(line.lstrip())
        names, uses, waits = {taken[1]}, [], []
        for index in range(at + 1, len(lines)):
            one = lines[index]
            if len(one) - len(one.lstrip()) < depth:
                break
            value, _, operation = one.strip().rpartition(" = ")
            if names & set(re.findall(r"%\w+", operation)):
                names.add(value)
                uses += [index] if "call @" in one else []
            if re.match(rf"\s{{{depth}}}hivm\.hir\.wait_flag\[<PIPE_V>, <PIPE_S>", one):
                assert "set_flag[<PIPE_V>, <PIPE_S>" in lines[index - 1]
                waits.append(index)
        filled = "load_gm" in lines[uses[0]] and not any("@store_" in lines[one] for one in uses)
        between = filled and any(not uses[0] < one < uses[-1] for one in waits)
        ordered[placed[taken[2]]] = between and ordered.get(placed[taken[2]], True)
    return {begin for begin, all_of_it in ordered.items() if all_of_it}
