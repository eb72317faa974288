"""The acceptance test of a new machine: every operator of every usable backend at DeepSeek-R1 shapes, its error and its speed.

A device runs the shapes whole. The CPU runs them with fewer output features and experts, so that the check stays under a minute; K, which
decides the rounding, is R1's.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels import functional
from quantkit_kernels.backends import BACKENDS, why_unusable
from quantkit_kernels.experts import ExpertsBuilder
from quantkit_kernels.linear import prepare
from quantkit_kernels.samples import TOLERANCE, distance, exact_expert, exact_linear, random_weight
from quantkit_kernels.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from quantkit_kernels.weights import Weight, rows, shape

GRIDS = ("int4-asym-128", "int8", "fp4", "dense")
LINEARS = {"q_a+kv_a": (2112, 7168), "q_b": (24576, 1536), "o": (7168, 16384), "gate_up": (4096, 7168), "down": (7168, 2048)}
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 256, 8
_SAMPLED_ROWS = 512


@dataclass(frozen=True)
class Measurement:
    """One operator on one backend. `fraction` is of the device's measured read bandwidth, for operators that stream weights or a cache."""

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


def check(device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> Iterator[Measurement]:
    """Yields one measurement per operator, backend and case as it is made. Inputs are fresh random numbers at every run."""
    target = torch.device(device)
    bandwidth = read_bandwidth(target)
    rng = torch.Generator(target)
    rng.seed()
    yield from _linears(target, dtype, rng, bandwidth)
    yield from _experts(target, dtype, rng, bandwidth)
    yield from _functions(target, dtype, rng, bandwidth)


def _backends(operator: str, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]) -> list[str]:
    """Those that run the operator; the slow reference only where nothing else does."""
    usable = [name for name in BACKENDS if why_unusable(operator, name, device, dtype, shapes) is None]
    chosen = [name for name in usable if name not in ("reference", "dense") or (name == "dense" and operator.endswith("_dense"))]
    return chosen or ["reference"]


def _linears(device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float) -> Iterator[Measurement]:
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
                    copies = [prepare(weight, backend=backend, dtype=dtype) for _ in range(copies_beyond_cache(linear.nbytes, device) - 1)]
                    calls = [_call(one, x) for one in (linear, *copies)] if whole else [_call(linear, x)]
                    seconds = seconds_per_call(calls, device)
                    yield _measured(operator, backend, f"{name} M={m}", error, dtype, seconds, linear.nbytes, bandwidth)


def _experts(device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float) -> Iterator[Measurement]:
    whole = device.type != "cpu"
    count, intermediate, top_k = (EXPERTS, INTERMEDIATE, TOP_K) if whole else (4, 256, 2)
    shapes = ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
    for grid in GRIDS[:3]:
        operator = f"experts_{grid.split('-')[0]}"
        few = [[random_weight(grid, n, k, rng) for n, k in (shapes[1][::-1], shapes[1][::-1], shapes[1])] for _ in range(4)]
        for backend in _backends(operator, device, dtype, shapes):
            builder = ExpertsBuilder(count, backend=backend, dtype=dtype, device=device)
            for index in range(count):
                builder.add(index, *few[index % 4])
            experts = builder.finish()
            for tokens in (1, 16, 64) if whole else (1, 8):
                x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
                ids = torch.rand(tokens, count, generator=rng, device=device).topk(top_k, dim=-1).indices
                weights = torch.rand(tokens, top_k, generator=rng, device=device)
                error = distance(experts(x, ids, weights), exact_experts(x, ids, weights, few))
                seconds = seconds_per_call([_call(experts, x, ids, weights)], device)
                nbytes = experts.nbytes * ids.unique().numel() // count
                yield _measured(operator, backend, f"E={count} T={tokens}", error, dtype, seconds, nbytes, bandwidth)


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, few: list[list[Weight]]) -> Tensor:
    """In float64; expert e has the weights few[e % 4]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for index, (gate, up, down) in enumerate(few):
        share = (weights.double() * (ids % len(few) == index)).sum(dim=-1, keepdim=True)
        out += share * exact_expert(x, gate, up, down)
    return out


def _functions(device: torch.device, dtype: torch.dtype, rng: torch.Generator, bandwidth: float) -> Iterator[Measurement]:
    tokens, heads, length = 8, 128, 640
    x = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
    residual = torch.randn(tokens, HIDDEN, generator=rng, device=device).to(dtype)
    weight = torch.rand(HIDDEN, generator=rng, device=device).to(dtype)
    logits = torch.randn(tokens, EXPERTS, generator=rng, device=device)
    bias = torch.randn(EXPERTS, generator=rng, device=device) * 0.1
    positions = torch.arange(tokens, device=device)
    angles = torch.rand(64, 32, generator=rng, device=device)
    q_pe = torch.randn(tokens, heads, 64, generator=rng, device=device).to(dtype)
    q = torch.randn(tokens, heads, 576, generator=rng, device=device).to(dtype)
    cache = torch.randn(tokens * length // 64, 64, 576, generator=rng, device=device).to(torch.bfloat16)
    block_table = torch.randperm(tokens * length // 64, generator=rng, device=device).view(tokens, -1).int()
    seq_lens = torch.full((tokens,), length, dtype=torch.int32, device=device)
    routing = {"top_k": TOP_K, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    scale = 1 / math.sqrt(192)
    cases: dict[str, tuple[Callable[[Tensor, str], Tensor], Tensor, int]] = {
        "rms_norm": (lambda a, b: functional.rms_norm(a, weight.to(a.dtype), 1e-6, backend=b), x, 0),
        "add_rms_norm": (lambda a, b: functional.add_rms_norm(a, residual.to(a.dtype), weight.to(a.dtype), 1e-6, backend=b)[0], x, 0),
        "silu_and_mul": (lambda a, b: functional.silu_and_mul(a, backend=b), x, 0),
        "route": (lambda a, b: functional.route(a, bias, **routing, backend=b)[1], logits, 0),  # type: ignore[arg-type]
        "rope": (lambda a, b: functional.rope(a, positions, angles.cos(), angles.sin(), backend=b), q_pe, 0),
        "mla_decode": (
            lambda a, b: functional.mla_decode(a, cache, block_table, seq_lens, scale=scale, kv_lora_rank=512, backend=b),
            q,
            cache.numel() * 2,
        ),
    }
    for operator, (run, argument, nbytes) in cases.items():
        # These are the same few lines of torch in any precision, so the reference on float32 copies is exact enough to judge by.
        exact = run(argument.float(), "reference").double()
        for backend in _backends(operator, device, dtype, ()):
            error = distance(run(argument, backend), exact)
            seconds = seconds_per_call([_call(run, argument, backend)], device)
            yield _measured(operator, backend, f"T={tokens}", error, dtype, seconds, nbytes, bandwidth)


def _call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _measured(
    operator: str, backend: str, case: str, error: float, dtype: torch.dtype, seconds: float, nbytes: int, bandwidth: float
) -> Measurement:
    # An int8 step is 1/127 of a row's largest value: what is rounded twice may fall either way.
    tolerance = 2e-2 if operator == "experts_int8" else TOLERANCE[dtype]
    rate = nbytes / seconds
    return Measurement(operator, backend, case, error, tolerance, seconds * 1e6, rate / 1e9, rate / bandwidth)
