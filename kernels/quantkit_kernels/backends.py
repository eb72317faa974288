"""Which backend runs which operator here, and why one cannot.

Every backend is a sub-package with `unusable(operator, device) -> reason or None`, and for what it can run `linear(weight, dtype, device)`
and `experts_builder(...)`. They are imported when first asked for, so a missing Triton or torch_npu costs nothing.
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
    "rope",
    "mla_decode",
)
BACKENDS = ("reference",)


@dataclass(frozen=True)
class Row:
    """One line of the table: an operator, a backend, whether it runs on the device, and the reason where it does not."""

    operator: str
    backend: str
    usable: bool
    reason: str


def module(backend: str) -> ModuleType:
    return importlib.import_module(f"quantkit_kernels.{backend}")


def why_unusable(operator: str, backend: str, device: torch.device) -> str | None:
    """None where `backend` runs `operator` on `device`, else the reason in a few words."""
    reason: str | None = module(backend).unusable(operator, device)
    return reason


@functools.cache
def find(operator: str, backend: str, device: torch.device) -> ModuleType:
    """The module that runs `operator`; see `choose`. Remembered, for it is asked at every call."""
    return module(choose(operator, backend, device))


def choose(operator: str, backend: str, device: torch.device) -> str:
    """The backend to run `operator` with: the one asked for, or with "auto" the first usable one. ValueError with the reason otherwise."""
    assert operator in OPERATORS, operator
    if backend == "auto":
        return next(name for name in reversed(BACKENDS) if why_unusable(operator, name, device) is None)
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known, expected auto, {', '.join(BACKENDS)}")
    reason = why_unusable(operator, backend, device)
    if reason is not None:
        raise ValueError(f"backend: {backend} cannot run {operator} on {device.type}: {reason}")
    return backend


def table(device: str | torch.device = "cpu") -> list[Row]:
    """Every operator x backend on `device`."""
    target = torch.device(device)
    return [
        Row(operator, backend, reason is None, reason or "")
        for operator in OPERATORS
        for backend in BACKENDS
        for reason in [why_unusable(operator, backend, target)]
    ]
