"""Which backend runs which operator here, and why one cannot.

Every backend is a sub-package with `unusable(operator, device, dtype, shapes) -> reason or None`,
and for what it can run `linear(weight, dtype, device)`, `experts_layout(num_experts, gate, down,
dtype, device)` or the function of functional.py's name. They are imported when first asked for, so
a missing Triton or torch_npu costs nothing.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

KINDS = ("int4", "int8", "w8a16", "fp4", "dense")
OPERATORS = (
    *(f"linear_{kind}" for kind in KINDS),
    *(f"experts_{kind}" for kind in KINDS),
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "gate_and_mul",
    "gate_and_rotate",
    "mx_rounded",
    "route",
    "route_chosen",
    "moe_gate",
    "rope",
    "rotary_angles",
    "likeliest",
    "mla_prepare",
    "mla_prolog",
    "mla_decode",
    "mla_prefill",
    "gqa_prepare",
    "gqa_decode",
    "gqa_prefill",
    "delta_step",
    "delta_prefill",
    "rotate_heads",
    "rotate_queries",
    "store_recent",
    "pool_entries",
    "compressed_attend",
    "weigh_streams",
    "merge_streams",
    "mix_streams",
    "index_prepare",
    "index_topk",
    "float32_linear",
)
BACKENDS = ("reference", "expanded", "scaled_mm", "cpu", "triton", "cuda", "ascend", "torch_npu")
BY_NAME_ONLY = ("scaled_mm",)
"""Backends that "auto" never takes, for they compute something else than the weight's scheme
says."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class OperatorRow:
    """One line of the table: an operator, a backend, whether it runs on the device, the reason
    where it does not, and its limits where it
    does not run everything. taken: whether it is the one that serves the operator there."""

    operator: str
    backend: str
    usable: bool
    reason: str
    taken: bool = False


def module(backend: str) -> ModuleType:
    return importlib.import_module(f"quantkit_kernels.{backend}")


def why_unusable(
    operator: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shapes: tuple[Shape, ...] = (),
) -> str | None:
    """None where `backend` runs `operator` on `device`, else the reason in a few words.

    With a compute dtype and weights' shapes [N, K] the answer is for those; without, it is whether
    some can be run.
    """
    reason: str | None = module(backend).unusable(operator, device, dtype, shapes)
    return reason


_PREFERRED: dict[str, str] = {}
"""By device type: the backend that "auto" takes first in this process."""
_IN_USE: ContextVar[str] = ContextVar("use_backend", default="auto")
"""What "auto" takes before that, inside `use_backend`."""


def check_runs(backend: str, device: torch.device) -> None:
    """ValueError for a backend that is not known, or serves no operator on devices of this type."""
    if backend != "auto":
        _check_name(backend)
        reasons = [why_unusable(operator, backend, device) for operator in OPERATORS]
        if None not in reasons:
            raise ValueError(f"backend: {backend} runs nothing on {device.type}: {reasons[0]}")


def prefer(backend: str, device: torch.device) -> None:
    """From now on "auto" takes `backend` on devices of this type, for every operator that it has;
    with "auto" the best one again.

    For a whole process; of a part of it see `use_backend`. ValueError as `check_runs` has it.
    """
    check_runs(backend, device)
    _PREFERRED[device.type] = backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Inside, in this thread, "auto" takes `backend` for every operator that it has, whatever the
    process prefers; "auto" changes nothing.

    A model that was loaded for a backend computes so, and another one by its own.
    """
    if backend == "auto":
        yield
        return
    before = _IN_USE.set(backend)
    try:
        yield
    finally:
        _IN_USE.reset(before)


class Computes(Protocol):
    """What was made for a backend, or for "auto"."""

    backend: str


Own = TypeVar("Own", bound=Computes)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def by_own_backend(
    method: Callable[Concatenate[Own, Arguments], Result],
) -> Callable[Concatenate[Own, Arguments], Result]:
    """A method whose operators are run by its object's backend."""

    @functools.wraps(method)
    def run(self: Own, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with use_backend(self.backend):
            return method(self, *arguments, **named)

    return run


def _first(backend: str, device: torch.device) -> str:
    """What "auto" takes before all else here; another backend as it is."""
    if backend != "auto":
        return backend
    here = _IN_USE.get()
    return _PREFERRED.get(device.type, "auto") if here == "auto" else here


SINKS = ("gqa_decode", "gqa_prefill")
"""Operators that take attention sinks; of the backends those that name them in a SINKS of their
own."""


def find_with_sinks(operator: str, backend: str, device: torch.device) -> ModuleType:
    """As `find`, of the backends that take attention sinks. With "auto" the best of these where the
    one taken does not."""
    return _found_with_sinks(operator, backend == "auto", _first(backend, device), device)


@functools.cache
def _found_with_sinks(operator: str, auto: bool, backend: str, device: torch.device) -> ModuleType:
    found = _found(operator, auto, backend, device)
    if operator in getattr(found, "SINKS", ()):
        return found
    if not auto:
        raise ValueError(f"backend: {backend} runs {operator} without attention sinks")
    able = (name for name in reversed(BACKENDS) if operator in getattr(module(name), "SINKS", ()))
    return module(
        next(
            name
            for name in able
            if why_unusable(operator, name, device) is None
            and (name, device.type) != ("triton", "cpu")
        )
    )


def find(operator: str, backend: str, device: torch.device) -> ModuleType:
    """The module that runs `operator`; see `choose`. Remembered, for it is asked at every call."""
    return _found(operator, backend == "auto", _first(backend, device), device)


@functools.cache
def _found(operator: str, auto: bool, backend: str, device: torch.device) -> ModuleType:
    return module(serving(operator, backend, device) if auto else choose(operator, backend, device))


def forget() -> None:
    """What was found before, where something can be used that could not, or the other way round."""
    _found.cache_clear()
    _found_with_sinks.cache_clear()


def choose(
    operator: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shapes: tuple[Shape, ...] = (),
) -> str:
    """The backend to run `operator` with: the one asked for, or with "auto" that of `use_backend`,
    the preferred one, else the best usable. ValueError with the reason otherwise.

    "auto" never expands a quantized weight: it takes backend "expanded" for unquantized weights
    only.
    """
    assert operator in OPERATORS, operator
    if backend == "auto":
        return serving(operator, _first(backend, device), device, dtype, shapes)
    _check_name(backend)
    reason = why_unusable(operator, backend, device, dtype, shapes)
    if reason is not None:
        raise ValueError(f"backend: {backend} cannot run {operator} on {device.type}: {reason}")
    return backend


def serving(
    operator: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shapes: tuple[Shape, ...] = (),
) -> str:
    """The backend asked for where it runs `operator`, else the best usable one."""
    candidates = _candidates(operator, device)
    if backend != "auto":
        candidates.insert(0, backend)
    chosen = next(
        name for name in candidates if why_unusable(operator, name, device, dtype, shapes) is None
    )
    leaves = chosen == "cuda" != backend and module("cuda").leaves(operator, shapes)
    if leaves and why_unusable(operator, "triton", device, dtype, shapes) is None:
        return "triton"
    return chosen


def _candidates(operator: str, device: torch.device) -> list[str]:
    """Backends that "auto" may take, the best first."""
    found = [
        name
        for name in reversed(BACKENDS)
        if name not in BY_NAME_ONLY and (name != "expanded" or operator.endswith("_dense"))
    ]
    if device.type == "cpu":
        found.remove("triton")  # its interpreter, for tests
    return found


def serving_gates(
    kind: str,
    silu: bool,
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shapes: tuple[Shape, ...] = (),
) -> str:
    """The backend of experts with biases or a `Gating` of their own, of weights of a kind: the one
    that serves linears, which a loop runs, but on a GPU the best of those whose kernels compute a
    whole layer of them, where that one's do not. silu: they have a clamped SiLU and no biases."""
    first = _first(backend, device)
    chosen = serving(f"linear_{kind}", first, device, dtype, shapes)
    if device.type != "cuda" or computes_gates(chosen, kind, silu) or first == "reference":
        return chosen
    able = (
        name for name in _candidates(f"experts_{kind}", device) if computes_gates(name, kind, silu)
    )
    return next(
        (
            name
            for name in able
            if why_unusable(f"experts_{kind}", name, device, dtype, shapes) is None
        ),
        chosen,
    )


def computes_gates(backend: str, kind: str, silu: bool) -> bool:
    """Whether a backend's kernels compute a whole layer of experts as of `serving_gates`: its
    `experts_layout` then takes a `Gating`, too."""
    found = getattr(module(backend), "computes_gates", None)
    return found is not None and bool(found(kind, silu))


def _check_name(backend: str) -> None:
    if backend == "dense":
        raise ValueError("backend: 'dense' is now called 'expanded'")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known, expected auto, {', '.join(BACKENDS)}")


def table(device: str | torch.device = "cpu", backend: str = "auto") -> list[OperatorRow]:
    """Every operator x backend on `device`, and which of them serve it where `backend` is asked
    for."""
    target = torch.device(device)
    if backend != "auto":
        _check_name(backend)
    return [
        OperatorRow(
            operator, name, reason is None, reason or _limits(module(name), operator), name == taken
        )
        for operator in OPERATORS
        for taken in [serving(operator, backend, target)]
        for name in BACKENDS
        for reason in [why_unusable(operator, name, target)]
    ]


def _limits(found: ModuleType, operator: str) -> str:
    reasons = [getattr(found, "LIMITS", {}).get(operator, "")]
    if operator in SINKS and operator not in getattr(found, "SINKS", ()):
        reasons.append("attention sinks: another backend")
    return "; ".join(filter(None, reasons))
