"""A core as the last open form of a kernel (HIVM) sees it: buffers, pipes, flags, instructions.

The scalar unit gives every instruction to a pipe. Here each is computed when it is given; that a
chip, whose pipes run apart, comes to the same is what is checked. A clock per pipe (vector clocks)
holds how many instructions of every pipe have ended by then; flags, barriers and flags between
cores alone move it on. Two instructions that touch a byte, one of them writing, of which neither is
known to have ended before the other began, are a Fault; so are a byte that nothing wrote, memory
outside a buffer, and a flag that is set twice or waited for in vain. Instructions of one pipe are in no order without a barrier, as in
the compiler's own model.

Not in a form, so not here: L0A and L0B, which the cube's product fills by itself, and the order of a
sum, which is that of the lowered form, first to last.
"""

import ctypes
import math
import operator
import re
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from quantkit_kernels.ascend import chip

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES = ("aic", "aiv0", "aiv1")
SPACES = {"ub": chip.UNIFIED_BUFFER, "cbuf": chip.L1_BUFFER, "cc": chip.L0C_BUFFER}
DTYPES = {
    "i1": np.dtype("u1"),  # eight to a byte
    "i8": np.dtype("i1"),
    "i16": np.dtype("i2"),
    "i32": np.dtype("i4"),
    "i64": np.dtype("i8"),
    "f16": np.dtype("f2"),
    "bf16": np.dtype("u2"),  # its bits
    "f32": np.dtype("f4"),
}
EVENT_IDS = 8


class Fault(AssertionError):
    """What a chip may do otherwise, or cannot do."""


def require(holds, fault):
    if not holds:
        raise Fault(fault)


@dataclass
class Memory:
    """Bytes, and of each the pipe and number of the instruction that wrote it last, and the last of
    every pipe that read it. Number 0 is none, 1 what was there before the launch."""

    name: str
    data: np.ndarray[Any, Any]
    pipes: slice
    given: bool = False

    def __post_init__(self):
        size = len(self.data)
        self.writer = np.full(size, self.pipes.start, np.int16)
        self.written = (np.ones if self.given else np.zeros)(size, np.int32)
        self.read = np.zeros((self.pipes.stop - self.pipes.start, size), np.int32)


@dataclass(frozen=True)
class View:
    """A memref: where it begins, in bytes, and its sizes and strides, in elements."""

    memory: Memory
    element: str
    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __repr__(self):
        return f"{self.memory.name} from {self.begin}, {self.sizes} by {self.strides} of {self.element}"

    def moved(self, elements):
        return replace(self, begin=self.begin + elements * DTYPES[self.element].itemsize)

    def of(self, array):
        """Its part of what is known byte by byte, [.., *sizes, bytes of an element]."""
        size, sizes, strides = DTYPES[self.element].itemsize, self.sizes, self.strides
        if self.element == "i1":
            require(strides == (1,), "bits that are not next to each other")
            sizes = (-(-sizes[0] // 8),)
        last = sum((count - 1) * stride for count, stride in zip(sizes, strides))
        inside = self.begin >= 0 and self.begin + (last + 1) * size <= array.shape[-1]
        if not inside and 0 not in sizes:
            raise Fault(f"outside: {self}")
        one = array.strides[-1]
        steps = (*array.strides[:-1], *(stride * size * one for stride in strides), one)
        shape = (*array.shape[:-1], *sizes, size)
        return np.lib.stride_tricks.as_strided(array[..., self.begin :], shape, steps)

    def get(self):
        """bf16 as float32, bits as booleans."""
        values = np.ascontiguousarray(self.of(self.memory.data)).view(DTYPES[self.element])[..., 0]
        if self.element == "i1":
            return np.unpackbits(values, bitorder="little")[: self.sizes[0]].astype(bool)
        if self.element == "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def put(self, values):
        require(np.shape(values) == self.sizes, f"{np.shape(values)} in {self}")
        if self.element == "i1":
            values = np.packbits(values, bitorder="little")
        elif self.element == "bf16":
            wide = torch.tensor(np.asarray(values, np.float32))
            values = wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
        flat = np.ascontiguousarray(np.asarray(values, DTYPES[self.element]))
        self.of(self.memory.data)[...] = flat[..., None].view(np.uint8)

    def ruin(self):
        self.of(self.memory.data)[...] = 0xFF


@dataclass
class Core:
    """One core of one program: its buffers, its pipes' clocks, and the flags between them."""

    name: str
    program: int
    pipes: int
    inbox: dict[tuple[str, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self):
        first = (self.program * len(CORES) + CORES.index(self.name)) * len(PIPES)
        self.at = {pipe: first + index for index, pipe in enumerate(PIPES)}
        self.clocks = {pipe: np.ones(self.pipes, np.int32) for pipe in PIPES}
        self.counts = dict.fromkeys(PIPES, 1)
        self.flags = defaultdict(deque)
        own = slice(first, first + len(PIPES))
        self.spaces = {
            space: Memory(f"{space} of {self.name}", np.full(size, 0xFF, np.uint8), own)
            for space, size in SPACES.items()
        }

    def run(self, pipe, reads, writes, compute):
        """One instruction."""
        mine, clock = self.at[pipe], self.clocks[pipe]
        np.maximum(clock, self.clocks["S"], out=clock)
        self.counts[pipe] += 1
        known = clock.copy()
        if pipe == "S":  # one after the other
            known[mine] = self.counts[pipe]
        again = []
        for view in (*reads, *writes):
            who = view.of(view.memory.writer)
            late = view.of(view.memory.written) > known[who]
            if late.any():
                own = (who[late] // len(PIPES) == mine // len(PIPES)).any()
                if own or view in reads:
                    raise Fault(f"{pipe} touches what is being written: {view}")
                again.append((view, view.of(view.memory.data).copy()))
        for view in reads:
            if not view.of(view.memory.written).all():
                raise Fault(f"{pipe} reads what nothing wrote: {view}")
        for view in writes:
            readers = view.of(view.memory.read)
            if (readers > known[view.memory.pipes].reshape(-1, *[1] * (readers.ndim - 1))).any():
                raise Fault(f"{pipe} writes what is being read: {view}")
        compute()
        for view, before in again:  # by two cores: which is last is not seen if they are the same
            if (view.of(view.memory.data) != before).any():
                raise Fault(f"{pipe} writes what another core is writing: {view}")
        for view in reads:
            view.of(view.memory.read)[mine - view.memory.pipes.start] = self.counts[pipe]
        for view in writes:
            view.of(view.memory.writer)[...] = mine
            view.of(view.memory.written)[...] = self.counts[pipe]

    def ended(self, pipe):
        """What is known where all that the pipe was given until now has ended."""
        clock = np.maximum(self.clocks[pipe], self.clocks["S"])
        clock[self.at[pipe]] = self.counts[pipe]
        return clock

    def set_flag(self, source, target, event):
        flag = self.flags[source, target, event]
        require(0 <= event < EVENT_IDS, f"event {event}")
        require(not flag, f"{self.name} sets twice: {source} to {target}, {event}")
        flag.append(self.ended(source))

    def wait_flag(self, source, target, event):
        flag = self.flags[source, target, event]
        require(flag, f"{self.name} waits in vain: {source} to {target}, {event}")
        np.maximum(self.clocks[target], flag.popleft(), out=self.clocks[target])

    def barrier(self, pipe):
        pipes = PIPES if pipe == "ALL" else (pipe,)
        ends = np.max([self.ended(one) for one in pipes], axis=0)
        for one in pipes:
            np.maximum(self.clocks[one], ends, out=self.clocks[one])


# Instructions: what each reads and writes, on which pipe, and what it computes. A buffer for
# intermediate results is written: nothing may be in it.


def copy(pipe):
    """Bytes into a buffer come in bursts: what the last of a row has more is padding, a value or
    anything."""

    def instruction(core, source, target, padding=0, value=0, *left):
        if source.sizes != target.sizes or padding not in (0, 2) or any(left):
            raise Fault(f"copy of {source} to {target}, padding {padding} {left}")
        *rows, width = target.sizes
        size = DTYPES[target.element].itemsize
        spare = 0 if pipe == "MTE3" else -width % (chip.BURST // size)
        rest = replace(target.moved(width), sizes=(*rows, spare))

        def run():
            target.put(source.get())
            if padding:
                rest.put(np.full(rest.sizes, value))
            else:
                rest.ruin()

        core.run(pipe, [source], [target, rest], run)

    return instruction


def fill(pipe):
    def instruction(core, value, target):
        core.run(pipe, [], [target], lambda: target.put(np.full(target.sizes, value)))

    return instruction


def arange(core, target, first, step):
    values = first + step * np.arange(target.sizes[0])
    core.run("V", [], [target], lambda: target.put(values))


def vector(count, compute):
    """Of so many operands: then comes the result, then intermediate results."""

    def instruction(core, *operands):
        inputs, (target, *rest) = operands[:count], operands[count:]
        for one in inputs:
            if isinstance(one, View):
                alike = [size in (1, wanted) for size, wanted in zip(one.sizes, target.sizes)]
                fits = len(one.sizes) == len(target.sizes) and all(alike)
                require(fits, f"{one} for {target}")

        def run():
            first = inputs[0].get()
            others = [
                one.get() if isinstance(one, View) else np.array(one, first.dtype)
                for one in inputs[1:]
            ]
            with np.errstate(all="ignore"):
                target.put(np.broadcast_to(compute(first, *others), target.sizes))
            for one in rest:
                one.ruin()

        core.run("V", [one for one in inputs if isinstance(one, View)], [target, *rest], run)

    return instruction


def reduced(combine, axes):
    """axes: which are reduced, r, and which are kept, a."""

    def instruction(core, source, target, rest, initial):
        def run():
            values = np.moveaxis(source.get(), axes.index("r"), 0)
            total = np.full(values.shape[1:], initial, values.dtype)
            for one in values:
                total = combine(one, total)
            rest.ruin()
            require(total.size == math.prod(target.sizes), f"{total.shape} in {target}")
            target.put(total.reshape(target.sizes))

        core.run("V", [source], [target, rest], run)

    return instruction


def cast(core, source, target, mode):
    whole = target.element.startswith("i") and not source.element.startswith("i")
    rounding = {0: np.rint, 4: np.trunc}[mode] if whole else np.asarray
    core.run("V", [source], [target], lambda: target.put(rounding(source.get())))


def plain(fractals):
    """[columns / c, rows / r, r, c] as [rows, columns]."""
    across, down, rows, columns = fractals.shape
    return fractals.transpose(1, 2, 0, 3).reshape(down * rows, across * columns)


def to_fractals(core, source, target):
    """Rows past the source's are left alone."""
    (height, width), (across, down, rows, columns) = source.sizes, target.sizes
    fits = width == across * columns and height <= down * rows
    require(fits, f"{source.sizes} to {target.sizes}")
    wide, high, low, narrow = target.strides
    starts = [target.moved(row // rows * high + row % rows * low) for row in range(height)]
    placed = [replace(one, sizes=(across, columns), strides=(wide, narrow)) for one in starts]

    def run():
        for values, view in zip(source.get(), placed):
            view.put(values.reshape(across, columns))

    core.run("MTE2", [source], placed, run)


def product(core, a, b, first, m, k, n, c, *events):
    """c = a b, added to c but for the first. events: two flags that are waited for, two that are
    set when the operands were read, the round, which chooses buffers, and three that are unused."""
    require(events[5:] == (-1, -1, 0), f"events {events}")
    operands = []
    for one, awaited, given in zip((a, b), events, events[2:]):
        if awaited >= 0:
            core.wait_flag("MTE2", "MTE1", awaited)
        core.run("MTE1", [one], [], lambda one=one: operands.append(plain(one.get())))
        if given >= 0:
            core.set_flag("MTE1", "MTE2", given)
    np.maximum(core.clocks["M"], core.ended("MTE1"), out=core.clocks["M"])
    left, right = (one.astype(DTYPES[c.element]) for one in operands)
    across, down, rows, columns = c.sizes
    fits = m <= len(left) == down * rows and left.shape[1] == k == len(right)
    require(fits and right.shape[1] == n == across * columns, f"product {m} {k} {n} in {c}")

    def run():
        total = np.zeros((len(left), n), left.dtype) if first else plain(c.get())
        for one in range(k):
            total = total + left[:, one, None] * right[one]
        c.put(total.reshape(down, rows, across, columns).transpose(2, 0, 1, 3))

    core.run("M", [] if first else [c], [c], run)
    core.barrier("M")  # products that add to one buffer follow each other


def store_product(core, source, target, rounding, *rest):
    kinds = {("f32", "bf16"): 16, ("f32", "f16"): 1}
    expected = (kinds.get((source.element, target.element), 0), 0, 0, 0)
    require((rounding, *rest) == expected, f"rounding {rounding}, {rest}")
    rows, columns = target.sizes
    core.run("FIX", [source], [target], lambda: target.put(plain(source.get())[:rows, :columns]))


@cache
def expf():
    """The one that the lowered form calls."""
    function = ctypes.CDLL("libm.so.6").expf
    function.argtypes, function.restype = (ctypes.c_float,), ctypes.c_float
    return np.vectorize(function, otypes=[np.float32])


BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": np.fmax,
    "and": operator.and_,
}
SCALAR = {
    "adds": operator.add,
    "muls": operator.mul,
    "maxs": np.maximum,
    "shls": operator.lshift,
    "shrs": operator.rshift,
}
KIND = r"(?:float|half|bfloat16_t|bool|int\d+_t)"
TABLE = {
    rf"load_gm_to_ubuf_[12]d_{KIND}": lambda _: copy("MTE2"),
    rf"store_ubuf_to_gm_[12]d_{KIND}": lambda _: copy("MTE3"),
    rf"copy_ubuf_to_ubuf_1d_{KIND}": lambda _: copy("V"),
    rf"broadcast_scalar_{KIND}_to_1d": lambda _: fill("V"),
    rf"set_l1_2d_{KIND}": lambda _: fill("MTE2"),
    rf"nd2nz_{KIND}": lambda _: to_fractals,
    rf"mma_tile_{KIND}_to_{KIND}": lambda _: product,
    rf"fixpipe_nz2nd_{KIND}_to_{KIND}_4d_to_2d": lambda _: store_product,
    rf"vcast_{KIND}_to_{KIND}_1d_with_mode": lambda _: cast,
    rf"v({'|'.join(BINARY)})_[123]d_{KIND}": lambda name: vector(2, BINARY[name]),
    rf"v({'|'.join(SCALAR)})_vs_1d_{KIND}": lambda name: vector(2, SCALAR[name]),
    rf"vdiv_vs_1d_{KIND}": lambda _: vector(2, operator.truediv),
    rf"(?:enablevc_)?reduce_sum_(r|ra|ar|ara)_{KIND}": lambda axes: reduced(operator.add, axes),
    rf"(?:enablevc_)?reduce_max_(r)_{KIND}": lambda axes: reduced(np.fmax, axes),
    rf"vabs_1d_{KIND}": lambda _: vector(1, abs),
    rf"vexp_1d_{KIND}": lambda _: vector(1, expf()),
    rf"vnot_1d_{KIND}": lambda _: vector(1, np.invert),
    rf"vcmp_eq_1d_{KIND}": lambda _: vector(2, operator.eq),
    rf"vsel_v[vs]_1d_(?:bool_)?{KIND}": lambda _: vector(3, np.where),
    rf"arange_1d_{KIND}": lambda _: arange,
}


@cache
def instruction(name):
    for pattern, make in TABLE.items():
        if found := re.fullmatch(pattern, name):
            return make(found[1] if found.groups() else "")
    raise Fault(f"unknown instruction {name}")
