"""The last open form of a kernel (HIVM), read and executed: what the scalar unit of a core does, here;
instructions, by pipes.py. An operation that neither knows is a Fault."""

import math
import operator
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ascend.lowered import bishengir
from ascend.lowered.pipes import CORES, PIPES, Core, Fault, Memory, View, instruction, require
from quantkit_kernels.ascend import chip
from torch import Tensor

MOST_FLAGS = 15
"""Of one number that a core sets ahead of another."""
ENDED = object()
Map = Callable[..., tuple[int, ...]]
Run = Generator[None, None, list[Any]]


@dataclass(frozen=True)
class Line:
    """An operation: its results, its name, what comes before its types, its types, its regions."""

    results: tuple[str, ...]
    name: str
    text: str
    types: str
    regions: tuple[tuple["Line", ...], ...] = ()

    @property
    def operands(self):
        return re.findall(r"%[\w-]+(?:#\d)?", self.text)

    @property
    def lists(self):
        """What its innermost brackets hold."""
        return [re.findall(r"%[\w-]+|-?\d+", one) for one in re.findall(r"\[([^][]*)\]", self.text)]

    @property
    def memref(self):
        """Of its last type: sizes, -1 for what is not said, element and space."""
        found = re.findall(
            r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<[^>]*>)?, #hivm\.address_space<(\w+)>>",
            self.types,
        )
        sizes, element, space = found[-1]
        sizes = [-1 if one == "?" else int(one) for one in sizes.split("x")[:-1]]
        return tuple(sizes), element, space


def parsed(lines, at=0):
    """The operations up to the end of a region, and where that is."""
    found = []
    while not lines[at].startswith("}"):
        one = re.fullmatch(r"(?:(%[\w-]+)(?::(\d))? = )?([\w.]+)(.*)", lines[at])
        if one is None:
            raise Fault(lines[at])
        results = [f"{one[1]}#{index}" for index in range(int(one[2] or 0))] or [one[1] or ""]
        text, _, types = one[4].partition(" : ")
        regions = []
        while lines[at].endswith("{"):
            region, at = parsed(lines, at + 1)
            regions.append(region)
        found.append(Line(tuple(results), one[3], text.strip(), types, tuple(regions)))
        at += 1
    return tuple(found), at


@dataclass(frozen=True)
class Form:
    """The functions of a form by the cores that run them, names and types of their arguments, its
    maps, and the bytes of workspace that a program has."""

    functions: dict[str, tuple[Line, ...]]
    arguments: list[tuple[str, str]]
    maps: dict[str, Map]
    workspace: int


def read(text):
    maps = {}
    for name, symbols, body in re.findall(r"(?m)^(#\w+) = affine_map<(.*?) -> \((.*)\)>$", text):
        body = body.replace("floordiv", "//").replace("mod", "%")
        names = ", ".join(re.findall(r"\w+", symbols))
        maps[name] = eval(f"lambda {names}: ({body},)", {})
    functions = {}
    for part in bishengir.parts(text):
        lines, _ = parsed([line.strip() for line in part.lines if line.strip()])
        vectors = CORES[1:] if part.name.endswith("_mix_aiv") else CORES[1:2]
        functions |= dict.fromkeys(CORES[:1] if part.name.endswith("_mix_aic") else vectors, lines)
        head = re.search(rf"func\.func @{part.name}\((.*)\) attributes", text)
    arguments = re.findall(r"(%arg\d+): (?:memref<\?x)?(\w+)", head[1])
    size = re.search(r"_infer_workspace_shape_function\(\).*\n.*constant (\d+) : index", text)
    return Form(functions, arguments, maps, int(size[1]) if size else 0)


def execute(form, programs, args):
    """Runs the programs of a one-dimensional grid at once; tensors are written in place."""
    pipes = programs * len(CORES) * len(PIPES)
    every_pipe = slice(0, pipes)
    workspace = Memory("workspace", np.full(form.workspace * programs, 0xFF, np.uint8), every_pipe)
    values = [0, *[View(workspace, "i8", 0, (-1,), (1,))] * 2]
    for (name, kind), one in zip(form.arguments[3:], args):
        if isinstance(one, Tensor):
            data = one.view(-1).view(torch.uint8).numpy()
            one = View(Memory(name, data, every_pipe, given=True), kind, 0, (-1,), (1,))
        values.append(one)
    values += [programs, 1, 1]
    require(len(values) == len(form.arguments), f"{len(values)} of {len(form.arguments)} arguments")
    named = {name: value for (name, _), value in zip(form.arguments, values)}
    every, running = [], []
    for program in range(programs):
        cores = {name: Core(name, program, pipes) for name in form.functions}
        every += cores.values()
        for name, lines in form.functions.items():
            running.append(Scalar(cores[name], cores, form.maps, dict(named)).run(lines))
    before = None
    while running:
        running = [one for one in running if next(one, ENDED) is not ENDED]
        moved = [core.counts["S"] for core in every], len(running)
        require(moved != before, f"{len(running)} cores wait for ever")
        before = moved
    for core in every:
        left = [key for flags in (core.flags, core.inbox) for key, one in flags.items() if one]
        require(not left, f"{core.name} leaves flags: {left}")


ARITHMETIC = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "xori": operator.xor,
    "minsi": min,
    "divsi": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remsi": lambda a, b: int(math.fmod(a, b)),
}


def wrapped(value, kind):
    """An integer of a kind; of i1 0 or 1."""
    bits = 64 if kind == "index" else int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def contiguous(sizes):
    return tuple(math.prod(sizes[at + 1 :]) for at in range(len(sizes)))


class Scalar:
    """The scalar unit of a core: `run` is a coroutine that stops where it waits for another core,
    and the other methods are operations by their names."""

    def __init__(self, core, cores, maps, values):
        self.core, self.cores, self.maps, self.values = core, cores, maps, values
        self.others = ("aiv0", "aiv1") if core.name == "aic" else ("aic",)

    def run(self, lines):
        """What the region yields."""
        for line in lines:
            dialect, _, name = line.name.rpartition(".")
            found = []
            if name in ("return", "yield"):
                return self.operands(line)
            if line.name == "scf.if":
                way = 0 if self.operands(line)[0] else 1
                if way < len(line.regions):
                    found = yield from self.run(line.regions[way])
            elif line.name == "scf.for":
                found = yield from self.loop(line)
            elif name == "sync_block_wait":
                yield from self.wait(self.number(line))
            elif name in ARITHMETIC:
                found = [wrapped(ARITHMETIC[name](*self.operands(line)), line.types)]
            elif dialect in ("arith", "affine", "memref", "hivm.hir", "func", "") and name in vars(
                Scalar
            ):
                found = [getattr(self, name)(line)]
            else:
                raise Fault(f"unknown operation {line.name}")
            self.values.update(zip(line.results, found))
        return []

    def loop(self, line):
        variable, *bounds = line.operands[:4]
        carried = re.findall(r"(%\w+) = (%[\w#-]+)", line.text.partition("iter_args(")[2])
        found = [self.values[start] for _, start in carried]
        for index in range(*(self.values[one] for one in bounds)):
            self.values |= {variable: index, **dict(zip((name for name, _ in carried), found))}
            found = yield from self.run(line.regions[0])
        return found

    def wait(self, number):
        for sender in self.others:
            flags = self.core.inbox[sender, number]
            while not flags:
                yield
            np.maximum(self.core.clocks["S"], flags.popleft(), out=self.core.clocks["S"])
            self.core.counts["S"] += 1

    def sync_block_set(self, line):
        pipe = line.text.partition(", <PIPE_")[2].partition(">")[0]
        for receiver in self.others:
            flags = self.cores[receiver].inbox[self.core.name, self.number(line)]
            flags.append(self.core.ended(pipe))
            require(len(flags) <= MOST_FLAGS, f"{len(flags)} flags ahead of {receiver}")

    def take(self, token):
        return self.values[token] if token.startswith("%") else int(token)

    def number(self, line):
        return self.take(line.text.partition("flag = ")[2].partition(" ")[0])

    def operands(self, line):
        return [self.values[one] for one in line.operands]

    # Numbers
    def constant(self, line):
        if line.types.startswith(("f", "bf")):
            bits = line.text.startswith("0x")
            return np.uint32(int(line.text, 16)).view(np.float32) if bits else np.float32(line.text)
        return line.text == "true" if line.text in ("true", "false") else int(line.text)

    def cmpi(self, line):
        return getattr(operator, line.text.partition(",")[0].lstrip("so"))(*self.operands(line))

    cmpf = cmpi

    def select(self, line):
        which, yes, no = self.operands(line)
        return yes if which else no

    def index_cast(self, line):
        return wrapped(int(self.operands(line)[0]), line.types.rpartition(" ")[2])

    extsi = extui = trunci = index_cast  # of i1 extui alone, which is 0 or 1 here

    def mapped(self, line):
        return self.maps[line.text.partition("(")[0]](*self.operands(line))

    def apply(self, line):
        return self.mapped(line)[0]

    def min(self, line):
        return min(self.mapped(line))

    def max(self, line):
        return max(self.mapped(line))

    # Memory
    def pointer_cast(self, line):
        (begin,), (sizes, element, space) = self.operands(line), line.memref
        require(begin % chip.BURST == 0, f"address {begin} of {space}")
        return View(self.core.spaces[space], element, begin, sizes, contiguous(sizes))

    def cast(self, line):
        return self.operands(line)[0]

    def bitcast(self, line):
        return replace(self.cast(line), element=line.memref[1])

    def view(self, line):
        (source, begin), (sizes, element, _) = self.operands(line), line.memref
        return View(source.memory, element, source.begin + begin, sizes, contiguous(sizes))

    def reinterpret_cast(self, line):
        (offset,), sizes, strides = ([self.take(one) for one in of] for of in line.lists)
        whole = replace(self.cast(line), begin=0, sizes=tuple(sizes), strides=tuple(strides))
        return whole.moved(offset)

    def subview(self, line):
        source = self.cast(line)
        offsets, sizes, steps = ([self.take(one) for one in of] for of in line.lists)
        for at, size, step, end in zip(offsets, sizes, steps, source.sizes):
            inside = size == 0 or 0 <= at <= at + (size - 1) * step < end
            require(inside, f"{at}, {size} by {step} of {source}")
        gone = len(sizes) - len(line.memref[0])
        strides = [step * stride for step, stride in zip(steps, source.strides)]
        start = source.moved(sum(at * stride for at, stride in zip(offsets, source.strides)))
        return replace(start, sizes=tuple(sizes[gone:]), strides=tuple(strides[gone:]))

    def collapse_shape(self, line):
        source = self.cast(line)
        sizes, strides = [], []
        for group in line.lists:
            parts = [(source.sizes[int(one)], source.strides[int(one)]) for one in group]
            parts = [part for part in parts if part[0] != 1] or [(1, 1)]
            for (_, outer), (size, inner) in pairwise(parts):
                require(outer == size * inner, f"{line.text} of {source}")
            sizes.append(math.prod(size for size, _ in parts))
            strides.append(parts[-1][1])
        return replace(source, sizes=tuple(sizes), strides=tuple(strides))

    def expand_shape(self, line):
        source, (*groups, shape) = self.cast(line), line.lists
        inner = [contiguous([int(shape[int(one)]) for one in group]) for group in groups]
        strides = [one * stride for of, stride in zip(inner, source.strides) for one in of]
        return replace(source, sizes=tuple(map(int, shape)), strides=tuple(strides))

    def element(self, view, indices):
        at = sum(one * stride for one, stride in zip(indices, view.strides))
        return replace(view.moved(at), sizes=(1,), strides=(1,))

    def load(self, line):
        view, *indices = self.operands(line)
        one, found = self.element(view, indices), []
        self.core.run("S", [one], [], lambda: found.append(one.get()[0]))
        return found[0] if "f" in view.element else int(found[0])

    def store(self, line):
        value, view, *indices = self.operands(line)
        one = self.element(view, indices)
        self.core.run("S", [], [one], lambda: one.put(np.array([value])))

    # Pipes
    def set_mask_norm(self, line):
        """Every lane counts, which is so here."""

    set_ffts_base_addr = set_mask_norm  # where flags between cores lie

    def get_block_idx(self, line):
        return self.core.program

    def get_sub_block_idx(self, line):
        return int(self.core.name[-1])

    def flag(self, line):
        source, target, event = line.text.strip("[]").split(", ")
        number = self.values[event] if event.startswith("%") else int(event[len("<EVENT_ID") : -1])
        return source[len("<PIPE_") : -1], target[len("<PIPE_") : -1], number

    def set_flag(self, line):
        self.core.set_flag(*self.flag(line))

    def wait_flag(self, line):
        self.core.wait_flag(*self.flag(line))

    def pipe_barrier(self, line):
        self.core.barrier(line.text[len("[<PIPE_") : -len(">]")])

    def call(self, line):
        name = line.text[1:].partition("(")[0]
        instruction(name)(self.core, *self.operands(line))
