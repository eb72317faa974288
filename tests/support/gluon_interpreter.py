"""An interpreter of Gluon kernels on the CPU, as far as both wgmma_kernel.py and
index_wgmma_kernel.py go: the same source over torch tensors, program after program.

Triton's own interpreter does not take Gluon. Layouts mean nothing here; what is refused is what a
card would hang or err on: a barrier that is waited for while nothing is on its way, a place that is
loaded before its products are done, an address outside a tensor.
"""

import itertools
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Descriptor:
    """A matrix as TMA reads it, or a vector: tiles of `block`, zeros outside."""

    layout = "of TMA"

    def __init__(self, matrix, block):
        self.matrix, self.block = matrix, block
        self.dtype = SimpleNamespace(of=matrix.dtype, primitive_bitwidth=8 * matrix.itemsize)

    def tile(self, at):
        found = torch.zeros(self.block, dtype=self.matrix.dtype)
        part = self.matrix[tuple(slice(one, one + size) for one, size in zip(at, self.block))]
        found[tuple(map(slice, part.shape))] = part
        return found


class Pointer:
    def __init__(self, flat, offset=0):
        assert flat.dim() == 1
        self.flat, self.offset, self.dtype = flat, offset, SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    def cells(self, mask):
        offset, inside = torch.broadcast_tensors(
            torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask)
        )
        assert not ((offset < 0) | (offset >= self.flat.numel()))[inside].any(), (
            "outside the tensor"
        )
        return offset, inside


class Value(Tensor):
    """What is asked for its layout, or taken for numbers of another type."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype, bitcast=False):  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


class Place:
    """A tile in shared memory: loaded once more when as many have read it as `readers`, and none
    reads."""

    def __init__(self, readers, dtype, *shape):
        self.value, self.readers, self.missing = torch.empty(shape, dtype=dtype), readers, shape[0]
        self.dtype = dtype
        self.reading, self.read = 0, readers

    def permute(self, order):
        return Turned(self, order)

    def slice(self, first, length):
        return Rows(self, first, length)

    def fill(self, values, first=0):
        if self.missing == 0:
            assert self.read == self.readers, "loaded before its products were done"
            self.missing = len(self.value)
        self.value[first : first + len(values)] = values
        self.missing -= len(values)
        assert self.missing >= 0, "loaded twice"
        self.read = 0

    def begin(self):
        assert self.missing == 0, "read before it was loaded"
        assert self.read < self.readers, "read twice"
        self.reading += 1

    def end(self):
        self.reading, self.read = self.reading - 1, self.read + 1
        if self.read == self.readers and self.value.is_floating_point():
            self.value.fill_(float("nan"))

    def load(self, layout):
        assert self.missing == 0
        return self.value.clone()

    def store(self, values):
        self.value.copy_(values)
        self.missing = 0


class Kept(Place):
    """A tile that stays as it is, however often it is read."""

    def __init__(self, dtype, *shape):
        super().__init__(0, dtype, *shape)

    def begin(self):
        assert self.missing == 0, "read before it was written"
        self.reading += 1

    def end(self):
        self.reading -= 1

    def store(self, values):
        assert not self.reading, "written while a product reads it"
        super().store(values)


class Rows:
    def __init__(self, place, first, length):
        self.place, self.first, self.length = place, first, length

    def fill(self, values):
        assert len(values) == self.length
        self.place.fill(values, self.first)


class Turned:
    def __init__(self, place, order):
        self.place, self.order = place, order

    @property
    def value(self):
        return self.place.value.permute(self.order)


class Barrier:
    """Its phase ends when all have arrived, and the bytes that were announced are there."""

    def __init__(self):
        self.ended, self.count, self.arrived, self.missing = 0, 1, 0, 0

    def init(self, count):
        self.count = count

    def arrive(self, count, brought=0):
        self.arrived, self.missing = self.arrived + count, self.missing - brought
        assert self.arrived <= self.count, "more arrive than are awaited"
        if self.arrived == self.count and self.missing == 0:
            self.ended, self.arrived = self.ended + 1, 0


class Machine:
    """One program at a time, and of its partitions one until it has to wait. Products that were
    issued keep their places until they have been waited for."""

    def __init__(self):
        self.program = (0,)
        self.programs = (1,)
        self.issued = {}
        self.readers = 1
        self.turn = threading.Condition()
        self.running = []

    @staticmethod
    def init(barrier, count):
        barrier.init(count)

    @staticmethod
    def arrive(barrier, count, pred=True):
        if pred:
            barrier.arrive(count)

    @staticmethod
    def expect(barrier, count, pred=True):
        if pred:
            barrier.missing += count
            barrier.arrive(1)

    def wait(self, barrier, phase, pred=True):
        if pred and barrier.ended % 2 == phase:
            self.give_way(lambda: barrier.ended % 2 != phase)

    def give_way(self, until):
        """Let the other partitions run, one after the other, until it holds."""
        me, tried = threading.get_ident(), 0
        while not until():
            assert tried <= 2 * len(self.running), "waited for what is not on its way"
            tried += 1
            self.pass_on(me)

    def pass_on(self, me):
        if len(self.running) < 2:
            return
        self.running.append(self.running.pop(0))
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.running[0] == me)

    def specialize(self, partitions, warps, registers):
        """The last partition loads, the others read."""
        faults = []

        def run(function, args):
            me = threading.get_ident()
            with self.turn:
                self.turn.wait_for(lambda: bool(self.running) and self.running[0] == me)
                try:
                    function(*args)
                except BaseException as fault:
                    faults.append(fault)
                self.running.remove(me)
                self.turn.notify_all()

        threads = [threading.Thread(target=run, args=one, daemon=True) for one in partitions]
        with self.turn:
            for thread in threads:
                thread.start()
            self.running = [thread.ident for thread in threads if thread.ident is not None]
            self.turn.notify_all()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    @staticmethod
    def copy(source, at, barrier, to, pred=True):
        if pred:
            tile = source.tile(tuple(map(int, at)))
            to.fill(tile)
            barrier.arrive(0, tile.numel() * tile.element_size())

    def product(self, a, b, acc, is_async, use_acc=True):
        assert is_async
        places = [
            one.place if isinstance(one, Turned) else one
            for one in (a, b)
            if not isinstance(one, Tensor)
        ]
        for place in places:
            place.begin()
        self.issued.setdefault(threading.get_ident(), []).append(tuple(places))
        left, right = (one if isinstance(one, Tensor) else one.value for one in (a, b))
        product = left.to(acc.dtype) @ right.to(acc.dtype)
        return acc + product if use_acc else product

    def products_done(self, num_outstanding, deps):
        issued = self.issued.get(threading.get_ident(), [])
        while len(issued) > num_outstanding:
            for place in issued.pop(0):
                place.end()
        return deps[0] if len(deps) == 1 else deps

    def allocate(self, dtype, shape, layout):
        """Barriers; places of a ring, which are loaded by TMA, read by products if they are
        matrices; or one place or several, which stay as they are after a product."""
        if dtype == torch.int64:
            return _Memory(Barrier() for _ in range(shape[0]))
        dtype = getattr(dtype, "of", dtype)
        if layout == Descriptor.layout:
            readers = self.readers if len(shape) == 3 else 0
            return _Memory(Place(readers, dtype, *shape[1:]) for _ in range(shape[0]))
        if len(shape) == 3:
            return _Memory(Kept(dtype, *shape[1:]) for _ in range(shape[0]))
        return Kept(dtype, *shape)


def _load(pointer, mask=None, other=0, cache_modifier=""):
    offset, inside = pointer.cells(mask)
    found = torch.full(offset.shape, other, dtype=pointer.flat.dtype)
    found[inside] = pointer.flat[offset[inside]]
    return found


def _store(pointer, values, mask=None):
    offset, inside = pointer.cells(mask)
    pointer.flat[offset[inside]] = (
        torch.as_tensor(values).expand(offset.shape)[inside].to(pointer.flat.dtype)
    )


def _atomic_add(pointer, values, mask=None, sem="", scope=""):
    offset, inside = pointer.cells(mask)
    before = pointer.flat[torch.where(inside, offset, 0)].clone()
    pointer.flat.index_add_(
        0,
        offset[inside],
        torch.as_tensor(values, dtype=pointer.flat.dtype).expand(offset.shape)[inside],
    )
    return before if offset.dim() else int(before)


class _Memory(list[Any]):
    def index(self, place):
        return self[place]


def _where(which, one, other):
    if isinstance(one, Tensor) and one.dim():
        return torch.where(which, one, other)
    return (
        torch.where(which, torch.as_tensor(one), other)
        if isinstance(which, Tensor) and which.dim()
        else one
        if which
        else other
    )


def _of_tensors(whole, numbers):
    return lambda one, other: (
        whole(*map(torch.as_tensor, (one, other)))
        if any(isinstance(side, Tensor) and side.dim() for side in (one, other))
        else numbers(one, other)
    )


def _modules(machine):
    language, gluon, hopper = ModuleType("language"), ModuleType("gluon"), ModuleType("hopper")
    vars(language).update(
        constexpr=lambda value: value, int8=torch.int8, int32=torch.int32, int64=torch.int64,
        float32=torch.float32,
        static_range=range, minimum=_of_tensors(torch.minimum, min),
        maximum=_of_tensors(torch.maximum, max), where=_where,
        program_id=lambda axis: machine.program[axis],
        num_programs=lambda axis: machine.programs[axis],
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        exp2=torch.exp2, log2=torch.log2, max=torch.amax,
        abs=lambda values: values.abs().as_subclass(Value),
        sum=lambda values, axis: values.sum(axis).as_subclass(Value),
        NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), arange=lambda first,
        end, layout: torch.arange(first, end),
        expand_dims=torch.unsqueeze, convert_layout=lambda values, layout: values, load=_load,
        store=_store, atomic_add=_atomic_add,
        allocate_shared_memory=machine.allocate, warp_specialize=machine.specialize,
        **dict.fromkeys(
            (
                "NVMMADistributedLayout",
                "DistributedLinearLayout",
                "DotOperandLayout",
                "SliceLayout",
                "BlockedLayout",
            ),
            _nothing,
        ),
        **dict.fromkeys(("inline_asm_elementwise", "thread_barrier"), _nothing),
    )  # fmt: skip
    vars(gluon).update(
        language=language, jit=lambda function=None, **named: function or (lambda one: one)
    )
    vars(hopper).update(
        mbarrier=SimpleNamespace(
            init=machine.init, MBarrierLayout=_nothing, expect=machine.expect,
            arrive=machine.arrive, wait=machine.wait
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=machine.copy),
        warpgroup_mma=machine.product, warpgroup_mma_wait=machine.products_done,
        fence_async_shared=_nothing,
    )  # fmt: skip
    root = "triton.experimental"
    found = {name: ModuleType(name) for name in ("triton", root, f"{root}.gluon.language.nvidia")}
    vars(found[root]).update(gluon=gluon)
    return found | {
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia.hopper": hopper,
    }


def _nothing(*args, **named):
    return None


@contextmanager
def _instead(modules):
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def interpreted(source, kernel, readers=1):
    """A kernel of a file, as a function of the number of programs, along one axis or several, and
    then its own arguments. readers: products that read a place before it is loaded again."""
    machine = Machine()
    machine.readers = readers
    names = {"__name__": source.stem}
    with _instead(_modules(machine)):
        exec(compile(source.read_text(), str(source), "exec"), names)

    def run(programs, *args, **named):
        machine.programs = programs if isinstance(programs, tuple) else (programs,)
        for machine.program in itertools.product(*map(range, machine.programs)):  # noqa: B020
            names[kernel](*args, **named)
            assert not any(machine.issued.values())
            machine.issued.clear()

    return run
