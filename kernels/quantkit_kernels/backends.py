"""Which backend runs which operator here, and why one cannot.

Every backend is a sub-package with `unusable(operator, device, dtype, shapes) -> reason or None`, and for what it can run
`linear(weight, dtype, device)`, `experts_layout(num_experts, gate, down, dtype, device)` or the function of functional.py's name. They are
imported when first asked for, so a missing Triton or torch_npu costs nothing.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

KINDS = ("int4", "int8", "fp4", "dense")
OPERATORS = (
    *(f"linear_{kind}" for kind in KINDS),
    *(f"experts_{kind}" for kind in KINDS),
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "route",
    "moe_gate",
    "rope",
    "mla_prepare",
    "mla_prolog",
    "mla_decode",
    "mla_prefill",
    "gqa_prepare",
    "gqa_decode",
    "gqa_prefill",
)
BACKENDS = ("reference", "expanded", "cpu", "triton", "cuda", "ascend", "torch_npu")
Shape = tuple[int, int]


@dataclass(frozen=True)
class OperatorRow:
    """One line of the table: an operator, a backend, whether it runs on the device, the reason where it does not, and its limits where it
    does not run everything."""

    operator: str
    backend: str
    usable: bool
    reason: str


def module(backend: str) -> ModuleType:
    return importlib.import_module(f"quantkit_kernels.{backend}")


def why_unusable(
    operator: str, backend: str, device: torch.device, dtype: torch.dtype | None = None, shapes: tuple[Shape, ...] = ()
) -> str | None:
    """None where `backend` runs `operator` on `device`, else the reason in a few words.

    With a compute dtype and weights' shapes [N, K] the answer is for those; without, it is whether some can be run.
    """
    reason: str | None = module(backend).unusable(operator, device, dtype, shapes)
    return reason


SINKS = ("gqa_decode", "gqa_prefill")
"""Operators that take attention sinks; of the backends those that name them in a SINKS of their own."""


@functools.cache
def find_with_sinks(operator: str, backend: str, device: torch.device) -> ModuleType:
    """As `find`, of the backends that take attention sinks. With "auto" the reference where the best backend does not."""
    found = find(operator, backend, device)
    if operator in getattr(found, "SINKS", ()):
        return found
    if backend != "auto":
        raise ValueError(f"backend: {backend} runs {operator} without attention sinks")
    return module("reference")


@functools.cache
def find(operator: str, backend: str, device: torch.device) -> ModuleType:
    """The module that runs `operator`; see `choose`. Remembered, for it is asked at every call."""
    return module(choose(operator, backend, device))


def choose(operator: str, backend: str, device: torch.device, dtype: torch.dtype | None = None, shapes: tuple[Shape, ...] = ()) -> str:
    """The backend to run `operator` with: the one asked for, or with "auto" the best usable one. ValueError with the reason otherwise.

    "auto" never expands a quantized weight: it takes backend "expanded" for unquantized weights only.
    """
    assert operator in OPERATORS, operator
    if backend == "auto":
        candidates = [name for name in reversed(BACKENDS) if name != "expanded" or operator.endswith("_dense")]
        return next(name for name in candidates if why_unusable(operator, name, device, dtype, shapes) is None)
    if backend == "dense":
        raise ValueError("backend: 'dense' is now called 'expanded'")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known, expected auto, {', '.join(BACKENDS)}")
    reason = why_unusable(operator, backend, device, dtype, shapes)
    if reason is not None:
        raise ValueError(f"backend: {backend} cannot run {operator} on {device.type}: {reason}")
    return backend


def table(device: str | torch.device = "cpu") -> list[OperatorRow]:
    """Every operator x backend on `device`."""
    target = torch.device(device)
    return [
        OperatorRow(operator, backend, reason is None, reason or _limits(module(backend), operator))
        for operator in OPERATORS
        for backend in BACKENDS
        for reason in [why_unusable(operator, backend, target)]
    ]


def _limits(found: ModuleType, operator: str) -> str:
    told = [getattr(found, "LIMITS", {}).get(operator, "")]
    if operator in SINKS and operator not in getattr(found, "SINKS", ()):
        told.append("attention sinks: the reference")
    return "; ".join(filter(None, told))
