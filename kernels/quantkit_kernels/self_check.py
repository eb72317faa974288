"""The acceptance test of a new machine: every operator of every usable backend at DeepSeek-R1
shapes, its error and its speed.

A device runs the shapes whole. The CPU runs them with fewer output features and experts, so that
the check stays under a minute; K, which decides the rounding, is R1's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.backends import BACKENDS, BY_NAME_ONLY, module, why_unusable
from quantkit_kernels.experts import ExpertsBuilder
from quantkit_kernels.function_cases import cos_sin, function_cases, rotation_and_cache
from quantkit_kernels.linear import prepare
from quantkit_kernels.paged import (
    pairs_together,
)
from quantkit_kernels.prolog import MlaProlog, MlaWeights, prepare_mla_prolog
from quantkit_kernels.samples import (
    TOLERANCE,
    distance,
    exact_expert,
    exact_linear,
    random_weight,
)
from quantkit_kernels.sizes import EXPERTS, HIDDEN, INTERMEDIATE, R1_LINEARS, TOP_K
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from quantkit_kernels.weights import Weight, rows, shape

GRIDS = ("int4-asym-128", "int8", "fp4", "dense")
NARROW = "int8-narrow"
"""Experts with activations of 8 bits and codes of 4, where a backend holds them in 4."""
LINEARS = {name: R1_LINEARS[name] for name in ("q_a+kv_a", "q_b", "o")} | {
    "gate_up": R1_LINEARS["shared_gu"],
    "down": R1_LINEARS["shared_dn"],
}
_SAMPLED_ROWS = 512


@dataclass(frozen=True)
class Measurement:
    """One operator on one backend. `fraction` is of the device's measured read bandwidth, for
    operators that stream weights or a cache."""

    operator: str
    backend: str
    case: str
    error: float
    tolerance: float
    microseconds: float
    gigabytes_per_second: float
    fraction: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def check(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Iterator[Measurement]:
    """Yields one measurement per operator, backend and case as it is made. Inputs are fresh random
    numbers at every run."""
    target = torch.device(device)
    bandwidth = read_bandwidth(target)
    rng = torch.Generator(target)
    rng.seed()
    yield from _linears(target, dtype, rng, bandwidth)
    yield from _experts(target, dtype, rng, bandwidth)
    yield from _prologs(target, dtype, rng, bandwidth)
    yield from functions(target, dtype, rng, bandwidth)


def _backends(
    operator: str, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]
) -> list[str]:
    """Those that run the operator as its scheme says; the slow reference only where nothing else
    does, Triton's interpreter never: at these sizes it takes hours."""
    others = [
        name
        for name in BACKENDS
        if name not in BY_NAME_ONLY and (name, device.type) != ("triton", "cpu")
    ]
    usable = [
        name for name in others if why_unusable(operator, name, device, dtype, shapes) is None
    ]
    chosen = [
        name
        for name in usable
        if name not in ("reference", "expanded")
        or (name == "expanded" and operator.endswith("_dense"))
    ]
    return chosen or ["reference"]


def _linears(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    whole = device.type != "cpu"
    for grid in GRIDS:
        operator = f"linear_{grid.split('-')[0]}"
        for name, (n, k) in LINEARS.items():
            weight = random_weight(grid, n if whole else min(n, 1024), k, rng)
            for backend in _backends(operator, device, dtype, (shape(weight),)):
                linear = prepare(weight, backend=backend, dtype=dtype)
                for m in (1, 16, 128) if whole else (1, 16):
                    x = torch.randn(m, k, generator=rng, device=device).to(dtype)
                    sampled = rows(weight, 0, _SAMPLED_ROWS)
                    error = distance(linear(x)[:, :_SAMPLED_ROWS], exact_linear(x, sampled))
                    copies = [
                        prepare(weight, backend=backend, dtype=dtype)
                        for _ in range(copies_beyond_cache(linear.nbytes, device) - 1)
                    ]
                    calls = (
                        [_call(one, x) for one in (linear, *copies)]
                        if whole
                        else [_call(linear, x)]
                    )
                    seconds = seconds_per_call(calls, device)
                    yield _measured(
                        operator,
                        backend,
                        f"{name} M={m}",
                        error,
                        dtype,
                        seconds,
                        linear.nbytes,
                        bandwidth,
                    )


def _experts(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    whole = device.type != "cpu"
    count, intermediate, top_k = (EXPERTS, INTERMEDIATE, TOP_K) if whole else (4, 256, 2)
    shapes = ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
    for grid in (*GRIDS, NARROW):
        operator = f"experts_{grid.split('-')[0]}"
        few = [
            [
                random_weight(grid, n, k, rng)
                for n, k in (shapes[1][::-1], shapes[1][::-1], shapes[1])
            ]
            for _ in range(4)
        ]
        for backend in _backends(operator, device, dtype, shapes):
            if grid == NARROW and not getattr(module(backend), "NARROW_EXPERTS", False):
                continue
            builder = ExpertsBuilder(count, backend=backend, dtype=dtype, device=device)
            for index in range(count):
                builder.add(index, *few[index % 4])
            experts = builder.finish()
            for tokens in (1, 16, 64) if whole else (1, 8):
                x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
                ids = (
                    torch.rand(tokens, count, generator=rng, device=device)
                    .topk(top_k, dim=-1)
                    .indices
                )
                weights = torch.rand(tokens, top_k, generator=rng, device=device)
                error = distance(experts(x, ids, weights), exact_experts(x, ids, weights, few))
                seconds = seconds_per_call([_call(experts, x, ids, weights)], device)
                nbytes = experts.nbytes * ids.unique().numel() // count
                name = f"{'W4A8 ' if grid == NARROW else ''}E={count} T={tokens}"
                yield _measured(operator, backend, name, error, dtype, seconds, nbytes, bandwidth)


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, few: list[list[Weight]]) -> Tensor:
    """In float64; expert e has the weights few[e % 4]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for index, (gate, up, down) in enumerate(few):
        share = (weights.double() * (ids % len(few) == index)).sum(dim=-1, keepdim=True)
        out += share * exact_expert(x, gate, up, down)
    return out


def _prologs(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    """One of eight ranks' share of a layer, against the reference on float32 copies."""
    whole, tokens = device.type != "cpu", 8
    hidden, heads = (HIDDEN, 16) if whole else (1024, 2)
    for grid in ("int8", "dense"):
        q_a, q_b, kv_a = (
            random_weight(grid, n, k, rng)
            for n, k in ((1536, hidden), (heads * 192, 1536), (576, hidden))
        )
        kv_b = torch.randn(heads, 256, 512, generator=rng, device=device) / 512**0.5
        gains = [1 + 0.1 * torch.randn(size, generator=rng, device=device) for size in (1536, 512)]
        kv_b, gains = kv_b.to(dtype), [gain.to(dtype) for gain in gains]
        x, slots = (
            torch.randn(tokens, hidden, generator=rng, device=device).to(dtype),
            torch.arange(tokens, device=device),
        )
        # Angles that 16 bits hold: an operator may want them so.
        angles = [
            table.to(dtype).float()
            for table in cos_sin(torch.rand(tokens, 32, generator=rng, device=device) * 6)
        ]
        wide = MlaWeights(q_a, q_b, kv_a, kv_b.float(), *(gain.float() for gain in gains))
        exact = _prolog_results(wide, x.float(), angles, slots, "reference")[1]
        for backend in _backends("mla_prolog", device, dtype, ()):
            weights = MlaWeights(q_a, q_b, kv_a, kv_b, gains[0], gains[1])
            prolog, found = _prolog_results(weights, x, angles, slots, backend)
            error = max(
                distance(one, other.double()) for one, other in zip(found[0], exact[0], strict=True)
            )
            copies = [
                _prolog_results(weights, x, angles, slots, backend)
                for _ in range(copies_beyond_cache(prolog.nbytes, device) - 1)
            ]
            calls = [
                _call(one.query, *arguments) for one, (_, arguments) in ((prolog, found), *copies)
            ]
            seconds = seconds_per_call(calls, device)
            yield _measured(
                "mla_prolog",
                backend,
                f"{grid} heads={heads} T={tokens}",
                error,
                dtype,
                seconds,
                prolog.nbytes,
                bandwidth,
            )


def _prolog_results(
    weights: MlaWeights, x: Tensor, angles: list[Tensor], slots: Tensor, backend: str
) -> tuple[MlaProlog, tuple[tuple[Tensor, ...], tuple[Any, ...]]]:
    """A backend's prolog; what it computes, channels in pairs; and the arguments it was called
    with."""
    prolog = prepare_mla_prolog(weights, 64, eps=1e-6, backend=backend, dtype=x.dtype)
    rotation, cache = rotation_and_cache(
        angles[0], angles[1], torch.zeros(1, 128, 576, dtype=x.dtype, device=x.device), backend
    )
    absorbed, q_pe = prolog.query(x, rotation, cache, slots)
    if isinstance(cache, Tensor):
        latents, keys = cache.split([512, 64], dim=-1)
    else:
        latents, keys, q_pe = cache[0], pairs_together(cache[1]), pairs_together(q_pe)
    return prolog, (
        (absorbed, q_pe, latents[0, : len(x)], keys[0, : len(x)]),
        (x, rotation, cache, slots),
    )


def functions(
    device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float
) -> Iterator[Measurement]:
    """The operators without packed weights."""
    for case in function_cases(device, dtype, rng):
        for backend in _backends(case.operator, device, dtype, ()):
            calls = case.calls(backend)
            error = max(
                distance(out, exact) for out, exact in zip(calls[0](), case.exact, strict=True)
            )
            seconds = seconds_per_call(calls, device)
            yield _measured(
                case.operator, backend, case.name, error, dtype, seconds, case.nbytes, bandwidth
            )


def _call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _measured(
    operator: str,
    backend: str,
    case: str,
    error: float,
    dtype: torch.dtype,
    seconds: float,
    nbytes: int,
    bandwidth: float,
) -> Measurement:
    # An int8 step is 1/127 of a row's largest value: what is rounded twice may fall either way.
    tolerance = 2e-2 if operator in ("experts_int8", "mla_prolog") else TOLERANCE[dtype]
    rate = nbytes / seconds
    return Measurement(
        operator, backend, case, error, tolerance, seconds * 1e6, rate / 1e9, rate / bandwidth
    )
