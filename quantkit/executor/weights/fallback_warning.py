"""What is said where a quantized weight is left to the reference: how slow it is, measured on one
linear, and what would help."""

import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from quantkit_kernels import accelerator, backends, prepare
from quantkit_kernels.weights import Weight, shape

_HELP = {"cuda": ("triton", "cuda"), "npu": ("ascend", "torch_npu")}
"""By device type: the backends that would serve it, the easiest to have first. HfFallback the CPU's
own."""


def warn_slow(operator: str, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
    """Warn that `operator` is served by the reference."""
    warnings.warn(slowness(operator, weight, device, dtype), RuntimeWarning, stacklevel=2)


def slowness(operator: str, weight: Weight, device: torch.device, dtype: torch.dtype) -> str:
    """That `operator` is served by the reference, with the times of one token over this weight W[N,
    K] and why others do not serve."""
    n, k = shape(weight)
    x = torch.zeros(1, k, dtype=dtype, device=device)
    linear, dense = (
        prepare(weight, backend="reference", dtype=dtype, device=device),
        torch.zeros(n, k, dtype=dtype, device=device),
    )
    seconds, dense_seconds = (
        _seconds(lambda: linear(x), device),
        _seconds(lambda: F.linear(x, dense), device),
    )
    reasons = {
        name: backends.why_unusable(operator, name, device, dtype, ((n, k),))
        for name in _HELP.get(device.type, ("cpu",))
    }
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    return (
        f"SLOW: {operator} runs on the reference, which expands weights at every call: "
        f"{seconds * 1e3:.3g} ms a token for one weight of {n} x "
        f"{k}, {seconds / dense_seconds:.0f} times as long as not quantized. {why}"
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The best of three calls after one to warm up."""
    driver, times = accelerator.module(device), []
    for _ in range(4):
        began = time.perf_counter()
        call()
        if driver is not None:
            driver.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])
