"""An interpreter of Gluon kernels on the CPU, as far as wgmma_kernel.py goes: the same source over torch tensors, program after program.

Triton's own interpreter does not take Gluon. Layouts mean nothing here; what is refused is what a card would hang or err on: a barrier that
is waited for while nothing is on its way, a place that is loaded before its product is done, an address outside a tensor.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Descriptor:
    """A matrix as TMA reads it: tiles of `block`, zeros outside."""

    def __init__(self, matrix: Tensor, block: tuple[int, int]) -> None:
        self.matrix, self.block, self.layout = matrix, block, None

    def tile(self, at: tuple[int, int]) -> Tensor:
        found = torch.zeros(self.block, dtype=self.matrix.dtype)
        part = self.matrix[at[0] : at[0] + self.block[0], at[1] : at[1] + self.block[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class Pointer:
    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        assert flat.dim() == 1
        self.flat, self.offset, self.dtype = flat, offset, SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + more)

    def cells(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offset, inside = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask))
        assert not ((offset < 0) | (offset >= self.flat.numel()))[inside].any(), "outside the tensor"
        return offset, inside


class Place:
    """A tile in shared memory: free, full, or being read by a product."""

    def __init__(self) -> None:
        self.value, self.state = torch.empty(0), "free"

    def permute(self, order: tuple[int, int]) -> "Turned":
        return Turned(self, order)


class Turned:
    def __init__(self, place: Place, order: tuple[int, int]) -> None:
        self.place, self.order = place, order


class Barrier:
    """Of one arrival: its phase ends when the bytes that were announced are there."""

    def __init__(self) -> None:
        self.ended, self.announced, self.missing = 0, False, 0

    def arrive(self, count: int) -> None:
        assert self.announced
        self.missing -= count
        if self.missing == 0:
            self.ended, self.announced = self.ended + 1, False


class Machine:
    """One program at a time. Products that were issued keep their places until they have been waited for."""

    def __init__(self) -> None:
        self.program, self.programs = 0, 1
        self.issued: list[tuple[Place, Place]] = []

    def expect(self, barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            assert not barrier.announced, "announced twice"
            barrier.announced, barrier.missing = True, count

    def wait(self, barrier: Barrier, phase: int) -> None:
        assert barrier.ended % 2 != phase, "waited for what is not on its way"

    def copy(self, source: Descriptor, at: list[int], barrier: Barrier, to: Place, pred: bool = True) -> None:
        if pred:
            assert to.state == "free", "loaded before its product was done"
            to.value, to.state = source.tile((at[0], at[1])), "full"
            barrier.arrive(to.value.numel() * to.value.element_size())

    def product(self, a: Place, b: Turned, acc: Tensor, is_async: bool) -> Tensor:
        assert is_async
        for place in (a, b.place):
            assert place.state == "full", place.state
            place.state = "read"
        self.issued.append((a, b.place))
        return acc + a.value.int() @ b.place.value.permute(b.order).int()

    def products_done(self, num_outstanding: int, deps: tuple[Tensor]) -> Tensor:
        while len(self.issued) > num_outstanding:
            for place in self.issued.pop(0):
                place.state = "free"
        return deps[0]


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0, cache_modifier: str = "") -> Tensor:
    offset, inside = pointer.cells(mask)
    found = torch.full(offset.shape, other, dtype=pointer.flat.dtype)
    found[inside] = pointer.flat[offset[inside]]
    return found


def _store(pointer: Pointer, values: Any, mask: Tensor | None = None) -> None:
    offset, inside = pointer.cells(mask)
    pointer.flat[offset[inside]] = torch.as_tensor(values).expand(offset.shape)[inside].to(pointer.flat.dtype)


def _atomic_add(pointer: Pointer, values: Any, mask: Tensor | None = None, sem: str = "", scope: str = "") -> Any:
    offset, inside = pointer.cells(mask)
    before = pointer.flat[torch.where(inside, offset, 0)].clone()
    pointer.flat.index_add_(0, offset[inside], torch.as_tensor(values, dtype=pointer.flat.dtype).expand(offset.shape)[inside])
    return before if offset.dim() else int(before)


class _Memory(list[Any]):
    def index(self, place: int) -> Any:  # type: ignore[override]
        return self[place]


_KINDS = {torch.int64: Barrier, torch.int8: Place}


def _modules(machine: Machine) -> dict[str, ModuleType]:
    language, gluon, hopper = ModuleType("language"), ModuleType("gluon"), ModuleType("hopper")
    vars(language).update(
        constexpr=lambda value: value, int8=torch.int8, int32=torch.int32, int64=torch.int64, float32=torch.float32,
        static_range=range, minimum=min, maximum=max, where=lambda which, one, other: one if which else other,
        program_id=lambda axis: machine.program, num_programs=lambda axis: machine.programs,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), arange=lambda first, end, layout: torch.arange(first, end),
        expand_dims=torch.unsqueeze, convert_layout=lambda values, layout: values, load=_load, store=_store, atomic_add=_atomic_add,
        allocate_shared_memory=lambda dtype, shape, layout: _Memory(_KINDS[dtype]() for _ in range(shape[0])),
        **dict.fromkeys(("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "inline_asm_elementwise", "thread_barrier"), _nothing),
    )  # fmt: skip
    vars(gluon).update(language=language, jit=lambda function=None, **named: function or (lambda one: one))
    vars(hopper).update(
        mbarrier=SimpleNamespace(init=_nothing, MBarrierLayout=_nothing, expect=machine.expect, wait=machine.wait),
        tma=SimpleNamespace(async_copy_global_to_shared=machine.copy),
        warpgroup_mma=machine.product, warpgroup_mma_wait=machine.products_done,
    )  # fmt: skip
    root = "triton.experimental"
    found = {name: ModuleType(name) for name in ("triton", root, f"{root}.gluon.language.nvidia")}
    vars(found[root]).update(gluon=gluon)
    return found | {f"{root}.gluon": gluon, f"{root}.gluon.language": language, f"{root}.gluon.language.nvidia.hopper": hopper}


def _nothing(*args: object, **named: object) -> None:
    return None


@contextmanager
def _instead(modules: dict[str, ModuleType]) -> Any:
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


def interpreted(source: Path, kernel: str) -> Callable[..., None]:
    """A kernel of a file, as a function of the number of programs and then its own arguments."""
    machine = Machine()
    names: dict[str, Any] = {"__name__": source.stem}
    with _instead(_modules(machine)):
        exec(compile(source.read_text(), str(source), "exec"), names)

    def run(programs: int, *args: object, **named: object) -> None:
        machine.programs = programs
        for machine.program in range(programs):
            names[kernel](*args, **named)
            assert not machine.issued

    return run
